"""Coefficients added to, scaled and set at chosen tokens: the plain model with them changed by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, MASKED, assert_near, plain_vectors
from control import continue_prompts
from hand_controlled import controlled_by_hand
from patched_models import LENGTHS, SENTENCES, assert_as_before, state, vectors
from torch import Tensor

from matlens import InputError
from matlens.ffn import added, controlled, scaled
from matlens.ffn.control import CoefficientChange
from matlens.models.changes import changes_of

Models = Callable[[str], Any]
DECODERS = [name for name in ARCHITECTURES if name not in MASKED]
NUMBERS = {"L0D5": 3.0, "L0D11": -2.5, "L2D7": 4.0}  # two of one layer

HOWS: dict[str, tuple[Callable[[float], Any], Callable[[Tensor, float], Tensor]]] = {
    "set": (float, lambda m, number: torch.full_like(m, number)),
    "added": (added, lambda m, number: m + number),
    "scaled": (scaled, lambda m, number: m * number),
}
POSITIONS = torch.tensor([length // 2 for length in LENGTHS])
MASK = torch.arange(max(LENGTHS) - 1)[None] % 2 == torch.arange(len(LENGTHS))[:, None] % 2
WHERES: dict[str, tuple[Any, Callable[[int, int], Tensor]]] = {
    "all": ("all", lambda s, n: torch.ones(n, dtype=torch.bool)),
    "not-first": ("not-first", lambda s, n: torch.arange(n) > 0),
    "last": ("last", lambda s, n: torch.arange(n) == n - 1),
    "positions": (POSITIONS, lambda s, n: torch.arange(n) == POSITIONS[s]),
    "mask": (MASK, lambda s, n: torch.tensor([t >= MASK.shape[1] or bool(MASK[s, t]) for t in range(n)])),
    "new": ("new", lambda s, n: torch.zeros(n, dtype=torch.bool)),  # a pass alone adds no token
}


@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_change_at_every_place_is_that_by_hand(
    name: str, how: str, where: str, small_model: Models, plain_model: Models
) -> None:
    """In a padded batch, padded on either side, as in each sentence read alone."""
    model, plain = small_model(name), plain_model(name)
    make, by_hand = HOWS[how]
    tokens, meant = WHERES[where]
    expected = []
    for s, sentence in enumerate(SENTENCES):
        with controlled_by_hand(name, plain, NUMBERS, by_hand, lambda n, s=s: meant(s, n)):
            expected.append(plain_vectors(name, plain, torch.tensor(sentence))["logits"][0])
    given = {vector: make(number) for vector, number in NUMBERS.items()}
    for side in ("right", "left"):
        with controlled(model, NUMBERS, given, where=tokens):
            ours = vectors(model, side=side)
        for one, logits in zip(ours, expected, strict=True):
            assert_near(one["logits"], logits)


def test_values_of_all_kinds_go_together(small_model: Models, plain_model: Models) -> None:
    model, plain = small_model("llama"), plain_model("llama")
    given = {"L0D5": 3.0, "L0D11": added(-2.5), "L2D7": scaled(4.0)}
    with (
        controlled_by_hand("llama", plain, {"L0D5": 3.0}),
        controlled_by_hand("llama", plain, {"L0D11": -2.5}, HOWS["added"][1]),
        controlled_by_hand("llama", plain, {"L2D7": 4.0}, HOWS["scaled"][1]),
    ):
        expected = plain_vectors("llama", plain, torch.tensor(SENTENCES[0]))["logits"][0]
    with controlled(model, given, given):
        assert_near(vectors(model)[0]["logits"], expected)


def test_what_adds_nothing_or_scales_by_one_changes_nothing(small_model: Models) -> None:
    model = small_model("gemma2")
    before = vectors(model)
    for value in (added(0.0), scaled(1.0)):
        with controlled(model, NUMBERS, value):
            for ours, theirs in zip(vectors(model), before, strict=True):
                assert torch.equal(ours["logits"], theirs["logits"])
    with controlled(model, NUMBERS, scaled(0.0)):
        off = vectors(model)
    with controlled(model, NUMBERS, 0.0):
        for ours, theirs in zip(vectors(model), off, strict=True):
            assert torch.equal(ours["logits"], theirs["logits"])


# Generation

PROMPTS = ["w4 w40 w11 w0 w29 w9", "w17", "w8 w8 w30 w21 w2 w35"]
N_NEW = 6
GENTLE = {"L0D5": 1.6, "L0D11": -1.5, "L2D7": 1.8}


def by_hand(name: str, plain: Any, sentence: Tensor, length: int, how: str, where: str) -> Tensor:
    """Logits of the new tokens of a sentence that has a prompt of so many, in one pass without a cache."""

    def meant(n: int) -> Tensor:
        place = torch.arange(n)
        return {"all": place >= 0, "last": place == length - 1, "new": place >= length}[where]

    with controlled_by_hand(name, plain, GENTLE, HOWS[how][1], meant), torch.inference_mode():
        return torch.as_tensor(plain(sentence[None]).logits[0, length - 1 : -1])


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("where", ["all", "last", "new"])
@pytest.mark.parametrize(
    ("name", "how"), [("gpt2", "set"), ("llama", "added"), ("gemma3", "scaled"), ("gptj", "set")]
)
def test_generation_changes_the_prompts_last_or_the_new_tokens(
    name: str, how: str, where: str, cached: bool, small_model: Models, plain_model: Models
) -> None:
    """In a batch of prompts of different lengths."""
    model, plain = small_model(name), plain_model(name)
    given = {vector: HOWS[how][0](number) for vector, number in GENTLE.items()}
    with controlled(model, GENTLE, given, where=where):  # type: ignore[arg-type]
        generated = model.generate(
            PROMPTS, N_NEW, use_past_kv_cache=cached, output_logits=True, return_type="tokens",
            stop_at_eos=False, do_sample=False, verbose=False,
        )  # fmt: skip
        table = continue_prompts(model, PROMPTS, n_tokens=N_NEW, use_cache=cached, progress=False)
    logits = torch.stack(generated.logits, dim=1)
    for row, ours, prompt, text in zip(generated.sequences, logits, PROMPTS, table["text"], strict=True):
        length = len(prompt.split())
        sentence = row[-length - N_NEW :]
        theirs = by_hand(name, plain, sentence, length, how, where)
        assert_near(ours, theirs)
        assert text.split() == model.tokenizer.decode(sentence[-N_NEW:]).split()
        for other in {"all", "last", "new"} - {where}:  # which tokens are meant makes a difference
            elsewhere = by_hand(name, plain, sentence, length, how, other)
            assert float((elsewhere - theirs).abs().max()) > 1e-4


def test_positions_are_the_prompts_own_with_a_cache_and_without(small_model: Models) -> None:
    model, texts = small_model("llama"), []
    for use_cache in (True, False):
        with controlled(model, GENTLE, added(2.0), where=torch.tensor([2, 5, 0])):
            table = continue_prompts(
                model, sorted(PROMPTS, key=len, reverse=True), n_tokens=4, use_cache=use_cache, progress=False
            )
        texts.append(table["text"].tolist())
    assert texts[0] == texts[1]


def test_a_stream_of_tokens_is_generated_alike(small_model: Models) -> None:
    model = small_model("gpt2")
    options = {"do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
    with controlled(model, GENTLE, where="new"):
        whole = model.generate(PROMPTS[0], N_NEW, **options)
        parts = list(model.generate_stream(PROMPTS[0], N_NEW, **options))
    assert torch.cat([torch.as_tensor(part).reshape(-1) for part in parts])[-N_NEW:].tolist() == (
        whole[0, -N_NEW:].tolist()
    )


def test_an_exception_in_the_middle_of_generating_leaves_the_model_as_it_was(small_model: Models) -> None:
    model, passes = small_model("llama"), []

    def fail(value: Tensor, hook: Any) -> None:
        passes.append(1)
        if len(passes) == 3:
            raise ZeroDivisionError

    def broken_off(context: Any) -> None:
        passes.clear()
        hooks = model.hooks(fwd_hooks=[("blocks.1.hook_out", fail)])
        with pytest.raises(ZeroDivisionError), context, hooks:
            model.generate(PROMPTS[0], N_NEW, do_sample=False, stop_at_eos=False, verbose=False)

    broken_off(nullcontext())  # what the bridge itself leaves behind
    before = state(model)
    for where in ("new", "last", "not-first"):
        broken_off(controlled(model, GENTLE, where=where))  # type: ignore[arg-type]
        assert_as_before(model, before)
        assert not {"generate", "generate_stream"} & {*vars(model), *vars(model.original_model)}
        assert changes_of(model) == ()


# What cannot be done


@pytest.mark.parametrize(
    "where", ["first", None, [True], torch.tensor([-1, 0]), torch.tensor([0.5]), torch.ones(2, 3)]
)
def test_what_is_no_place_is_refused_before_anything_runs(where: Any, small_model: Models) -> None:
    model = small_model("gpt2")
    before = state(model)
    with pytest.raises(InputError, match=r"^where must be"):
        controlled(model, NUMBERS, where=where).__enter__()
    assert_as_before(model, before)


def test_places_of_other_sentences_are_refused_when_they_run(small_model: Models) -> None:
    model = small_model("gpt2")
    with (
        controlled(model, NUMBERS, where=torch.tensor([1, 2])),
        pytest.raises(InputError, match="2 rows for a batch of 4 sentences"),
    ):
        vectors(model)


@pytest.mark.parametrize("number", [float("nan"), "3", None, True, 10**400])
def test_numbers_that_are_none_are_refused(number: Any) -> None:
    for make in (added, scaled, lambda n: CoefficientChange("set", n)):
        with pytest.raises(InputError, match=r"must be a finite number"):
            make(number)
