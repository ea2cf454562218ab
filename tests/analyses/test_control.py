"""Continuations, baselines, toxicity and their comparison are those of plain models changed by hand."""

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
from control.baselines import SelfDebiasing, debiased_losses, prefixed_tokens, word_filter
from control.comparison import (
    ModelChange,
    changes_to_compare,
    compare_control,
    grade_continuations,
    share_estimate,
    toxicity_estimates,
)
from control.generation import continue_prompts, read_prompts
from control.graders import ATTRIBUTES
from control.selection import choose_values, tokens_of_chosen
from hand_controlled import CHOSEN, controlled_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_values import plain_values
from self_debiasing import debiased_probabilities

import matlens
from matlens import InputError, metrics
from matlens.data.corpus import Corpus
from matlens.ffn import controlled

PROMPTS = ["w4 w40 w11 w0 w29 w9", "w17", "w8 w8 w30 w21 w2 w35 w45 w13 w7 w26 w1 w19", "w3 w3"]
N_NEW = 8
GENTLE = {name: number / 4 for name, number in CHOSEN.items()}  # at which prompts still go on differently
BANNED = ["w1", "w2", "w3", "w30", "w44"]
DECAY = 2000.0


@torch.inference_mode()
def probabilities(plain: Any, tokens: Sequence[int]) -> list[float]:
    """What the plain model says of the next token, read as a whole."""
    return plain(torch.tensor([tokens])).logits[0, -1].double().softmax(-1).tolist()


def go_on(tokenizer: Any, prompt: str, choose: Callable[[list[int]], int], n_tokens: int = N_NEW) -> str:
    """Choose token after token, without a cache."""
    tokens = tokenizer(prompt)["input_ids"]
    new: list[int] = []
    for _ in range(n_tokens):
        new.append(choose([*tokens, *new]))
    return str(tokenizer.decode(new))


def texts(model: Any, prompts: Sequence[str] = PROMPTS, **options: Any) -> list[str]:
    table = continue_prompts(model, prompts, **{"n_tokens": N_NEW} | options)
    return table["text"].tolist()


@pytest.mark.parametrize("control", [False, True], ids=["unchanged", "controlled"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_greedy_continuations_are_the_plain_models_own(name, control, small_model, plain_model):
    model, plain = small_model(name), plain_model(name)
    with controlled_by_hand(name, plain, GENTLE if control else {}):
        expected = [
            go_on(model.tokenizer, prompt, lambda tokens: int(np.argmax(probabilities(plain, tokens))))
            for prompt in PROMPTS
        ]
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
            p = np.log(probabilities(plain, [*tokens, *new]))
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
    without = [model.tokenizer.convert_tokens_to_ids(word) for word in BANNED]
    assert texts(model, n_beams=3, processor=word_filter(model.tokenizer, BANNED)) == [
        beams_by_hand(plain, model.tokenizer, prompt, 3, without) for prompt in PROMPTS
    ]
    debiasing = SelfDebiasing(decay=0.0)  # its announcements go on beside the prompts, and change nothing
    assert texts(model, n_beams=3, processor=debiasing) == expected


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


def test_self_debiasing_goes_on_by_the_formula(small_model, plain_model):
    """From the plain model's probabilities after the prompt, and after each announcement and the prompt."""
    model, plain = small_model("gpt2"), plain_model("gpt2")
    debiasing = SelfDebiasing(["threat", "profanity"], decay=DECAY)
    variants = [[], *(model.tokenizer(prefix)["input_ids"] for prefix in debiasing.prefixes)]
    assert len(set(map(len, variants))) == 3

    def drawing(row: int) -> Callable[[list[int]], int]:
        chance = np.random.default_rng(np.random.SeedSequence((5, row, 0)))

        def choose(tokens: list[int]) -> int:
            p = [np.log(probabilities(plain, [*prefix, *tokens])).tolist() for prefix in variants]
            log_p = np.log(debiased_probabilities(p[0], p[1:], debiasing.decay, debiasing.floor))
            return int(np.argmax(log_p + chance.gumbel(size=len(log_p))))

        return choose

    expected = [go_on(model.tokenizer, prompt, drawing(row)) for row, prompt in enumerate(PROMPTS)]
    assert expected != texts(model, n_samples=1, seed=5)
    for options in ({}, {"batch_size": 1}, {"use_cache": False}):
        assert texts(model, processor=debiasing, n_samples=1, seed=5, **options) == expected


def test_the_end_of_the_text_is_not_generated_and_the_checkpoints_own_wishes_are_left_out(
    model_folder, plain_model
):
    model, plain = matlens.load(str(model_folder("llama")), device="cpu"), plain_model("llama")
    tokens = model.tokenizer(PROMPTS[0])["input_ids"]
    likeliest = int(np.argmax(probabilities(plain, tokens)))
    config = model.original_model.generation_config
    config.eos_token_id, config.repetition_penalty, config.do_sample = likeliest, 5.0, True
    config.no_repeat_ngram_size, config.num_beams, config.max_length = 1, 3, 5

    def choose(tokens: list[int]) -> int:
        p = np.array(probabilities(plain, tokens))
        p[likeliest] = 0
        return int(p.argmax())

    expected = [go_on(model.tokenizer, prompt, choose) for prompt in PROMPTS]
    assert texts(model) == expected


@settings(derandomize=True, max_examples=60)
@given(
    names=st.lists(st.sampled_from(list(ATTRIBUTES)), min_size=1, max_size=6, unique=True),
    n=st.integers(1, 3), seed=st.integers(0, 10**6),
    decay=st.sampled_from([0.0, 10.0, 50.0, 100.0]), floor=st.sampled_from([0.01, 0.2, 1.0]),
)  # fmt: skip
def test_every_row_has_the_probabilities_of_the_formula(names, n, seed, decay, floor):
    """Prompts first, then all of them after each announcement in turn; rows of one prompt go on alike."""
    one = SelfDebiasing(names, decay=decay, floor=floor)
    scores = 3 * torch.randn((1 + len(names)) * n, 7, generator=torch.Generator().manual_seed(seed))
    probabilities = one(torch.zeros(len(scores), 1, dtype=torch.long), scores).softmax(-1)
    for row in range(n):
        announced = [scores[row + n * (1 + i)].tolist() for i in range(len(names))]
        expected = torch.tensor(debiased_probabilities(scores[row].tolist(), announced, decay, floor))
        for variant in range(1 + len(names)):
            torch.testing.assert_close(probabilities[row + n * variant], expected, rtol=1e-4, atol=1e-6)


def test_an_announcement_stands_before_the_text_and_after_what_begins_every_text():
    tokenizer = make_tokenizer()
    w3, w4, w9 = tokenizer.convert_tokens_to_ids(["w3", "w4", "w9"])
    assert prefixed_tokens(tokenizer, "w3 w4:\n", [w9]) == [w3, tokenizer.unk_token_id, w9]
    tokenizer.bos_token = "[PAD]"
    assert prefixed_tokens(tokenizer, "w3 w4", [1, w9]) == [1, w3, w4, w9]
    assert prefixed_tokens(tokenizer, "w3 w4", [w9, 1]) == [w3, w4, w9, 1]


class Spelled:
    """A tokenizer that has a token for each of a few texts and knows no others."""

    unk_token_id = 0
    known = ("damn", " damn", "Damn", " Damn", "DAMN", " oaf")

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [self.known.index(text) + 1 if text in self.known else 0]}


def test_banned_forms_cannot_follow_and_phrases_cannot_be_completed():
    w1, w2, w3, w4 = make_tokenizer().convert_tokens_to_ids(["w1", "w2", "w3", "w4"])
    for tokenizer, words, before, banned in (
        (make_tokenizer(), ["w1", " w2 w3 "], [w4, w4], [w1]),
        (make_tokenizer(), ["w1", " w2 w3 "], [w4, w2], sorted([w1, w3])),
        (Spelled(), ["damn"], [9], [1, 2, 3, 4, 5]),
        (Spelled(), ["Damn"], [9], [1, 2, 3, 4, 5]),
        (Spelled(), ["oaf"], [9], [6]),
    ):
        scores = word_filter(tokenizer, words)(torch.tensor([before]), torch.zeros(1, 60))
        assert (scores[0] == -math.inf).nonzero()[:, 0].tolist() == banned


class Graded:
    """Grades by shares of the words of a text."""

    name = "words"

    def __init__(self, **shares: Callable[[str], bool]) -> None:
        self.attributes, self.shares = tuple(shares), shares

    def share(self, attribute: str, text: str) -> float:
        return sum(map(self.shares[attribute], text.split())) / max(len(text.split()), 1)

    def grade(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: np.array([self.share(name, text) for text in texts]) for name in self.attributes}


GRADER = Graded(toxicity=lambda word: word[-1] in "13579", threat=lambda word: word in BANNED)


class ByHand:
    """What a plain model says of the next token, unchanged or changed in one way."""

    def __init__(self, name: str, plain: Any, tokenizer: Any, change: ModelChange) -> None:
        self.name, self.plain, self.tokenizer, self.change = name, plain, tokenizer, change

    def __call__(self, tokens: Sequence[int]) -> list[float]:
        with controlled_by_hand(
            self.name, self.plain, dict.fromkeys(self.change.names, self.change.coefficient)
        ):
            p = probabilities(self.plain, tokens)
        if self.change.method == "Self-Debiasing":
            announced = []
            for prefix in self.change.processor.prefixes:  # type: ignore[union-attr]
                read = [*self.tokenizer(prefix)["input_ids"], *tokens]
                announced.append(list(np.log(probabilities(self.plain, read))))
            return debiased_probabilities(list(np.log(p)), announced, DECAY, 0.01)
        if self.change.method == "WordFilter":
            banned = [self.tokenizer.convert_tokens_to_ids(word) for word in BANNED]
            return [0.0 if token in banned else q for token, q in enumerate(p)]
        return p

    def choose(self, tokens: list[int]) -> int:
        return int(np.argmax(self(tokens)))

    def perplexity(self, sentences: Sequence[str]) -> float:
        lost, counted = 0.0, 0
        for sentence in sentences:
            tokens = self.tokenizer(sentence)["input_ids"]
            for place in range(1, len(tokens)):
                lost -= math.log(self(tokens[:place])[tokens[place]])
            counted += len(tokens) - 1
        return math.exp(lost / counted)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_line_is_that_of_a_plain_model_changed_by_hand(name, small_model, plain_model, sentences):
    model, plain = small_model(name), plain_model(name)
    few = Corpus("few", sentences.sentences[:3], 3, 0, 0, 0)
    changes = changes_to_compare(
        {"picked": ["L0D5", "L2D7"], "graded": ["L1D3"]},
        SelfDebiasing(["threat", "profanity"], decay=DECAY), word_filter(model.tokenizer, BANNED),
        coefficients=[0.0, 6.0],
    )  # fmt: skip
    table, texts = compare_control(
        model, changes, {"p.txt": PROMPTS}, matlens.make_examples(model, few), GRADER
    )
    by_hand = {change: ByHand(name, plain, model.tokenizer, change) for change in changes}
    written = {
        change: [go_on(model.tokenizer, prompt, hand.choose, 20) for prompt in PROMPTS]
        for change, hand in by_hand.items()
    }
    assert texts["text"].tolist() == [text for of_change in written.values() for text in of_change]
    assert texts["method"].tolist() == [change.method for change in changes for _ in PROMPTS]
    base = written[changes[0]]
    perplexities: list[float] = []
    main = table[table["attribute"] != "threat"]
    for change in changes:
        same = main["coefficient"].fillna(-1) == (-1 if change.coefficient is None else change.coefficient)
        of_change = main[same & (main["method"] == change.method)].set_index("metric")["value"]
        scores = [GRADER.share("toxicity", text) for text in written[change]]
        assert of_change["toxic"] == pytest.approx(np.mean([score >= 0.5 for score in scores]))
        assert of_change["score"] == pytest.approx(np.mean(scores))
        moved = [score - GRADER.share("toxicity", text) for score, text in zip(scores, base, strict=True)]
        assert of_change["score_change"] == pytest.approx(np.mean(moved), abs=1e-12)
        assert ("perplexity" in of_change) == (change.method != "WordFilter")
        if change.method == "WordFilter":
            continue
        perplexity = by_hand[change].perplexity(few.sentences)
        perplexities.append(perplexity)
        if isinstance(change.processor, SelfDebiasing):  # in batches of any size
            one_by_one = debiased_losses(
                model, matlens.make_examples(model, few), change.processor, batch_tokens=1
            )
            assert one_by_one.perplexity().value == pytest.approx(perplexity, rel=1e-4)
        assert of_change["perplexity"] == pytest.approx(perplexity, rel=1e-4)
        assert of_change["perplexity_ratio"] == pytest.approx(perplexity / perplexities[0], rel=1e-4)
    assert len({round(one, 2) for one in perplexities}) == len(perplexities), "all differ"
    threat = table[(table["attribute"] == "threat") & (table["metric"] == "score")]["value"]
    assert threat.tolist() == pytest.approx(
        [np.mean([GRADER.share("threat", text) for text in each]) for each in written.values()]
    )
    assert set(table[table["metric"] == "perplexity"]["corpus"]) == {"few"}
    assert set(table[table["metric"] == "score"]["corpus"]) == {"p.txt"}
    counts = table[table["metric"] == "toxic"].drop_duplicates(["method"]).set_index("method")["k"]
    assert counts.dropna().to_dict() == {"picked": 2, "graded": 1}


def tops_by_hand(name: str, plain: Any) -> dict[str, list[int]]:
    """The 30 top tokens of every value vector, the best first."""
    e = plain.get_output_embeddings().weight.detach()
    return {
        f"L{layer}D{i}": (e @ v).topk(30).indices.tolist()
        for layer in range(N_LAYERS)
        for i, v in enumerate(plain_values(name, plain, layer))
    }


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_chosen_by_words_are_those_that_hold_most_of_them_highest(name, small_model, plain_model):
    model, tops = small_model(name), tops_by_hand(name, plain_model(name))
    words, grader = ["w2", "w7", "w31"], Graded(toxicity=lambda word: word in BANNED)
    ids = [model.tokenizer.convert_tokens_to_ids(word) for word in words]

    def goodness(value: str) -> tuple[int, int]:
        places = [tops[value].index(token) for token in ids if token in tops[value]]
        return -len(places), min(places, default=99)

    chosen = choose_values(model, grader, words, picked=["L-1D2", "L0D1"], n=6, seed=3)
    assert list(chosen) == ["picked, 2 vectors", "words, 6 vectors", "graded, 6 vectors"]
    assert chosen["picked, 2 vectors"] == (f"L{N_LAYERS - 1}D2", "L0D1")
    table8 = tokens_of_chosen(model, chosen, k=4)
    for (method, value), rows in table8.groupby(["method", "value"]):
        assert value in chosen[str(method)]
        assert rows["token_id"].tolist() == tops[str(value)][:4]
    assert len(table8) == (2 + 6 + 6) * 4
    by_words = chosen["words, 6 vectors"]
    assert list(map(goodness, by_words)) == sorted(map(goodness, tops))[:6]
    banned = {model.tokenizer.convert_tokens_to_ids(word) for word in BANNED}
    harmless = {value for value, tokens in tops.items() if len(banned & {*tokens}) / 30 < 0.1}
    assert set(chosen["graded, 6 vectors"]) <= harmless
    assert 6 < len(harmless) < len(tops) / 2
    other = choose_values(model, grader, words, n=6, seed=4)
    assert list(other) == ["words, 6 vectors", "graded, 6 vectors"]
    assert [other[name] == chosen[name] for name in other] == [True, False]


def test_texts_are_graded_without_their_prompts_and_counted_from_a_half_on():
    numbers = pd.DataFrame({"prompt": ["w1", "w1", "w3", "w3"], "sample": [0, 1, 0, 1]})
    base, ours = (
        grade_continuations(numbers.assign(text=["w1 " * odd + "w4 " * (10 - odd) for odd in each]), GRADER)
        for each in ([5, 4, 1, 8], [2, 4, 5, 0])
    )
    assert base["toxicity"].tolist() == [0.5, 0.4, 0.1, 0.8]
    estimates = dict(toxicity_estimates(ours, base, "toxicity"))
    assert list(estimates) == ["toxic", "score", "score_change"]
    assert estimates["toxic"].value == 0.25
    assert estimates["score"].value == pytest.approx((0.2 + 0.4 + 0.5 + 0.0) / 4)
    assert estimates["score_change"].value == pytest.approx(((-0.3 + 0) / 2 + (0.4 - 0.8) / 2) / 2)
    expected = metrics.mean(torch.tensor([-0.15, -0.2]))
    assert estimates["score_change"].low == pytest.approx(expected.low)
    assert {one.n for one in estimates.values()} == {2}
    itself = dict(toxicity_estimates(base, base, "toxicity"))
    assert itself["toxic"].value == 0.5
    assert tuple(itself["score_change"][:3]) == (0, 0, 0)
    assert dict(toxicity_estimates(ours, base, "threat"))["score"].value == pytest.approx(0.275)


@pytest.mark.parametrize("hits", [0, 1, 7, 20])
def test_with_one_sample_of_each_prompt_it_is_wilsons(hits):
    one = np.arange(20)[:, None] < hits
    expected = metrics.proportion(torch.from_numpy(one))
    assert tuple(share_estimate(one)) == pytest.approx(tuple(expected))


def test_samples_that_are_alike_count_once_and_independent_ones_each():
    one = np.arange(50)[:, None] < 10
    assert tuple(share_estimate(one.repeat(8, 1))) == pytest.approx(tuple(share_estimate(one)))
    even = np.tile([True, False, False, False], (50, 1))  # as even as can be
    expected = metrics.proportion(torch.from_numpy(even))
    assert tuple(share_estimate(even))[:3] == pytest.approx(tuple(expected)[:3])


ROWS = [
    {"prompt": {"text": "You are such a", "toxicity": 0.2}, "challenging": True},
    {"prompt": {"text": " My neighbour is "}, "challenging": False},
    {"prompt": {"text": ""}, "challenging": True},
    {"prompt": "plain text", "challenging": True, "question": "Why?"},
]


def test_prompts_are_in_a_field_or_its_text_or_one_a_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n \n")
    assert read_prompts(path) == ["You are such a", "My neighbour is", "plain text"]
    assert read_prompts(path, challenging=True) == ["You are such a", "plain text"]
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\n two \n")
    assert read_prompts(text) == ["one", "two"]
    for wrong, options in ((text, {"challenging": True}), (tmp_path / "absent.txt", {})):
        with pytest.raises((InputError, OSError)):
            read_prompts(wrong, **options)
