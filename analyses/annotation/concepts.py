"""Concepts among top tokens, as people find them (paper B, section 4): what is annotated, and what it gives.

A sample holds value vectors, random vectors and whole FFN updates of every layer as numbered items in random
order, each with its top tokens. It is the key to the sheets that annotators get (`concept_sheets`), which
show items and tokens alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import cohen_kappa_score

from annotation.concept_sheets import CLASSES, Annotation, check_sample
from matlens import metrics
from matlens.data.examples import Examples
from matlens.errors import InputError, PositiveInt, Seed, checked
from matlens.ffn.projection import TOP, Projection
from matlens.ffn.updates import Updates
from matlens.io.tables import read_table, result_row, result_table
from matlens.models.tokens import token_texts, visible

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

EXPERIMENT = "concepts"
KINDS = ("values", "random", "updates")
MIN_PATTERN_TOKENS = 4  # as in the paper's protocol
SAMPLE_COLUMNS = {
    "item": "int64", "model": "str", "corpus": "str", "kind": "str", "layer": "int64", "vector": "str",
    "rank": "int64", "token_id": "int64", "token": "str",
}  # fmt: skip
MEASURES = ("covered", "without_stopwords", *CLASSES, "concepts", "small_patterns")
AGREEMENT_COLUMNS = ("one", "other", "method", "metric", "value", "n")


@checked
def draw_concept_sample(
    model: TransformerBridge,
    examples: Examples,
    *,
    per_layer: int = 10,
    k: PositiveInt = TOP,
    seed: Seed = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Draw vectors whose top tokens are to be annotated, one row a token.

    Columns are ``item, model, corpus, kind, layer, vector, rank, token_id, token``. The kinds are ``values``,
    value vectors; ``random``, vectors with their mean and standard deviation; and ``updates``, what the FFN
    writes at an example's position. The vector is a value vector's name, a random vector's number, or the
    example and its position. Tokens are written as people see them.

    Parameters
    ----------
    model
        The model whose FFNs are looked at.
    examples
        Examples of the updates, at least ``n_layers x per_layer``: each update is of another one.
    per_layer
        Number of vectors of each kind at each layer.
    k
        Number of top tokens of each vector.
    seed
        Seed of the draw and of the order of the items.
    progress
        Whether to show a progress bar.

    Raises
    ------
    InputError
        There are too few examples, or too few value vectors in a layer.
    """
    n_layers, generator = int(model.cfg.n_layers), np.random.default_rng(seed)
    if per_layer < 1 or len(examples) < n_layers * per_layer:
        raise InputError(
            f"{per_layer} updates at each of {n_layers} layers were asked for, and there are {len(examples)} "
            f"examples. Expected at least 1 at each layer, and {n_layers * per_layer} examples or more."
        )
    examples = examples.head(n_layers * per_layer)
    updates, projection = Updates.run(model, examples, progress=progress), Projection.from_model(model)
    values = updates.values
    corpus = examples.provenance.get("corpus", "unnamed")
    items: list[tuple[tuple[Any, ...], list[tuple[int, str]]]] = []
    for layer in range(n_layers):
        chosen = sorted(generator.choice(values.d_mlp, per_layer, replace=False).tolist())
        numbers = range(layer * per_layer, (layer + 1) * per_layer)
        drawn = {
            "values": values.layer(layer)[chosen],
            "random": values.random(layer, per_layer, seed=seed),
            "updates": updates.outputs(layer)[numbers.start : numbers.stop],
        }
        names = {
            "values": [str(values.vector(layer, index)) for index in chosen],
            "random": [f"random {i}" for i in numbers],
            "updates": [
                f"example {examples.sentences[i]}, position {examples.positions[i]}" for i in numbers
            ],
        }
        for kind in KINDS:
            source = corpus if kind == "updates" else "none"
            for name, ids in zip(names[kind], projection.top(drawn[kind], k).ids.tolist(), strict=True):
                texts = map(visible, token_texts(projection.tokenizer, ids))
                tokens = list(zip(ids, texts, strict=True))
                items.append(((values.identity.name, source, kind, layer, name), tokens))
    order = generator.permutation(len(items))
    rows = [
        (item, *items[index][0], rank, *token)
        for item, index in enumerate(order, start=1)
        for rank, token in enumerate(items[index][1], start=1)
    ]
    return pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))


@checked
def read_concept_sample(path: str | Path) -> pd.DataFrame:
    """Read a sample of `draw_concept_sample` that was written as CSV.

    Raises
    ------
    InputError
        There is no such table.
    """
    return read_table(
        path,
        SAMPLE_COLUMNS,
        what="the key to the sheets",
        made_by="Expected the --out folder of the run that wrote the sheets.",
        lineterminator="\n",
    )


def tally_items(sample: pd.DataFrame, annotation: Annotation) -> pd.DataFrame:
    """Shares and counts of each item as one annotator sees it, one row an item, with ``kind`` and ``layer``.

    A pattern counts if at least four tokens belong to it. ``covered`` is the share of the item's tokens in
    such a pattern; ``without_stopwords`` the same, with patterns of stopwords left out; ``semantic``,
    ``syntactic``, ``names`` and ``stopwords`` are shares that add up to ``covered``: a token in patterns of
    two classes is half in each. ``concepts`` is the number of patterns, stopwords left out, and
    ``small_patterns`` that of those that do not count.
    """
    check_sample(sample)
    strange = set(annotation.marks["item"]) - set(sample["item"])
    if strange:
        raise InputError(
            f"The annotation of {annotation.name} has an item {min(strange)} that the sample has not: it is "
            "of another sample."
        )
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


@checked
def tally_concepts(sample: pd.DataFrame, annotations: Sequence[Annotation]) -> pd.DataFrame:
    """Shares and counts of paper B's Table 2 and Figure 2, for each kind at each layer and at all of them.

    The columns are those of all tables of results; the metrics are those of `tally_items`, averaged first
    over annotators and then over items. Intervals are over items, whose tokens are not independent of each
    other. ``layer`` is empty for all layers together.

    Parameters
    ----------
    sample
        The sample of `draw_concept_sample`.
    annotations
        What the annotators have filled in: an annotation each of `read_concept_sheets`.

    Raises
    ------
    InputError
        There are no annotations.
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
                shares = torch.from_numpy(part[name].to_numpy(dtype=float, copy=True))
                rows.append(
                    result_row(
                        EXPERIMENT, model=model, corpus=corpora[kind], method=kind, layer=layer, target=layer,
                        metric=name, k=k, estimate=metrics.mean(shares),
                    )
                )  # fmt: skip
    return result_table(rows)


@checked
def annotator_agreement(sample: pd.DataFrame, annotations: Sequence[Annotation]) -> pd.DataFrame:
    """How far annotators agree, for every two of them, for each kind and for ``all``.

    Columns are ``one, other, method, metric, value, n``. Metrics: ``kappa_covered``, Cohen's kappa of whether
    a token is in a concept, ``n`` tokens; ``kappa_concepts``, Cohen's kappa of the number of concepts of an
    item, with quadratic weights, and ``same_concepts``, the share of items that both give as many, ``n``
    items. A kappa is empty where both have given the same answer throughout.

    Parameters
    ----------
    sample
        The sample of `draw_concept_sample`.
    annotations
        What the annotators have filled in: an annotation each of `read_concept_sheets`.

    Raises
    ------
    InputError
        There are no annotations, or one of another sample.
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
