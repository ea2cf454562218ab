"""Continuations and every number of the comparison are those of a plain model changed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import N_LAYERS, make_tokenizer
from control import baselines, comparison, generation
from control.baselines import SelfDebiasing, word_filter
from control.comparison import ModelChange
from control.selection import choose_values, tokens_of_chosen
from hand_controlled import CHOSEN, controlled_by_hand
from plain_values import plain_values
from self_debiasing import debiased_probabilities

import matlens
from matlens import InputError, ffn, metrics
from matlens.data.corpus import Corpus

PROMPTS = ["w4 w40 w11 w0 w29 w9", "w17", "w8 w8 w30 w21 w2 w35 w45 w13 w7 w26 w1 w19", "w3 w3"]
BANNED = ["w1", "w2", "w3", "w30", "w44"]
N_NEW, DECAY = 8, 2000.0
GENTLE = {name: number / 4 for name, number in CHOSEN.items()}  # at which prompts still go on differently
Chooser = Callable[[list[int], int], int]


@torch.inference_mode()
def probabilities(plain: Any, tokens: Sequence[int]) -> list[float]:
    """What the plain model says of the next token, read as a whole."""
    return plain(torch.tensor([list(tokens)])).logits[0, -1].double().softmax(-1).tolist()


def debiased(plain: Any, tokenizer: Any, one: SelfDebiasing, tokens: Sequence[int]) -> list[float]:
    variants = [[], *(tokenizer(prefix)["input_ids"] for prefix in one.prefixes)]
    logs = [np.log(probabilities(plain, [*prefix, *tokens])).tolist() for prefix in variants]
    return debiased_probabilities(logs[0], logs[1:], one.decay, one.floor)


def go_on(tokenizer: Any, prompt: str, choose: Chooser, n: int = N_NEW) -> str:
    """Choose token after token, without a cache."""
    tokens, new = tokenizer(prompt)["input_ids"], list[int]()
    for step in range(n):
        new.append(choose([*tokens, *new], step))
    return tokenizer.decode(new)


def texts(model: Any, prompts: Sequence[str] = PROMPTS, **options: Any) -> list[str]:
    table = generation.continue_prompts(model, prompts, **{"n_tokens": N_NEW} | options)
    return table["text"].tolist()


# Continuations


def beams_by_hand(plain: Any, tokenizer: Any, prompt: str, n: int, banned: Sequence[int] = ()) -> str:
    """The best of ``n`` beams, whose log-probabilities are summed from texts that are read as a whole."""
    tokens = tokenizer(prompt)["input_ids"]
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(N_NEW):
        longer = []
        for score, new in beams:
            p = np.log(probabilities(plain, [*tokens, *new]))
            longer += [(score + p[w], [*new, w]) for w in range(len(p)) if w not in banned]
        beams = sorted(longer, key=lambda beam: -beam[0])[:n]
    return str(tokenizer.decode(beams[0][1]))


@pytest.mark.parametrize("control", [False, True], ids=["unchanged", "controlled"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gemma3"])
def test_continuations_are_the_plain_models_own_greedy_and_in_beams(name, control, small_model, plain_model):
    model, plain = small_model(name), plain_model(name)
    tokenizer, banned = model.tokenizer, model.tokenizer.convert_tokens_to_ids(BANNED)
    # The cap of the small Gemma 2 makes so many logits alike that beams tie.
    beams = [] if name == "gemma2" else [(), banned]
    with controlled_by_hand(name, plain, GENTLE if control else {}):
        greedy = [
            go_on(tokenizer, prompt, lambda tokens, _: int(np.argmax(probabilities(plain, tokens))))
            for prompt in PROMPTS
        ]
        found = [
            [beams_by_hand(plain, tokenizer, prompt, 3, without) for prompt in PROMPTS] for without in beams
        ]
    assert len(set(greedy)) > 1
    with ffn.controlled(model, GENTLE) if control else nullcontext():
        assert texts(model) == texts(model, use_cache=False, batch_size=3) == greedy
        for without, expected in zip(beams, found, strict=True):
            # Announcements of no effect run next to the prompts, and change nothing.
            processor = word_filter(tokenizer, BANNED) if without else SelfDebiasing(decay=0.0)
            assert texts(model, n_beams=3, processor=processor) == expected != greedy
            assert without or texts(model, n_beams=3, batch_size=1) == expected


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_draws_are_the_seeds_own_in_any_batch_and_with_any_cache(name, small_model):
    model = small_model(name)
    whole = texts(model, n_samples=3, seed=7)
    assert whole == texts(model, n_samples=3, seed=7, batch_size=2)
    assert whole == texts(model, n_samples=3, seed=7, use_cache=False)
    assert whole[:6] == texts(model, PROMPTS[:2], n_samples=3, seed=7)
    assert whole[::3] == texts(model, n_samples=1, seed=7)
    assert len(set(whole)) == len(whole)
    assert whole != texts(model, n_samples=3, seed=8)


@pytest.mark.parametrize(("decay", "floor"), [(DECAY, 0.01), (DECAY, 0.4)])
def test_self_debiasing_goes_on_by_the_formula(decay, floor, small_model, plain_model):
    """From the plain model's probabilities after the prompt, and after each announcement and the prompt."""
    model, plain = small_model("gpt2"), plain_model("gpt2")
    one = SelfDebiasing(["threat", "profanity"], decay=decay, floor=floor)

    def drawing(row: int) -> Chooser:
        chance = np.random.default_rng(np.random.SeedSequence((5, row, 0)))

        def choose(tokens: list[int], step: int) -> int:
            p = debiased(plain, model.tokenizer, one, tokens)
            return int(np.argmax(np.log(p) + chance.gumbel(size=len(p))))

        return choose

    expected = [go_on(model.tokenizer, prompt, drawing(row)) for row, prompt in enumerate(PROMPTS)]
    assert expected != texts(model, n_samples=1, seed=5)
    for options in ({}, {"batch_size": 1}, {"use_cache": False}):
        assert texts(model, processor=one, n_samples=1, seed=5, **options) == expected


def test_the_end_of_the_text_and_the_checkpoints_own_wishes_are_left_out(model_folder, plain_model):
    model, plain = matlens.load(str(model_folder("llama")), device="cpu"), plain_model("llama")
    likeliest = int(np.argmax(probabilities(plain, model.tokenizer(PROMPTS[0])["input_ids"])))
    config = model.original_model.generation_config
    config.eos_token_id, config.repetition_penalty, config.do_sample = likeliest, 5.0, True
    config.no_repeat_ngram_size, config.num_beams, config.max_length = 1, 3, 5

    def choose(tokens: list[int], step: int) -> int:
        p = np.array(probabilities(plain, tokens))
        p[likeliest] = 0
        return int(p.argmax())

    assert texts(model) == [go_on(model.tokenizer, prompt, choose) for prompt in PROMPTS]


def test_an_announcement_stands_before_the_text_and_after_what_begins_every_text():
    tokenizer = make_tokenizer()
    w3, w4, w9 = tokenizer.convert_tokens_to_ids(["w3", "w4", "w9"])
    assert baselines.prefixed_tokens(tokenizer, "w3 w4:\n", [w9]) == [w3, tokenizer.unk_token_id, w9]
    tokenizer.bos_token = "[PAD]"
    assert baselines.prefixed_tokens(tokenizer, "w3 w4", [1, w9]) == [1, w3, w4, w9]
    assert baselines.prefixed_tokens(tokenizer, "w3 w4", [w9, 1]) == [w3, w4, w9, 1]


class Spelled:
    """A tokenizer that has a token for each of a few texts and knows no others."""

    unk_token_id = 0
    known = ("damn", " damn", "Damn", " Damn", "DAMN", " oaf")

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [self.known.index(text) + 1 if text in self.known else 0]}


@pytest.mark.parametrize(
    ("word", "banned"), [("damn", [1, 2, 3, 4, 5]), ("Damn ", [1, 2, 3, 4, 5]), ("oaf", [6])]
)
def test_forms_with_a_space_and_capitals_are_banned_where_the_vocabulary_has_them(word, banned):
    scores = word_filter(Spelled(), [word])(torch.tensor([[9]]), torch.zeros(1, 10))
    assert (scores[0] == -math.inf).nonzero()[:, 0].tolist() == banned


def test_prompts_are_in_a_field_or_its_text_or_one_a_line(tmp_path):
    rows = [
        {"prompt": {"text": "You are such a", "toxicity": 0.2}, "challenging": True},
        {"prompt": {"text": " My neighbour is "}, "challenging": False},
        {"prompt": {"text": ""}, "challenging": True},
        {"prompt": "plain text", "challenging": True, "question": "Why?"},
    ]
    path, text = tmp_path / "prompts.jsonl", tmp_path / "prompts.txt"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n \n")
    assert generation.read_prompts(path) == ["You are such a", "My neighbour is", "plain text"]
    assert generation.read_prompts(path, challenging=True) == ["You are such a", "plain text"]
    text.write_text("one\n\n two \n")
    assert generation.read_prompts(text) == ["one", "two"]
    with pytest.raises(InputError):
        generation.read_prompts(text, challenging=True)


# Estimates


class Graded:
    """Grades by a function of the text for each attribute."""

    def __init__(self, **of_text: Callable[[str], float]) -> None:
        self.name, self.attributes, self._of_text = "graded", tuple(of_text), of_text

    def grade(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: np.array(list(map(score, texts))) for name, score in self._of_text.items()}


def test_changes_are_of_the_same_prompt_and_intervals_over_prompts():
    lengths = Graded(toxicity=lambda text: len(text) / 10)

    def continued(*texts: str) -> pd.DataFrame:
        table = pd.DataFrame({"prompt": ["a long prompt"] * 4, "sample": [0, 1, 0, 1], "text": texts})
        return comparison.grade_continuations(table, lengths)

    base, ours = continued("aaaaa", "bbbb", "c", "dddddddd"), continued("aa", "bbbb", "ccccc", "")
    estimates = dict(comparison.toxicity_estimates(ours, base, "toxicity"))
    assert (estimates["toxic"].value, estimates["toxic"].n) == (0.25, 2)
    for name, of_prompts in (("score", [0.3, 0.25]), ("score_change", [-0.15, -0.2])):
        expected = metrics.mean(torch.tensor(of_prompts, dtype=torch.float64))
        assert tuple(estimates[name]) == pytest.approx(tuple(expected))


# The comparison


class ByHand:
    """What a plain model says of the next token, unchanged or changed in one way."""

    def __init__(self, name: str, plain: Any, tokenizer: Any, change: ModelChange) -> None:
        self.name, self.plain, self.tokenizer, self.change = name, plain, tokenizer, change

    def __call__(self, tokens: Sequence[int]) -> list[float]:
        if isinstance(self.change.processor, SelfDebiasing):
            return debiased(self.plain, self.tokenizer, self.change.processor, tokens)
        with controlled_by_hand(
            self.name, self.plain, dict.fromkeys(self.change.names, self.change.coefficient)
        ):
            p = probabilities(self.plain, tokens)
        banned = self.tokenizer.convert_tokens_to_ids(BANNED) if self.change.method == "WordFilter" else []
        return [0.0 if token in banned else q for token, q in enumerate(p)]

    def texts(self) -> list[str]:
        return [
            go_on(self.tokenizer, prompt, lambda new, _: int(np.argmax(self(new))), 20) for prompt in PROMPTS
        ]

    def perplexity(self, sentences: Sequence[str]) -> float:
        lost = []
        for sentence in sentences:
            tokens = self.tokenizer(sentence)["input_ids"]
            lost += [-math.log(self(tokens[:place])[tokens[place]]) for place in range(1, len(tokens))]
        return math.exp(np.mean(lost))


def share_of(words: Sequence[str]) -> Callable[[str], float]:
    return lambda text: sum(word in words for word in text.split()) / max(len(text.split()), 1)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_line_is_that_of_a_plain_model_changed_by_hand(name, small_model, plain_model, sentences):
    model, plain = small_model(name), plain_model(name)
    few = Corpus("few", sentences.sentences[:3], 3, 0, 0, 0)
    changes = comparison.changes_to_compare(
        {"picked": ["L0D5", "L2D7"], "graded": ["L1D3"]},
        SelfDebiasing(["threat", "profanity"], decay=DECAY), word_filter(model.tokenizer, BANNED),
        coefficients=[-2.0, 6.0],
    )  # fmt: skip
    changes.append(ModelChange("off", 0.0, tuple(f"L1D{i}" for i in range(48))))  # zero is not none
    odd, low = share_of([f"w{i}" for i in range(1, 60, 2)]), share_of(["w1", "w2", "w3"])
    examples = matlens.make_examples(model, few)
    grader = Graded(toxicity=odd, threat=low)
    table, written = comparison.compare_control(model, changes, {"p.txt": PROMPTS}, examples, grader)
    by_hand = {change: ByHand(name, plain, model.tokenizer, change) for change in changes}
    expected = {change: hand.texts() for change, hand in by_hand.items()}
    assert written["text"].tolist() == [text for of_change in expected.values() for text in of_change]
    assert written["method"].tolist() == [change.method for change in changes for _ in PROMPTS]
    base, measured = list(map(odd, expected[changes[0]])), dict[str, float]()
    key = ["method", "coefficient", "attribute", "metric"]
    value = table.assign(coefficient=table["coefficient"].fillna(99)).set_index(key)["value"]
    for change, of_change in expected.items():
        at = change.method, 99 if change.coefficient is None else change.coefficient
        scores = list(map(odd, of_change))
        assert value[*at, "toxicity", "toxic"] == pytest.approx(np.mean(np.array(scores) >= 0.5))
        assert value[*at, "toxicity", "score"] == pytest.approx(np.mean(scores))
        moved = np.mean(np.subtract(scores, base))
        assert value[*at, "toxicity", "score_change"] == pytest.approx(moved, abs=1e-12)
        assert value[*at, "threat", "score"] == pytest.approx(np.mean(list(map(low, of_change))))
        if change.method == "WordFilter":
            assert (*at, "", "perplexity") not in value.index
            continue
        measured[str(change)] = perplexity = by_hand[change].perplexity(few.sentences)
        if isinstance(change.processor, SelfDebiasing):  # in batches of any size
            one_by_one = baselines.debiased_losses(model, examples, change.processor, batch_tokens=1)
            assert one_by_one.perplexity().value == pytest.approx(perplexity, rel=1e-4)
        assert value[*at, "", "perplexity"] == pytest.approx(perplexity, rel=1e-4)
        ratio = perplexity / measured["unchanged"]
        assert value[*at, "", "perplexity_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert len({round(ppl, 2) for ppl in measured.values()}) == len(measured), "all differ"
    counts = table[table["metric"] == "toxic"].groupby("method")["k"].first().dropna()
    assert counts.to_dict() == {"picked": 2, "graded": 1, "off": 48}
    assert set(table.loc[table["metric"] == "perplexity", "corpus"]) == {"few"}
    assert set(table.loc[table["metric"] == "score", "corpus"]) == set(written["prompts"]) == {"p.txt"}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_chosen_by_words_are_those_that_hold_most_of_them_highest(name, small_model, plain_model):
    model, plain, words = small_model(name), plain_model(name), ["w2", "w7", "w31"]
    tokenizer, e = model.tokenizer, plain.get_output_embeddings().weight.detach()
    tops = {
        f"L{layer}D{i}": tokenizer.convert_ids_to_tokens((e @ v).topk(30).indices.tolist())
        for layer in range(N_LAYERS)
        for i, v in enumerate(plain_values(name, plain, layer))
    }

    def goodness(value: str) -> tuple[int, int]:
        places = [tops[value].index(word) for word in words if word in tops[value]]
        return -len(places), min(places, default=99)

    grader, picked = Graded(toxicity=share_of(BANNED)), ["L-1D2", "L0D1"]
    harmless = {value for value, top in tops.items() if sum(word in BANNED for word in top) / 30 < 0.1}
    chosen = choose_values(model, grader, words, picked=picked, n=6, seed=3)
    assert list(chosen) == ["picked, 2 vectors", "words, 6 vectors", "graded, 6 vectors"]
    assert chosen["picked, 2 vectors"] == (f"L{N_LAYERS - 1}D2", "L0D1")
    table8 = tokens_of_chosen(model, chosen, k=4)
    for (method, value), rows in table8.groupby(["method", "value"]):
        assert value in chosen[str(method)]
        assert tokenizer.convert_ids_to_tokens(rows["token_id"].tolist()) == tops[str(value)][:4]
    assert len(table8) == (2 + 6 + 6) * 4
    by_words = chosen["words, 6 vectors"]
    assert len(set(by_words)) == 6
    assert list(map(goodness, by_words)) == sorted(map(goodness, tops))[:6]
    assert set(chosen["graded, 6 vectors"]) <= harmless
    assert 6 < len(harmless) < len(tops) / 2
    assert chosen == choose_values(model, grader, words, picked=picked, n=6, seed=3)
    other = choose_values(model, grader, words, n=6, seed=4)
    assert list(other) == ["words, 6 vectors", "graded, 6 vectors"]
    assert other["words, 6 vectors"] == by_words
    assert other["graded, 6 vectors"] != chosen["graded, 6 vectors"]
