"""What a patched model generates is, token by token, what the hand-patched plain model finds likeliest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, MASKED, assert_near
from handpatched import Part, hand_vectors, jump_part, submodule_part
from patched_models import SENTENCES, patched, replacement, vectors
from torch import Tensor

DECODERS = [name for name in ARCHITECTURES if name not in MASKED]
N_NEW = 8
PROMPT = [7, 3, 41, 12, 12, 59, 30, 22, 8, 17, 5, 33, 2]  # and the end lies outside of Gemma 3's window
TEXTS = ["w4 w40 w11 w0 w29 w9", "w17", "w8 w8 w30 w21 w2 w35 w45 w13 w7 w26 w1 w19"]


def submodule(name: str, layer: int, seed: int, where: Any) -> Part:
    return submodule_part(name, layer, seed, bias=False, where=where)


SCHEMES: dict[str, list[Part]] = {
    "first block": [jump_part(0, 1, 1, bias=False)],
    "two blocks and a stand-in": [jump_part(0, 2, 2, bias=False), submodule("attn", 2, 3, "not-first")],
    "all but the first block": [jump_part(1, 3, 4, bias=False)],
    "all blocks": [jump_part(0, 3, 5, bias=False)],
    "around a jump": [
        jump_part(1, 2, 6, bias=False), submodule("ffn", 0, 7, "not-first"), submodule("attn", 2, 8, "all"),
    ],
    "stand-ins": [submodule("attn", 0, 9, "not-first"), submodule("ln1", 1, 10, "not-first")],
}  # fmt: skip


def generate(model: Any, given: Any, parts: Sequence[Part], **options: Any) -> tuple[Tensor, Tensor]:
    """Sequences, and the logits that each new token was chosen by."""
    silent: dict[str, Any] = {"stop_at_eos": False, "do_sample": False, "verbose": False}
    with patched(model, [replacement(replaced) for replaced in parts]):
        output = model.generate(given, N_NEW, output_logits=True, return_type="tokens", **silent, **options)
    return output.sequences, torch.stack(output.logits, dim=1)


def assert_likeliest(
    name: str, plain: Any, parts: Sequence[Part], sequences: Sequence[Tensor], logits: Tensor
) -> None:
    """Read as a whole and without a cache, the hand-patched model gives each token's logits, its own largest.

    By induction, then, it would have generated the same.
    """
    expected = hand_vectors(name, plain, parts, [sequence.tolist() for sequence in sequences])
    for sequence, ours, by_hand in zip(sequences, logits, expected, strict=True):
        assert torch.equal(sequence[-N_NEW:], ours.argmax(-1))
        assert_near(ours, by_hand["logits"][-N_NEW - 1 : -1])


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", DECODERS)
def test_one_prompt(
    name: str, scheme: str, cached: bool, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    sequences, logits = generate(
        small_model(name), torch.tensor([PROMPT]), SCHEMES[scheme], use_past_kv_cache=cached
    )
    assert sequences[0, : len(PROMPT)].tolist() == PROMPT
    assert_likeliest(name, plain_model(name), SCHEMES[scheme], list(sequences), logits)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("name", DECODERS)
def test_prompts_of_different_lengths(
    name: str, cached: bool, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    """They are padded on the left, and a sentence's first token is its own."""
    model = small_model(name)
    prompts = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    flags = ((False, True, True), (True, False, True), (True, True, False))
    to_come = tuple(tuple(place == chosen for place in range(30)) for chosen in (1, 0, 13))
    places = [submodule("ffn", 1, 11, to_come), submodule("attn", 1, 13, flags)]
    for parts in (*SCHEMES.values(), [*places, jump_part(2, 3, 12, bias=False)]):
        padded, logits = generate(model, TEXTS, parts, use_past_kv_cache=cached)
        sequences = [row[-len(prompt) - N_NEW :] for row, prompt in zip(padded, prompts, strict=True)]
        assert [row[:-N_NEW].tolist() for row in sequences] == prompts
        assert_likeliest(name, plain_model(name), parts, sequences, logits)


@pytest.mark.parametrize("name", DECODERS)
def test_a_jump_is_computed_by_no_block_while_it_generates(
    name: str, small_model: Callable[[str], Any]
) -> None:
    model, called = small_model(name), [0, 0, 0]

    def count(layer: int) -> Callable[..., None]:
        return lambda *_: called.__setitem__(layer, called[layer] + 1)

    handles = [
        block.original_component.register_forward_pre_hook(count(layer))
        for layer, block in enumerate(model.blocks)
    ]
    try:
        generate(model, torch.tensor([PROMPT]), [jump_part(0, 2)])
    finally:
        for handle in handles:
            handle.remove()
    assert called == [0, 0, N_NEW]


@pytest.mark.parametrize("name", DECODERS)
def test_hugging_faces_own_generation_is_patched_too(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    parts = SCHEMES["two blocks and a stand-in"]
    with patched(small_model(name), [replacement(replaced) for replaced in parts]):
        output = small_model(name).hf_generate(
            torch.tensor([PROMPT]), max_new_tokens=N_NEW, do_sample=False, stop_at_eos=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    logits = torch.stack(output.logits, dim=1)
    assert_likeliest(name, plain_model(name), parts, list(output.sequences), logits)


def test_several_beams(small_model: Callable[[str], Any]) -> None:
    """The cache of a beam that is given up is reordered, empty places included."""
    parts = SCHEMES["two blocks and a stand-in"]
    with patched(small_model("llama"), [replacement(replaced) for replaced in parts]):
        output = {
            cached: small_model("llama").hf_generate(
                torch.tensor([PROMPT]), max_new_tokens=N_NEW, do_sample=False, stop_at_eos=False,
                num_beams=4, use_cache=cached, return_type="tokens",
            )
            for cached in (True, False)
        }  # fmt: skip
    assert torch.equal(output[True], output[False])


def test_a_sentence_may_be_given_in_two_passes(
    small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    """The second, with the cache of the first, knows that its first token is not the sentence's."""
    model, parts = small_model("gpt2"), SCHEMES["around a jump"]
    tokens = torch.tensor([PROMPT])
    expected = hand_vectors("gpt2", plain_model("gpt2"), parts, [PROMPT])[0]["logits"]
    with patched(model, [replacement(replaced) for replaced in parts]), torch.inference_mode():
        first, cache = model(tokens[:, :5], return_type="logits_and_cache", use_cache=True)
        rest = model(tokens[:, 5:], past_key_values=cache)
    assert_near(torch.cat([first, rest], 1)[0], expected)


def test_generating_leaves_the_model_as_it_was(small_model: Callable[[str], Any]) -> None:
    model = small_model("gemma3")
    before = [sites["logits"] for sites in vectors(model, SENTENCES)]
    generate(model, TEXTS, SCHEMES["around a jump"])
    assert all(
        torch.equal(sites["logits"], other)
        for sites, other in zip(vectors(model, SENTENCES), before, strict=True)
    )
