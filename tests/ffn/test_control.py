"""A model under control is the plain model with coefficients changed by hand; losses are Hugging Face's."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_CTX, assert_near, plain_vectors
from control.generation import continue_prompts
from hand_controlled import CHOSEN, controlled_by_hand
from handpatched import jump_part, submodule_part
from patched_models import LENGTHS, SENTENCES, assert_as_before, assert_same, linear, patched, state, vectors
from scipy import stats
from torch import Tensor

import matlens
from matlens import InputError, make_examples
from matlens.data.making import make_windows
from matlens.ffn import ValueVector, controlled
from matlens.ffn.perplexity import TextLosses, text_losses

HOWS: dict[Any, Callable[[Tensor, float], Tensor]] = {
    "set": lambda m, number: torch.full_like(m, number),
    "add": lambda m, number: m + number,
    "scale": lambda m, number: m * number,
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
@pytest.mark.parametrize(("name", "how"), [("gpt2", "set"), ("bert", "scale"), ("gemma2", "add")])
def test_every_change_at_every_place_is_that_by_hand(name, how, where, small_model, plain_model):
    """At all sites, in a batch padded on either side, as in each sentence read alone."""
    model, plain = small_model(name), plain_model(name)
    tokens, meant = WHERES[where]
    expected = []
    for s, sentence in enumerate(SENTENCES):
        with controlled_by_hand(name, plain, CHOSEN, HOWS[how], lambda n, s=s: meant(s, n)):
            found = plain_vectors(name, plain, torch.tensor(sentence))
        expected.append({site: value[0] for site, value in found.items()})
    for side in ("right", "left"):
        with controlled(model, CHOSEN, how=how, where=tokens) as same:
            assert same is model
            ours = vectors(model, side=side)
        for one, other in zip(ours, expected, strict=True):
            for site in {*one} & {*other}:
                assert_near(one[site], other[site])


def test_coefficients_are_set_exactly(small_model):
    """In gated FFNs the product of gate and up; set to what they are, no bit changes; names in any way."""
    model = small_model("gemma3")
    before = vectors(model, SENTENCES[2:3])  # of one token
    own = {f"L{i}D{j}": float(before[0][f"ffn_post.{i}"][0, j]) for i in range(3) for j in (0, 13, 47)}
    with controlled(model, own):
        assert_same(vectors(model, SENTENCES[2:3]), before, 0)
    with controlled(model, [(0, 5), "l-1d-1", ValueVector(1, 7)], -2.5):
        for one in vectors(model):
            for site, index in (("ffn_post.0", 5), ("ffn_post.2", 47), ("ffn_post.1", 7)):
                assert (one[site][:, index] == -2.5).all()


PROMPTS = ["w4 w40 w11 w0 w29 w9", "w17", "w8 w8 w30 w21 w2 w35"]
N_NEW = 6
GENTLE = {"L0D5": 1.6, "L0D11": -1.5, "L2D7": 1.8}
SILENT: dict[str, Any] = {
    "stop_at_eos": False, "do_sample": False, "verbose": False, "return_type": "tokens"
}  # fmt: skip


def by_hand(name: str, plain: Any, sentence: Tensor, length: int, how: str, where: str) -> Tensor:
    """Logits of the new tokens of a sentence that has a prompt of so many, in one pass without a cache."""

    def meant(n: int) -> Tensor:
        place = torch.arange(n)
        return {"all": place >= 0, "last": place == length - 1, "new": place >= length}[where]

    with controlled_by_hand(name, plain, GENTLE, HOWS[how], meant), torch.inference_mode():
        return torch.as_tensor(plain(sentence[None]).logits[0, length - 1 : -1])


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("where", ["all", "last", "new"])
@pytest.mark.parametrize(("name", "how"), [("gpt2", "add"), ("gemma3", "scale")])
def test_generation_changes_the_prompts_last_or_the_new_tokens(
    name, how, where, cached, small_model, plain_model
):
    """In a batch of prompts of different lengths."""
    model, plain = small_model(name), plain_model(name)
    with controlled(model, GENTLE, how=how, where=where):
        generated = model.generate(PROMPTS, N_NEW, use_past_kv_cache=cached, output_logits=True, **SILENT)
        table = continue_prompts(model, PROMPTS, n_tokens=N_NEW, use_cache=cached)
        stream = model.generate_stream(PROMPTS[0], N_NEW, use_past_kv_cache=cached, **SILENT)
        streamed = torch.cat([torch.as_tensor(part).reshape(-1) for part in stream])
    assert streamed[-N_NEW:].tolist() == generated.sequences[0, -N_NEW:].tolist()
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


def test_new_tokens_follow_the_first_pass_of_a_loop_without_generate(small_model, plain_model):
    model, plain, sentence = small_model("gpt2"), plain_model("gpt2"), torch.tensor([17, 4, 40])
    logits, cache = [], None
    with controlled(model, GENTLE, where="new"), torch.inference_mode():
        for token in sentence:
            result = model.original_model(token[None, None], past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            logits.append(result.logits[0, -1])
    assert_near(torch.stack(logits[:-1]), by_hand("gpt2", plain, sentence, 1, "set", "new"))


@pytest.mark.parametrize("part", [jump_part(0, 2), submodule_part("ffn", 1)], ids=["jump", "sub-module"])
def test_control_of_an_ffn_that_is_replaced_is_refused_in_either_order(part, small_model):
    """It would have no effect."""
    model = small_model("llama")
    before = state(model)
    with patched(model, [linear(part)]):
        with pytest.raises(
            InputError, match=r"Value vectors of layer 1 cannot be controlled: .* is replaced"
        ):
            controlled(model, ["L1D9"]).__enter__()
        with controlled(model, ["L2D9"]):
            pass
    with (
        controlled(model, CHOSEN, where=torch.tensor([1, 2])),
        pytest.raises(InputError, match="where must have"),
    ):
        vectors(model)
    with (
        controlled(model, ["L2D3", "L1D9"]),
        pytest.raises(InputError, match=r"\.1.* is replaced or controlled"),
    ):
        patched(model, [linear(part)]).__enter__()
    assert_as_before(model, before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((["L0D1", "wine"],), "'wine' is not a value vector"),
        ((["L2D1", "L-1D1"],), "vectors must be different, got L2D1 twice"),
        (({"L0D1": float("nan")},), "^The value of L0D1 must be"),
        (({"L0D1": -1e39},), "^The value of L0D1 must be finite in the model's torch.float32"),
        (({"L0D1": 10**400},), "^The value of L0D1 must be"),
        ((["L0D1"], 3.0, {"where": torch.tensor([-1, 0])}), "^where must be"),
    ],
)
def test_other_input_is_refused_and_nothing_is_hooked(given, message, small_model):
    model, options = small_model("llama"), given[2] if len(given) > 2 else {}
    before = state(model)
    with pytest.raises(InputError, match=message):
        controlled(model, *given[:2], **options).__enter__()
    assert_as_before(model, before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_coefficients_that_overflow_on_the_way_raise(name, small_model):
    """The square of 1e30 does, so that norms made zeros of finite vectors, and of each token the first."""
    model, tokens = small_model(name), torch.tensor([[7, 3, 41]])
    for how, where in (("set", "all"), ("add", "last"), ("scale", "last")):
        with (
            controlled(model, ["L2D5"], 1e38, how=how, where=where),
            pytest.raises(InputError, match="overf"),
        ):
            model(tokens)
    with torch.inference_mode():
        assert bool(model(tokens).isfinite().all())


def test_coefficients_are_finite_in_half_precision(model_folder):
    model = matlens.load(str(model_folder("llama")), device="cpu", dtype=torch.float16)
    with pytest.raises(InputError, match=r"must be finite in the model's torch\.float16, got 70000"):
        controlled(model, {"L1D5": 7e4}).__enter__()
    with controlled(model, {"L1D5": 6e4}):
        assert bool(model(torch.tensor([[7, 3, 41]])).isfinite().all())


def test_the_interval_of_few_texts_is_that_of_a_ratio_of_sums():
    """The delta method for a ratio of two means, by sample variances and covariance (Cochran 1977, 6.4)."""
    lost, counted = np.array([7.0, 3.0, 11.0, 4.0]), np.array([3, 1, 4, 2])
    r, ((of_lost, both), (_, of_counted)) = lost.sum() / counted.sum(), np.cov(lost, counted)
    error = math.sqrt((of_lost + r**2 * of_counted - 2 * r * both) / 4) / counted.mean()
    half = stats.t.ppf(0.975, 3) * error
    estimate = TextLosses(lost, counted).perplexity()
    expected = math.exp(r), math.exp(r - half), math.exp(r + half)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(expected)


def test_a_ratio_is_that_of_the_perplexities_and_surer_than_they():
    rng = np.random.default_rng(1)
    counted = rng.integers(5, 40, 50)
    base = TextLosses(rng.normal(3, 1, 50) * counted, counted)
    changed = TextLosses(base.total + rng.normal(0.3, 0.05, 50) * counted, counted)
    ratio = changed.ratio(base)
    assert ratio.value == pytest.approx(changed.perplexity().value / base.perplexity().value)
    assert ratio.low < ratio.value < ratio.high
    assert ratio.high / ratio.low < base.perplexity().high / base.perplexity().low
    same = base.ratio(base)
    assert (same.value, same.low, same.high) == (1, 1, 1)
    lost = TextLosses(np.array([9e3, 2e3]), np.array([2, 2]))  # nats: no final norm bounds logits
    assert lost.perplexity().value == lost.perplexity().high == math.inf
    assert base.ratio(TextLosses(base.total + 800 * counted, counted)).value < 1e-300
    lonely = TextLosses(np.array([3.0]), np.array([2])).perplexity()
    assert lonely.value == pytest.approx(math.exp(1.5))
    assert math.isnan(lonely.low)


def test_a_text_longer_than_the_context_has_no_loss(small_model):
    model, long = small_model("gpt2"), "w1 " * (N_CTX + 1)
    fits = text_losses(model, ["w1 " * N_CTX], progress=False)
    assert fits.n_tokens.tolist() == [N_CTX - 1]
    with pytest.raises(InputError, match=f"at most {N_CTX} tokens, got {N_CTX + 1}.*make_windows"):
        text_losses(model, ["w1 w2", long], progress=False)
    assert (
        text_losses(model, make_windows(model, [long, long], size=20), progress=False).n_tokens.sum() > N_CTX
    )


@pytest.mark.parametrize("chosen", [{}, CHOSEN], ids=["unchanged", "controlled"])
@pytest.mark.parametrize("name", ["gptj", "gemma2"])
def test_it_is_hugging_faces_loss(name, chosen, small_model, plain_model, sentences, monkeypatch):
    monkeypatch.setattr("matlens.ffn.perplexity._PLACES", 7)
    model, plain = small_model(name), plain_model(name)
    for texts in (make_examples(model, sentences), make_windows(model, sentences, size=20)):
        lost, counted = [], []
        with controlled_by_hand(name, plain, chosen), torch.inference_mode():
            for ids in np.split(texts.tokens, texts.offsets[1:-1]):
                tokens = torch.from_numpy(ids).long()[None]
                counted.append(len(ids) - 1)
                lost.append(float(plain(tokens, labels=tokens).loss) * counted[-1])
        for batch_tokens in (1, 70):
            with controlled(model, chosen) if chosen else nullcontext():
                ours = text_losses(model, texts, batch_tokens=batch_tokens, progress=False)
            np.testing.assert_array_equal(ours.n_tokens, counted)
            np.testing.assert_allclose(ours.total, lost, rtol=2e-5)
        assert ours.perplexity().value == pytest.approx(math.exp(sum(lost) / sum(counted)), rel=1e-4)
