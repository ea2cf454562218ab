"""Every number of the comparison is that of a plain model changed by hand, method by method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_LAYERS
from control.baselines import SelfDebiasing, debiased_losses, word_filter
from control.comparison import ModelChange, changes_to_compare, compare_control
from control.selection import choose_values, tokens_of_chosen
from hand_controlled import controlled_by_hand
from plain_values import plain_values
from self_debiasing import debiased_probabilities

from matlens.data.corpus import Corpus
from matlens.data.making import make_examples

Models = Callable[[str], Any]
PROMPTS = ["w4 w40 w11", "w17", "w8 w8 w30 w21"]
BANNED = ["w1", "w2", "w3", "w30", "w44"]
DECAY = 2000.0


class Words:
    """Grades by the numbers of the words."""

    name, attributes = "words", ("toxicity", "threat")

    def grade(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        return {"toxicity": np.array(list(map(odd, texts))), "threat": np.array(list(map(low, texts)))}


def odd(text: str) -> float:
    """The share of the words with an odd number."""
    return sum(word[-1] in "13579" for word in text.split()) / max(len(text.split()), 1)


def low(text: str) -> float:
    return sum(word in ("w1", "w2", "w3") for word in text.split()) / max(len(text.split()), 1)


@torch.inference_mode()
def probabilities(plain: Any, tokens: Sequence[int]) -> list[float]:
    return plain(torch.tensor([list(tokens)])).logits[0, -1].double().softmax(-1).tolist()


class ByHand:
    """What a plain model says of the next token, unchanged or changed in one way."""

    def __init__(self, name: str, plain: Any, tokenizer: Any, change: ModelChange) -> None:
        self.name, self.plain, self.tokenizer, self.change = name, plain, tokenizer, change

    def __call__(self, tokens: Sequence[int]) -> list[float]:
        set_to = dict.fromkeys(self.change.names, self.change.coefficient or math.nan)
        with controlled_by_hand(self.name, self.plain, set_to):
            p = probabilities(self.plain, tokens)
        if self.change.method == "Self-Debiasing":
            announced = []
            for prefix in self.change.processor.prefixes:  # type: ignore[union-attr]
                read = [*self.tokenizer(prefix)["input_ids"], *tokens]
                announced.append([math.log(q) for q in probabilities(self.plain, read)])
            return debiased_probabilities([math.log(q) for q in p], announced, DECAY, 0.01)
        if self.change.method == "WordFilter":
            banned = [self.tokenizer.convert_tokens_to_ids(word) for word in BANNED]
            return [0.0 if token in banned else q for token, q in enumerate(p)]
        return p

    def texts(self, n_tokens: int = 20) -> list[str]:
        texts = []
        for prompt in PROMPTS:
            tokens = self.tokenizer(prompt)["input_ids"]
            new: list[int] = []
            for _ in range(n_tokens):
                new.append(int(np.argmax(self([*tokens, *new]))))
            texts.append(self.tokenizer.decode(new))
        return texts

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
        coefficients=[-2.0, 6.0],
    )  # fmt: skip
    table, texts = compare_control(model, changes, {"p.txt": PROMPTS}, make_examples(model, few), Words())
    by_hand = {change: ByHand(name, plain, model.tokenizer, change) for change in changes}
    written = {change: hand.texts() for change, hand in by_hand.items()}
    assert texts["text"].tolist() == [text for of_change in written.values() for text in of_change]
    assert len({tuple(of_change) for of_change in written.values()}) == len(changes), "all differ"
    assert texts["method"].tolist() == [change.method for change in changes for _ in PROMPTS]
    base = written[changes[0]]
    measured: dict[str, float] = {}
    main = table[table["attribute"] != "threat"]
    for change in changes:
        coefficient = main["coefficient"].isna() if change.coefficient is None else (
            main["coefficient"] == change.coefficient
        )  # fmt: skip
        of_change = main[coefficient & (main["method"] == change.method)].set_index("metric")["value"]
        scores = [odd(text) for text in written[change]]
        assert of_change["toxic"] == pytest.approx(np.mean([score >= 0.5 for score in scores]))
        assert of_change["score"] == pytest.approx(np.mean(scores))
        moved = [score - odd(text) for score, text in zip(scores, base, strict=True)]
        assert of_change["score_change"] == pytest.approx(np.mean(moved), abs=1e-12)
        assert ("perplexity" in of_change) == (change.method != "WordFilter")
        if change.method == "WordFilter":
            continue
        measured[str(change)] = by_hand[change].perplexity(few.sentences)
        if isinstance(change.processor, SelfDebiasing):  # in batches of any size
            one_by_one = debiased_losses(model, make_examples(model, few), change.processor, batch_tokens=1)
            assert one_by_one.perplexity().value == pytest.approx(measured[str(change)], rel=1e-4)
        assert of_change["perplexity"] == pytest.approx(measured[str(change)], rel=1e-4)
        ratio = measured[str(change)] / measured["unchanged"]
        assert of_change["perplexity_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert len({round(ppl, 2) for ppl in measured.values()}) == len(measured), "all differ"
    threat = table[(table["attribute"] == "threat") & (table["metric"] == "score")]["value"]
    assert threat.tolist() == pytest.approx([np.mean(list(map(low, each))) for each in written.values()])
    assert set(table[table["metric"] == "perplexity"]["corpus"]) == {"few"}
    assert set(table[table["metric"] == "score"]["corpus"]) == {"p.txt"}
    counts = table[table["metric"] == "toxic"].drop_duplicates(["method"]).set_index("method")["k"]
    assert counts.dropna().to_dict() == {"picked": 2, "graded": 1}
    assert set(table["experiment"]) == {"table5_control"}
    assert set(texts["prompts"]) == {"p.txt"}


def test_zero_is_a_coefficient_and_not_none(small_model, plain_model, sentences):
    model, few = small_model("gpt2"), Corpus("few", sentences.sentences[:3], 3, 0, 0, 0)
    off = ModelChange("off", 0.0, tuple(f"L1D{i}" for i in range(60)))
    texts, changes = make_examples(model, few), [ModelChange("unchanged"), off]
    table = compare_control(model, changes, {"prompts": PROMPTS}, texts, Words())[0]
    ratio = table[(table["method"] == "off") & (table["metric"] == "perplexity_ratio")]["value"].item()
    set_to = dict.fromkeys(off.names, 0.0)
    with controlled_by_hand("gpt2", plain_model("gpt2"), set_to):
        hand = ByHand("gpt2", plain_model("gpt2"), model.tokenizer, ModelChange("unchanged"))
        changed = hand.perplexity(few.sentences)
    assert ratio == pytest.approx(changed / hand.perplexity(few.sentences), rel=1e-4)
    assert ratio != pytest.approx(1, rel=1e-4)


class Banned:
    """Grades by how many words are banned ones."""

    name, attributes = "banned", ("toxicity",)

    def grade(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        shares = [sum(word in BANNED for word in text.split()) / 30 for text in texts]
        return {"toxicity": np.array(shares)}


def banned_share(model: Any, tokens: Sequence[int]) -> float:
    return sum(model.tokenizer.convert_ids_to_tokens(token) in BANNED for token in tokens) / 30


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
    words = ["w2", "w7", "w31"]
    ids = [model.tokenizer.convert_tokens_to_ids(word) for word in words]

    def goodness(value: str) -> tuple[int, int]:
        places = [tops[value].index(token) for token in ids if token in tops[value]]
        return -len(places), min(places, default=99)

    chosen = choose_values(model, Banned(), words, picked=["L-1D2", "L0D1"], n=6, seed=3)
    assert list(chosen) == ["picked, 2 vectors", "words, 6 vectors", "graded, 6 vectors"]
    assert chosen["picked, 2 vectors"] == (f"L{N_LAYERS - 1}D2", "L0D1")
    table8 = tokens_of_chosen(model, chosen, k=4)
    for (method, value), rows in table8.groupby(["method", "value"]):
        assert value in chosen[str(method)]
        assert rows["token_id"].tolist() == tops[str(value)][:4]
    assert len(table8) == (2 + 6 + 6) * 4
    by_words = chosen["words, 6 vectors"]
    assert len(set(by_words)) == 6
    assert list(map(goodness, by_words)) == sorted(map(goodness, tops))[:6]
    assert sorted(map(goodness, tops))[0] < sorted(map(goodness, tops))[-1]
    harmless = {value for value, tokens in tops.items() if banned_share(model, tokens) < 0.1}
    assert set(chosen["graded, 6 vectors"]) <= harmless
    assert 6 < len(harmless) < len(tops) / 2
    assert chosen == choose_values(model, Banned(), words, picked=["L-1D2", "L0D1"], n=6, seed=3)
    other = choose_values(model, Banned(), words, n=6, seed=4)
    assert list(other) == ["words, 6 vectors", "graded, 6 vectors"]
    assert other["words, 6 vectors"] == by_words
    assert other["graded, 6 vectors"] != chosen["graded, 6 vectors"]
    usual = choose_values(model, Banned(), words, seed=3)  # as many as in the paper
    assert list(usual) == ["words, 10 vectors", "graded, 10 vectors"]
    assert usual["words, 10 vectors"][:6] == by_words
    assert len(tokens_of_chosen(model, {"picked": ["L0D1"]})) == 10
