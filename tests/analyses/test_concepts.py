"""Samples are drawn as they should be, and filled sheets give what one counts by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from annotation.concept_sheets import Annotation
from annotation.concepts import (
    KINDS,
    MEASURES,
    SAMPLE_COLUMNS,
    annotator_agreement,
    draw_concept_sample,
    tally_concepts,
    tally_items,
)
from conftest import N_LAYERS, make_sentences
from scipy import stats
from sklearn.metrics import cohen_kappa_score

import matlens
from matlens.ffn.projection import Projection
from matlens.ffn.updates import Updates
from matlens.ffn.values import ValueVectors
from matlens.io.tables import COLUMNS
from matlens.models.tokens import token_texts, visible

K, PER_LAYER = 5, 2


@pytest.fixture
def examples(small_model):
    return lambda name: matlens.make_examples(small_model(name), make_sentences(), sample_special=False)


# Drawing


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma3"])
def test_items_have_the_top_tokens_of_what_the_key_says_they_are(name, small_model, examples):
    model = small_model(name)
    table = draw_concept_sample(model, examples(name), per_layer=PER_LAYER, k=K, seed=3)
    assert list(table.columns) == list(SAMPLE_COLUMNS)
    assert table["item"].tolist() == np.repeat(np.arange(1, 3 * N_LAYERS * PER_LAYER + 1), K).tolist()
    values, projection = ValueVectors(model), Projection.from_model(model)
    updates = Updates.run(model, examples(name).head(N_LAYERS * PER_LAYER), progress=False)
    seen = set()
    for _, lines in table.groupby("item"):
        kind, layer, vector = next(lines[["kind", "layer", "vector"]].itertuples(index=False, name=None))
        number = int(vector.split()[1].rstrip(",")) if kind != "values" else -1
        expected = {
            "values": lambda vector=vector: values.vectors([vector])[0],
            "random": lambda layer=layer, i=number: values.random(layer, PER_LAYER, seed=3)[i % PER_LAYER],
            "updates": lambda layer=layer, i=number: updates.outputs(layer)[i],
        }[kind]()
        scores = projection.unembedding @ expected
        ids = torch.tensor(lines["token_id"].to_list())
        torch.testing.assert_close(scores[ids], scores.topk(K).values)
        assert lines["token"].tolist() == list(map(visible, token_texts(model.tokenizer, ids.tolist())))
        assert lines["rank"].tolist() == list(range(1, K + 1))
        assert (lines["corpus"] == ("words" if kind == "updates" else "none")).all()
        assert kind != "values" or values.resolve(vector).layer == layer
        assert number < 0 or number // PER_LAYER == layer
        seen.add((kind, layer, vector))
    counted = pd.DataFrame(sorted(seen)).groupby([0, 1]).size()
    assert counted.to_dict() == dict.fromkeys(itertools.product(KINDS, range(N_LAYERS)), PER_LAYER)


# Tallies: items of ten tokens, two layers; which is what, and its patterns by the ranks they have

ITEMS = {1: ("values", 0), 2: ("values", 0), 3: ("values", 1), 4: ("random", 0), 5: ("random", 1),
         6: ("updates", 0), 7: ("updates", 1)}  # fmt: skip
Filled = dict[tuple[int, int], tuple[str, list[int]]]
ANNA: Filled = {
    (1, 1): ("semantic", [1, 2, 3, 4]), (1, 2): ("syntactic", [4, 5, 6, 7]),  # rank 4 is in both
    (2, 1): ("names", [1, 2, 3]),  # too small
    (3, 1): ("semantic", [1, 2, 3, 4, 5]), (3, 2): ("semantic", [4, 5, 6, 7]),
    (3, 9): ("stopwords", [7, 8, 9, 10]),
    (6, 1): ("stopwords", [1, 2, 3, 4, 5, 6]), (7, 1): ("names", [7, 8, 9, 10]),
}  # fmt: skip
#                covered, without, semantic, syntactic, names, stopwords, concepts, small
COUNTED = {
    1: (0.7, 0.7, 0.35, 0.35, 0, 0, 2, 0),
    2: (0, 0, 0, 0, 0, 0, 0, 1),
    3: (1, 0.7, 0.65, 0, 0, 0.35, 2, 0),
    4: (0, 0, 0, 0, 0, 0, 0, 0),
    5: (0, 0, 0, 0, 0, 0, 0, 0),
    6: (0.6, 0, 0, 0, 0, 0.6, 0, 0),
    7: (0.4, 0.4, 0, 0, 0.4, 0, 1, 0),
}
BEN: Filled = {
    (1, 3): ("semantic", [1, 2, 3, 4, 5]),
    (4, 1): ("names", [2, 4, 6, 8]),
    (6, 1): ("stopwords", [1, 2]),
}


def table() -> pd.DataFrame:
    rows = [
        (item, "m", "words" if kind == "updates" else "none", kind, layer, "v", rank, 0, f"t{rank}")
        for item, (kind, layer) in ITEMS.items()
        for rank in range(1, 11)
    ]
    return pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS)).sample(frac=1, random_state=0)


def annotation(name: str, filled: Filled) -> Annotation:
    marks = [(item, rank, number) for (item, number), (_, ranks) in filled.items() for rank in ranks]
    patterns = [(item, number, "", kind) for (item, number), (kind, _) in filled.items()]
    return Annotation(
        name,
        pd.DataFrame(marks, columns=["item", "rank", "pattern"]),
        pd.DataFrame(patterns, columns=["item", "pattern", "description", "class"]),
    )


def test_an_item_is_counted_as_by_hand():
    tally = tally_items(table(), annotation("anna", ANNA))
    assert tally[["kind", "layer"]].apply(tuple, axis=1).to_dict() == ITEMS
    for item, expected in COUNTED.items():
        assert tuple(tally.loc[item, list(MEASURES)]) == pytest.approx(expected), item
    parts = tally[["semantic", "syntactic", "names", "stopwords"]].sum(axis=1)
    assert parts.tolist() == pytest.approx(tally["covered"].tolist())


def test_shares_are_means_over_annotators_and_items():
    sample, both = table(), [annotation("anna", ANNA), annotation("ben", BEN)]
    for given in (both[:1], both):
        shares = tally_concepts(sample, given)
        assert list(shares.columns) == list(COLUMNS)
        tallies = [tally_items(sample, filled) for filled in given]
        for kind, layer, name in itertools.product(KINDS, (None, 0, 1), MEASURES):
            numbers = [item for item, key in ITEMS.items() if key[0] == kind and layer in (None, key[1])]
            each = [np.mean([tally.loc[item, name] for tally in tallies]) for item in numbers]
            same = shares["layer"].isna() if layer is None else shares["layer"] == layer
            (row,) = shares[same & (shares["method"] == kind) & (shares["metric"] == name)].itertuples()
            assert (row.n, row.k, row.model) == (len(numbers), 10, "m")
            assert row.corpus == ("words" if kind == "updates" else "none")
            assert row.value == pytest.approx(np.mean(each))
            if len(each) > 1 and np.std(each) > 0:
                low, high = stats.t.interval(0.95, len(each) - 1, np.mean(each), stats.sem(each))
                assert (row.low, row.high) == pytest.approx((low, high))
    alone = tally_concepts(sample, both[:1])
    overall = alone[alone["layer"].isna() & (alone["metric"] == "covered")].set_index("method")["value"]
    assert overall.to_dict() == pytest.approx({"values": 1.7 / 3, "random": 0, "updates": 0.5})


def test_agreement_is_that_of_scikit_learn():
    sample, anna, ben = table(), annotation("anna", ANNA), annotation("ben", BEN)
    agreement = annotator_agreement(sample, [anna, ben]).set_index(["method", "metric"])
    assert set(agreement["one"]) == {"anna"}
    assert set(agreement["other"]) == {"ben"}
    for kind in ("all", *KINDS):
        items = [item for item, key in ITEMS.items() if kind in ("all", key[0])]
        flags, counts = [], []
        for filled in (ANNA, BEN):
            large = {key: pattern for key, pattern in filled.items() if len(pattern[1]) >= 4}
            inside = {(item, rank) for (item, _), (_, ranks) in large.items() for rank in ranks}
            flags.append([(item, rank) in inside for item in items for rank in range(1, 11)])
            content = [item for (item, _), (name, _) in large.items() if name != "stopwords"]
            counts.append([content.count(item) for item in items])
        assert agreement.loc[(kind, "kappa_covered"), ["value", "n"]].tolist() == [
            pytest.approx(cohen_kappa_score(*flags)), len(flags[0]),
        ]  # fmt: skip
        assert agreement.loc[(kind, "kappa_concepts"), ["value", "n"]].tolist() == [
            pytest.approx(cohen_kappa_score(*counts, weights="quadratic")), len(items),
        ]  # fmt: skip
        assert agreement.loc[(kind, "same_concepts"), "value"] == pytest.approx(np.mean(np.equal(*counts)))
