"""Concepts among top tokens, as people find them (paper B, section 4): what is annotated, and what it gives.

A sample holds value vectors, random vectors and whole FFN updates of every layer as numbered items in random
order, each with its top tokens. It is the key to the sheets that annotators get (`sheets`), which show items
and tokens alone.
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

from matlens import metrics
from matlens.annotation.sheets import CLASSES, Annotation
from matlens.corpora.examples import Examples
from matlens.errors import InputError
from matlens.ffn.projection import TOP, Projection
from matlens.ffn.updates import Updates
from matlens.ffn.values import ValueVector
from matlens.models.vocabulary import token_texts, visible
from matlens.storage.tables import read_table, result_row, result_table

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

EXPERIMENT = "concepts"
KINDS = ("values", "random", "updates")
SMALLEST = 4  # tokens that make a pattern
SAMPLE_COLUMNS = {
    "item": "int64", "model": "str", "corpus": "str", "kind": "str", "layer": "int64", "vector": "str",
    "rank": "int64", "token_id": "int64", "token": "str",
}  # fmt: skip
MEASURES = ("covered", "without_stopwords", *CLASSES, "concepts", "small_patterns")
AGREEMENT_COLUMNS = ("one", "other", "method", "metric", "value", "n")


def draw_sample(
    model: TransformerBridge,
    examples: Examples,
    *,
    per_layer: int = 10,
    k: int = TOP,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Draw what is to be annotated, one row a token.

    Columns are ``item, model, corpus, kind, layer, vector, rank, token_id, token``. The kinds are ``values``,
    value vectors; ``random``, vectors with their mean and standard deviation; and ``updates``, what the FFN
    writes at an example's position. The vector is a value vector's name, a random vector's number, or the
    example and its position. Tokens are written as people see them.

    Parameters
    ----------
    model
        Whose FFNs are looked at.
    examples
        ``n_layers x per_layer`` of them at least: each update is of another one.
    per_layer
        Vectors of each kind at each layer.
    k
        Top tokens of each.
    seed
        Of the draw and of the order of the items.

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
    if per_layer > values.d_mlp:
        raise InputError(
            f"{per_layer} value vectors of each layer were asked for, and a layer has {values.d_mlp}."
        )
    corpus, rows = examples.provenance.get("corpus", "unnamed"), []
    for layer in range(n_layers):
        chosen = sorted(generator.choice(values.d_mlp, per_layer, replace=False).tolist())
        own = range(layer * per_layer, (layer + 1) * per_layer)
        vectors = {
            "values": (
                values.layer(layer)[chosen],
                [str(ValueVector(layer, index)) for index in chosen],
                "none",
            ),
            "random": (values.random(layer, per_layer, seed=seed), [f"random {i}" for i in own], "none"),
            "updates": (
                updates.outputs(layer)[own.start : own.stop],
                [f"example {i}, position {examples.positions[i]}" for i in own],
                corpus,
            ),
        }
        for kind, (of_kind, names, source) in vectors.items():
            for name, ids in zip(names, projection.top(of_kind, k).ids.tolist(), strict=True):
                texts = map(visible, token_texts(projection.tokenizer, ids))
                rows.append(
                    (values.identity.name, source, kind, layer, name, list(zip(ids, texts, strict=True)))
                )
    order = generator.permutation(len(rows))
    table = [
        (item, *rows[row][:-1], rank, *token)
        for item, row in enumerate(order, start=1)
        for rank, token in enumerate(rows[row][-1], start=1)
    ]
    return pd.DataFrame(table, columns=list(SAMPLE_COLUMNS))


def read_sample(path: str | Path) -> pd.DataFrame:
    """Read back what `draw` has found and was written as CSV.

    Raises
    ------
    InputError
        There is no such table.
    """
    return read_table(
        path, SAMPLE_COLUMNS, what="the key to the sheets",
        made_by="Expected the --out folder of the run that wrote them.", lineterminator="\n",
    )  # fmt: skip


def by_item(sample: pd.DataFrame, annotation: Annotation) -> pd.DataFrame:
    """What one annotator has found in each item, one row an item, with its ``kind`` and ``layer``.

    A pattern counts if at least four tokens belong to it. ``covered`` is the share of the item's tokens in
    such a pattern; ``without_stopwords`` the same, with patterns of stopwords left out; ``semantic``,
    ``syntactic``, ``names`` and ``stopwords`` are shares that add up to ``covered``: a token in patterns of
    two classes is half in each. ``concepts`` is the number of patterns, stopwords left out, and
    ``small_patterns`` that of those that do not count.
    """
    marks = annotation.marks.merge(annotation.patterns, on=["item", "pattern"], validate="many_to_one")
    sizes = marks.groupby(["item", "pattern"])["rank"].transform("size")
    counted = marks[sizes >= SMALLEST]
    whole = sample.groupby("item").agg(kind=("kind", "first"), layer=("layer", "first"), k=("rank", "size"))

    def share(of: pd.Series) -> pd.Series:
        return of.groupby("item").sum().reindex(whole.index, fill_value=0) / whole["k"]

    def patterns(of: pd.DataFrame) -> pd.Series:
        return (
            of.drop_duplicates(["item", "pattern"]).groupby("item").size().reindex(whole.index, fill_value=0)
        )

    classes = counted.groupby(["item", "rank", "class"]).size().unstack("class", fill_value=0)
    parts = (classes.reindex(columns=list(CLASSES), fill_value=0) > 0).astype(float)
    parts = parts.div(parts.sum(axis=1), axis=0)
    content = counted[counted["class"] != "stopwords"]
    return whole.drop(columns="k").assign(
        covered=share(parts.sum(axis=1)),
        without_stopwords=share(content.drop_duplicates(["item", "rank"]).set_index("item")["rank"] > 0),
        **{name: share(parts[name]) for name in CLASSES},
        concepts=patterns(content),
        small_patterns=patterns(marks[sizes < SMALLEST]),
    )


def tally_concepts(sample: pd.DataFrame, annotations: Sequence[Annotation]) -> pd.DataFrame:
    """Shares and counts of paper B's Table 2 and Figure 2, for each kind at each layer and at all of them.

    The columns are those of all tables; the metrics are those of `by_item`, averaged first over annotators
    and then over items. Intervals are over items, whose tokens are not independent of each other. ``layer``
    is empty for all layers together.
    """
    if not annotations:
        raise InputError("There are no filled sheets. Expected at least one.")
    found = [by_item(sample, annotation) for annotation in annotations]
    items = found[0].assign(**{name: sum(one[name] for one in found) / len(found) for name in MEASURES})
    first, k = sample.iloc[0], int(sample["rank"].max())
    corpora = sample.groupby("kind")["corpus"].first()
    rows = []
    for kind in KINDS:
        for layer in (None, *sorted(items["layer"].unique())):
            own = items[(items["kind"] == kind) & (True if layer is None else items["layer"] == layer)]
            for name in MEASURES:
                estimate = metrics.mean(torch.from_numpy(own[name].to_numpy(dtype=float, copy=True)))
                rows.append(
                    result_row(
                        EXPERIMENT, model=first["model"], corpus=corpora[kind], method=kind, layer=layer,
                        target=layer, metric=name, k=k, estimate=estimate,
                    )
                )  # fmt: skip
    return result_table(rows)


def annotator_agreement(sample: pd.DataFrame, annotations: Sequence[Annotation]) -> pd.DataFrame:
    """How far annotators agree, for every two of them, for each kind and for ``all``.

    Columns are ``one, other, method, metric, value, n``. Metrics: ``kappa_covered``, Cohen's kappa of whether
    a token is in a concept, ``n`` tokens; ``kappa_concepts``, Cohen's kappa of the number of concepts of an
    item, with quadratic weights, and ``same_concepts``, the share of items that both give as many, ``n``
    items.
    A kappa is empty where both have said one and the same throughout.
    """
    kinds = sample.groupby("item")["kind"].first()
    of_token = sample.set_index(["item", "rank"])["kind"]
    rows: list[tuple[Any, ...]] = []
    for one, other in itertools.combinations(annotations, 2):
        tokens = [_covered(sample, annotation) for annotation in (one, other)]
        concepts = [by_item(sample, annotation)["concepts"] for annotation in (one, other)]
        for kind in ("all", *KINDS):
            a, b = (flags if kind == "all" else flags[of_token == kind] for flags in tokens)
            c, d = (counts if kind == "all" else counts[kinds == kind] for counts in concepts)
            told = (one.name, other.name, kind)
            rows.append((*told, "kappa_covered", _kappa(a, b), len(a)))
            rows.append((*told, "kappa_concepts", _kappa(c, d, weights="quadratic"), len(c)))
            rows.append((*told, "same_concepts", float((c == d).mean()), len(c)))
    return pd.DataFrame(rows, columns=list(AGREEMENT_COLUMNS))


def _covered(sample: pd.DataFrame, annotation: Annotation) -> pd.Series:
    """Whether each token is in a pattern that counts, in the order of the sample."""
    sizes = annotation.marks.groupby(["item", "pattern"])["rank"].transform("size")
    inside = pd.MultiIndex.from_frame(annotation.marks[sizes >= SMALLEST][["item", "rank"]])
    index = pd.MultiIndex.from_frame(sample[["item", "rank"]])
    return pd.Series(index.isin(inside), index=index)


def _kappa(one: pd.Series, other: pd.Series, **options: str) -> float:
    if len({*one, *other}) < 2:
        return float("nan")
    return float(cohen_kappa_score(one, other, **options))
