"""A patched model generates, token by token, what the hand-patched plain model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import assert_near
from handpatched import Part, hand_vectors, jump_part, submodule_part
from patched_models import patched, replacement
from torch import Tensor

N_NEW = 8
PROMPT = [7, 3, 41, 12, 12, 59, 30, 22, 8, 17, 5, 33, 2]  # with its end outside of Gemma 3's window
TEXTS = ["w4 w40 w11 w0 w29 w9", "w17", "w8 w8 w30 w21 w2 w35 w45 w13 w7 w26 w1 w19"]
SILENT: dict[str, Any] = {"stop_at_eos": False, "do_sample": False, "verbose": False, "return_type": "tokens"}


def submodule(name: str, layer: int, seed: int, where: Any) -> Part:
    return submodule_part(name, layer, seed, bias=False, where=where)


FLAGS = ((False, True, True), (True, False, True), (True, True, False))
TO_COME = tuple(tuple(place == chosen for place in range(30)) for chosen in (1, 0, 13))
SCHEMES: dict[str, list[Part]] = {
    "two blocks and attention": [jump_part(0, 2, 2, bias=False), submodule("attn", 2, 3, "not-first")],
    "all blocks": [jump_part(0, 3, 5, bias=False)],
    "around a jump": [
        jump_part(1, 2, 6, bias=False), submodule("ffn", 0, 7, "not-first"), submodule("attn", 2, 8, "all"),
    ],
    "at masks": [
        submodule("ffn", 1, 11, TO_COME), submodule("attn", 1, 13, FLAGS), jump_part(2, 3, 12, bias=False),
    ],
}  # fmt: skip


def generate(model: Any, given: Any, parts: Sequence[Part], **options: Any) -> tuple[Tensor, Tensor]:
    """Sequences, and the logits of each new token."""
    with patched(model, [replacement(replaced) for replaced in parts]):
        output = model.generate(given, N_NEW, output_logits=True, **SILENT, **options)
    return output.sequences, torch.stack(output.logits, dim=1)


def assert_most_probable(
    name: str, plain: Any, parts: Sequence[Part], sequences: Sequence[Tensor], logits: Tensor
) -> None:
    """Read as a whole and without a cache, the hand-patched model has the same logits at each new token.

    By induction, then, it would have generated the same.
    """
    expected = hand_vectors(name, plain, parts, [sequence.tolist() for sequence in sequences])
    for sequence, ours, by_hand in zip(sequences, logits, expected, strict=True):
        assert torch.equal(sequence[-N_NEW:], ours.argmax(-1))
        assert_near(ours, by_hand["logits"][-N_NEW - 1 : -1])


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("name", ["gpt2", "gptj", "gemma3", "qwen3-next"])
def test_prompts_of_different_lengths(name, cached, small_model, plain_model):
    """They are padded on the left, and a sentence's first token is its own."""
    model = small_model(name)
    prompts = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    for scheme, parts in SCHEMES.items():
        if name == "qwen3-next" and scheme != "all blocks":  # its linear attention reads padding
            continue
        padded, logits = generate(model, TEXTS, parts, use_past_kv_cache=cached)
        sequences = [row[-len(prompt) - N_NEW :] for row, prompt in zip(padded, prompts, strict=True)]
        assert [row[:-N_NEW].tolist() for row in sequences] == prompts
        assert_most_probable(name, plain_model(name), parts, sequences, logits)


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_hugging_faces_own_generation_is_patched_too(name, small_model, plain_model):
    model, parts, given = small_model(name), SCHEMES["two blocks and attention"], torch.tensor([PROMPT])
    silent = {"max_new_tokens": N_NEW, "do_sample": False, "stop_at_eos": False}
    with patched(model, [replacement(replaced) for replaced in parts]):
        output = model.hf_generate(given, output_logits=True, return_dict_in_generate=True, **silent)
        beams = [
            model.hf_generate(given, num_beams=4, use_cache=cached, return_type="tokens", **silent)
            for cached in (True, False)  # the cache of a beam is reordered, empty places included
        ]
    logits = torch.stack(output.logits, dim=1)
    assert_most_probable(name, plain_model(name), parts, list(output.sequences), logits)
    assert torch.equal(*beams)


def test_a_sentence_may_be_read_in_two_passes(small_model, plain_model):
    """The second, with the cache of the first, knows that its first token is not the sentence's."""
    model, parts, tokens = small_model("gpt2"), SCHEMES["around a jump"], torch.tensor([PROMPT])
    expected = hand_vectors("gpt2", plain_model("gpt2"), parts, [PROMPT])[0]["logits"]
    with patched(model, [replacement(replaced) for replaced in parts]), torch.inference_mode():
        first, cache = model(tokens[:, :5], return_type="logits_and_cache", use_cache=True)
        rest = model(tokens[:, 5:], past_key_values=cache)
    assert_near(torch.cat([first, rest], 1)[0], expected)
