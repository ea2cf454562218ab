"""Continuations are the plain model's own, whatever the batch and the cache, and draws are the seed's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from control.baselines import SelfDebiasing, word_filter
from control.generation import continue_prompts
from hand_controlled import CHOSEN, controlled_by_hand
from self_debiasing import debiased_probabilities

import matlens
from matlens.ffn.control import controlled

Models = Callable[[str], Any]
PROMPTS = ["w4 w40 w11 w0 w29 w9", "w17", "w8 w8 w30 w21 w2 w35 w45 w13 w7 w26 w1 w19", "w3 w3"]
N_NEW = 8
GENTLE = {name: number / 4 for name, number in CHOSEN.items()}  # at which prompts still go on differently


@torch.inference_mode()
def plain_probabilities(plain: Any, tokens: Sequence[int]) -> list[float]:
    """What the plain model says of the next token, read as a whole."""
    return plain(torch.tensor([tokens])).logits[0, -1].double().softmax(-1).tolist()


def go_on(plain: Any, tokenizer: Any, prompt: str, choose: Callable[[list[int], int], int]) -> str:
    """Choose token after token, without a cache."""
    tokens = tokenizer(prompt)["input_ids"]
    new: list[int] = []
    for step in range(N_NEW):
        new.append(choose([*tokens, *new], step))
    return tokenizer.decode(new)


def greedy(plain: Any) -> Callable[[list[int], int], int]:
    return lambda tokens, step: int(np.argmax(plain_probabilities(plain, tokens)))


def texts(model: Any, prompts: Sequence[str] = PROMPTS, **options: Any) -> list[str]:
    table = continue_prompts(model, prompts, **{"n_tokens": N_NEW} | options)
    return table["text"].tolist()


@pytest.mark.parametrize("control", [False, True], ids=["unchanged", "controlled"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_greedy_continuations_are_the_plain_models_own(name, control, small_model, plain_model):
    model, plain = small_model(name), plain_model(name)
    with controlled_by_hand(name, plain, GENTLE if control else {}):
        expected = [go_on(plain, model.tokenizer, prompt, greedy(plain)) for prompt in PROMPTS]
    assert len(set(expected)) > 1
    with controlled(model, GENTLE) if control else nullcontext():
        assert texts(model) == texts(model, use_cache=False, batch_size=3) == expected


def beams_by_hand(plain: Any, tokenizer: Any, prompt: str, n: int, banned: Sequence[int] = ()) -> str:
    """The best of ``n`` beams, whose log-probabilities are summed from texts that are read as a whole."""
    tokens = tokenizer(prompt)["input_ids"]
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(N_NEW):
        longer = []
        for score, new in beams:
            p = np.log(plain_probabilities(plain, [*tokens, *new]))
            longer += [(score + p[w], [*new, w]) for w in range(len(p)) if w not in banned]
        beams = sorted(longer, key=lambda beam: -beam[0])[:n]
    return str(tokenizer.decode(beams[0][1]))


# Not the small Gemma 2, whose cap makes so many logits alike that beams tie.
@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_beams_find_what_a_search_by_hand_does(name, small_model, plain_model):
    model, plain = small_model(name), plain_model(name)
    expected = [beams_by_hand(plain, model.tokenizer, prompt, 3) for prompt in PROMPTS]
    for batch_size in (1, 4):
        assert texts(model, n_beams=3, batch_size=batch_size) == expected
    assert expected != texts(model)
    with controlled_by_hand(name, plain, GENTLE):
        controlled_beams = [beams_by_hand(plain, model.tokenizer, prompt, 3) for prompt in PROMPTS]
    with controlled(model, GENTLE):
        assert texts(model, n_beams=3) == controlled_beams
    words = ["w1", "w30", "w44", "w7"]
    without = [model.tokenizer.convert_tokens_to_ids(word) for word in words]
    assert texts(model, n_beams=3, processor=word_filter(model.tokenizer, words)) == [
        beams_by_hand(plain, model.tokenizer, prompt, 3, without) for prompt in PROMPTS
    ]
    debiasing = SelfDebiasing(decay=0.0)  # its announcements go on beside the prompts, and change nothing
    assert texts(model, n_beams=3, processor=debiasing) == expected


# Chance


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_draws_are_the_seeds_own_in_any_batch_and_with_any_cache(name, small_model):
    model = small_model(name)
    whole = texts(model, n_samples=3, seed=7)
    assert whole == texts(model, n_samples=3, seed=7, batch_size=2)
    assert whole == texts(model, n_samples=3, seed=7, use_cache=False)
    assert whole[:6] == texts(model, PROMPTS[:2], n_samples=3, seed=7)
    assert [whole[i] for i in (0, 3, 6, 9)] == texts(model, n_samples=1, seed=7)
    assert len(set(whole)) == len(whole)
    assert whole != texts(model, n_samples=3, seed=8)


# Baselines


@pytest.mark.parametrize("name", ["gpt2"])
def test_self_debiasing_goes_on_by_the_formula(name, small_model, plain_model):
    """From the plain model's probabilities after the prompt, and after each announcement and the prompt."""
    model, plain = small_model(name), plain_model(name)
    debiasing = SelfDebiasing(["threat", "profanity"], decay=2000.0)
    variants = [[], *(model.tokenizer(prefix)["input_ids"] for prefix in debiasing.prefixes)]
    assert len(set(map(len, variants))) == 3

    def drawing(row: int) -> Callable[[list[int], int], int]:
        chance = np.random.default_rng(np.random.SeedSequence((5, row, 0)))

        def choose(tokens: list[int], step: int) -> int:
            p = [np.log(plain_probabilities(plain, [*prefix, *tokens])).tolist() for prefix in variants]
            probabilities = debiased_probabilities(p[0], p[1:], debiasing.decay, debiasing.floor)
            return int(np.argmax(np.log(probabilities) + chance.gumbel(size=len(probabilities))))

        return choose

    expected = [go_on(plain, model.tokenizer, prompt, drawing(row)) for row, prompt in enumerate(PROMPTS)]
    assert expected != texts(model, n_samples=1, seed=5)
    for options in ({}, {"batch_size": 1}, {"use_cache": False}):
        assert texts(model, processor=debiasing, n_samples=1, seed=5, **options) == expected


# What ends a text, and what the checkpoint itself asks of generation


def test_the_end_of_the_text_is_not_generated_and_the_checkpoints_own_wishes_are_left_out(
    model_folder, plain_model
):
    model, plain = matlens.load(str(model_folder("llama")), device="cpu"), plain_model("llama")
    tokens = model.tokenizer(PROMPTS[0])["input_ids"]
    likeliest = int(np.argmax(plain_probabilities(plain, tokens)))
    config = model.original_model.generation_config
    config.eos_token_id, config.repetition_penalty, config.do_sample = likeliest, 5.0, True
    config.no_repeat_ngram_size, config.num_beams, config.max_length = 1, 3, 5

    def choose(tokens: list[int], step: int) -> int:
        p = np.array(plain_probabilities(plain, tokens))
        p[likeliest] = 0
        return int(p.argmax())

    expected = [go_on(plain, model.tokenizer, prompt, choose) for prompt in PROMPTS]
    assert texts(model) == expected
