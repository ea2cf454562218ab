"""Concepts in top tokens, annotated by people (paper B, section 4).

A sample has value vectors, random vectors and FFN updates of every layer as numbered items in random
order, each with its top tokens. It is the key to the annotators' sheets (`concept_sheets`), which show
only items and tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import cohen_kappa_score
from studies import Model, layer_table

from annotation.concept_sheets import CLASSES, Annotation
from matlens import InputError, metrics
from matlens.data import Examples
from matlens.ffn import Projection, Updates
from matlens.io import read_table
from matlens.models import token_texts, visible

KINDS = ("values", "random", "updates")
MIN_PATTERN_TOKENS = 4  # as in the paper's protocol
SAMPLE_COLUMNS = {
    "item": "int64", "model": "str", "corpus": "str", "kind": "str", "layer": "int64", "vector": "str",
    "rank": "int64", "token_id": "int64", "token": "str",
}  # fmt: skip
MEASURES = ("covered", "without_stopwords", *CLASSES, "concepts", "small_patterns")
AGREEMENT_COLUMNS = ("one", "other", "method", "metric", "value", "n")


def draw_concept_sample(
    model: Model, examples: Examples, *, per_layer: int = 10, k: int = 30, seed: int = 0
) -> pd.DataFrame:
    """Sample vectors whose top tokens are to be annotated, one row per token.

    Columns are ``item, model, corpus, kind, layer, vector, rank, token_id, token``. Of each kind there are
    ``per_layer`` at each layer: ``values``, value vectors; ``random``, vectors with their mean and standard
    deviation; and ``updates``, FFN outputs, each at the position of another example. The vector is a value
    vector's name, a random vector's number, or the example and its position. Items are in random order.
    """
    n_layers, generator = int(model.cfg.n_layers), np.random.default_rng(seed)
    if len(examples) < n_layers * per_layer:
        raise InputError(
            f"examples must be at least {n_layers * per_layer} for {per_layer} updates at each of {n_layers} "
            f"layers, got {len(examples)}."
        )
    examples = examples.head(n_layers * per_layer)
    updates, projection = Updates.run(model, examples), Projection.from_model(model)
    values, corpus = updates.values, examples.provenance.get("corpus", "unnamed")
    items: list[tuple[Any, ...]] = []
    for layer in range(n_layers):
        chosen = sorted(generator.choice(values.d_mlp, per_layer, replace=False).tolist())
        of_layer = range(layer * per_layer, (layer + 1) * per_layer)
        places = [f"example {examples.sentences[i]}, position {examples.positions[i]}" for i in of_layer]
        names_of_values = [str(values.vector(layer, i)) for i in chosen]
        for kind, source, names, vectors in (
            ("values", "none", names_of_values, values.layer(layer)[chosen]),
            ("random", "none", (f"random {i}" for i in of_layer), values.random(layer, per_layer, seed=seed)),
            ("updates", corpus, places, updates.outputs(layer)[of_layer.start : of_layer.stop]),
        ):
            for name, ids in zip(names, projection.top(vectors, k).ids.tolist(), strict=True):
                items.append((values.identity.name, source, kind, layer, name, ids))
    rows = []
    for item, index in enumerate(generator.permutation(len(items)), start=1):
        *described, ids = items[index]
        tokens = zip(ids, map(visible, token_texts(projection.tokenizer, ids)), strict=True)
        rows += [(item, *described, rank, *token) for rank, token in enumerate(tokens, start=1)]
    return pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))


def read_concept_sample(path: Path) -> pd.DataFrame:
    """Read a sample of `draw_concept_sample` from CSV."""
    return read_table(
        path, SAMPLE_COLUMNS, what="the key to the sheets",
        made_by="Expected the --out folder of the run that wrote the sheets.",
    )  # fmt: skip


def tally_items(sample: pd.DataFrame, annotation: Annotation) -> pd.DataFrame:
    """Shares and counts of each item by one annotator, with ``kind`` and ``layer``.

    A pattern counts if at least four tokens belong to it. ``covered`` is the share of the item's tokens in
    such a pattern; ``without_stopwords`` the same without patterns of stopwords; ``semantic``,
    ``syntactic``, ``names`` and ``stopwords`` are shares that add up to ``covered``: a token in patterns of
    two classes is half in each. ``concepts`` is the number of patterns without stopwords, and
    ``small_patterns`` that of those that do not count.
    """
    marks = annotation.marks.merge(annotation.patterns, on=["item", "pattern"], validate="many_to_one")
    sizes = marks.groupby(["item", "pattern"])["rank"].transform("size")
    counted = marks[sizes >= MIN_PATTERN_TOKENS]
    items = sample.groupby("item").agg(kind=("kind", "first"), layer=("layer", "first"), k=("rank", "size"))

    def share(weights: pd.Series) -> pd.Series:
        return weights.groupby("item").sum().reindex(items.index, fill_value=0) / items["k"]

    def n_patterns(marks: pd.DataFrame) -> pd.Series:
        patterns = marks.drop_duplicates(["item", "pattern"])
        return patterns.groupby("item").size().reindex(items.index, fill_value=0)

    classes = counted.groupby(["item", "rank", "class"]).size().unstack("class", fill_value=0)
    parts = (classes.reindex(columns=list(CLASSES), fill_value=0) > 0).astype(float)
    parts = parts.div(parts.sum(axis=1), axis=0)
    content = counted[counted["class"] != "stopwords"]
    return items.drop(columns="k").assign(
        covered=share(parts.sum(axis=1)),
        without_stopwords=share(content.drop_duplicates(["item", "rank"]).set_index("item")["rank"] > 0),
        **{name: share(parts[name]) for name in CLASSES},
        concepts=n_patterns(content),
        small_patterns=n_patterns(marks[sizes < MIN_PATTERN_TOKENS]),
    )


def tally_concepts(sample: pd.DataFrame, annotations: Sequence[Annotation]) -> pd.DataFrame:
    """Shares and counts of paper B's Table 2 and Figure 2, by kind and layer.

    The metrics are those of `tally_items`, averaged first over annotators and then over items. Intervals are
    over items, whose tokens are not independent of each other. ``layer`` is empty for all layers together.
    """
    tallies = [tally_items(sample, annotation) for annotation in annotations]
    items = tallies[0].assign(
        **{name: sum(tally[name] for tally in tallies) / len(tallies) for name in MEASURES}
    )
    model, k = sample["model"].iloc[0], int(sample["rank"].max())
    corpora = sample.groupby("kind")["corpus"].first()
    rows = []
    for kind in KINDS:
        for layer in (None, *sorted(items["layer"].unique())):
            part = items[(items["kind"] == kind) & (True if layer is None else items["layer"] == layer)]
            for name in MEASURES:
                values = torch.from_numpy(part[name].to_numpy(dtype=float, copy=True))
                counts = name in ("concepts", "small_patterns")
                estimate = (
                    metrics.mean(values) if counts else metrics.share(values, n_entries=k * len(values))
                )
                rows.append((kind, layer, name, k, estimate))
    table = layer_table("concepts", model, "", rows)
    return table.assign(corpus=table["method"].map(corpora))


def annotator_agreement(sample: pd.DataFrame, annotations: Sequence[Annotation]) -> pd.DataFrame:
    """Agreement of every two annotators, for each kind and for ``all``.

    Columns are ``one, other, method, metric, value, n``. Metrics: ``kappa_covered``, Cohen's kappa of whether
    a token is in a concept, ``n`` tokens; ``kappa_concepts``, Cohen's kappa of the number of concepts of an
    item, with quadratic weights, and ``same_concepts``, the share of items with equal numbers, ``n`` items. A
    kappa is empty where both have given the same answer throughout.
    """
    item_kinds = sample.groupby("item")["kind"].first()
    token_kinds = sample.set_index(["item", "rank"])["kind"]
    answers = [
        (annotation.name, _covered_tokens(sample, annotation), tally_items(sample, annotation)["concepts"])
        for annotation in annotations
    ]
    rows: list[tuple[Any, ...]] = []
    for first, second in itertools.combinations(answers, 2):
        for kind in ("all", *KINDS):
            covered = [_of_kind(answer[1], token_kinds, kind) for answer in (first, second)]
            concepts = [_of_kind(answer[2], item_kinds, kind) for answer in (first, second)]
            n_tokens, n_items = len(covered[0]), len(concepts[0])
            same = float((concepts[0] == concepts[1]).mean())
            key = (first[0], second[0], kind)
            rows.append((*key, "kappa_covered", _kappa(*covered), n_tokens))
            rows.append((*key, "kappa_concepts", _kappa(*concepts, weights="quadratic"), n_items))
            rows.append((*key, "same_concepts", same, n_items))
    return pd.DataFrame(rows, columns=list(AGREEMENT_COLUMNS))


def _of_kind(answers: pd.Series, kinds: pd.Series, kind: str) -> pd.Series:
    return answers if kind == "all" else answers[kinds == kind]


def _covered_tokens(sample: pd.DataFrame, annotation: Annotation) -> pd.Series:
    """Whether each token is in a pattern that counts, in the order of the sample."""
    sizes = annotation.marks.groupby(["item", "pattern"])["rank"].transform("size")
    inside = pd.MultiIndex.from_frame(annotation.marks[sizes >= MIN_PATTERN_TOKENS][["item", "rank"]])
    index = pd.MultiIndex.from_frame(sample[["item", "rank"]])
    return pd.Series(index.isin(inside), index=index)


def _kappa(first: pd.Series, second: pd.Series, **options: str) -> float:
    if len({*first, *second}) < 2:
        return float("nan")
    return float(cohen_kappa_score(first, second, **options))
