"""Extreme sub-updates, with the largest scores, and their clusters (section 5.2).

A few clusters of value vectors cause most of the extreme scores. The paper finds two kinds: vectors of the
upper layers that promote unlikely tokens, and vectors of all layers that promote common ones. So each cluster
is listed with the frequency of the tokens that it promotes. In gated FFNs coefficients have both signs, and a
cluster promotes different tokens with each, so the signs are separate rows.

According to the paper these groups are mostly active early in the text or where the prediction is easy, and
those that promote unlikely tokens do not change the top candidate. To test this, updates with an extreme
sub-update are compared with updates of the same layers without one. How far clusters depend on the method
is measured on a sample.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from sklearn.metrics import adjusted_rand_score
from studies import Model
from torch import Tensor

from matlens import InputError, metrics
from matlens.data import Corpus
from matlens.errors import Tokenizer
from matlens.ffn import Clusters, Projection, Trace, ValueVectors, agglomerate, relative_scores, trace_row
from matlens.io import result_table
from matlens.models import token_texts, visible
from sub_updates.events import TraceScores

# Frequency of tokens in a corpus

FREQUENCY_KINDS = ("unlikely", "common", "other")
_SHARE_OF_TEXT = 0.5  # share of the corpus that common tokens make up
_SHARE_COMMON, _SHARE_UNSEEN = 0.5, 0.9  # min share of a vector's top tokens for that kind


class TokenFrequency:
    """Token frequencies in a corpus.

    Attributes
    ----------
    counts
        ``[d_vocab]``, occurrences of each token.
    common
        ``[d_vocab]``, whether it is one of the most frequent tokens that make up half of the corpus; ties go
        to the smaller token id.
    """

    def __init__(self, tokens: Int[np.ndarray, " n"], d_vocab: int) -> None:
        self.counts = np.bincount(tokens, minlength=d_vocab)
        order = np.argsort(-self.counts, kind="stable")
        running = np.cumsum(self.counts[order])
        self.common = np.zeros(d_vocab, dtype=bool)
        self.common[order[: int(np.searchsorted(running, _SHARE_OF_TEXT * running[-1])) + 1]] = True

    @classmethod
    def from_corpus(cls, corpus: Corpus, tokenizer: Tokenizer, d_vocab: int) -> TokenFrequency:
        """Count the tokens of all sentences of a corpus."""
        sentences = tokenizer(list(corpus.sentences), add_special_tokens=False)["input_ids"]
        return cls(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sentences]), d_vocab)

    def shares(self, ids: Int[np.ndarray, "n k"]) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """Share of common tokens and of unseen tokens in each list."""
        return self.common[ids].mean(1), (self.counts[ids] == 0).mean(1)


def frequency_kinds(common: Float[np.ndarray, " n"], unseen: Float[np.ndarray, " n"]) -> list[str]:
    """Kind of each list of tokens, by the shares that `TokenFrequency.shares` gives.

    ``common`` if at least half of the tokens are, ``unlikely`` if nine in ten do not occur, else ``other``.
    """
    return np.select(
        [common >= _SHARE_COMMON, unseen >= _SHARE_UNSEEN], ["common", "unlikely"], "other"
    ).tolist()


# Extreme sub-updates

SHARE = 0.01  # of the dominant sub-updates are extreme by default
EXTREME_GROUPS = "extreme_groups"  # the experiment's name in tables
ACTIVITY_COLUMNS = (
    "cluster", "sign", "kind", "size", "cosine", "extremes", "share", "raised", "at_sinks", "examples",
    "layer", "first_layer", "last_layer", "common", "unseen", "members", "tokens",
)  # fmt: skip
_FIRST_POSITIONS = (1, 2, 3, 4, 6, 11, 21, 41)  # where a range of places in the sentence begins


def default_threshold(scores: TraceScores) -> float:
    """The threshold that one in a hundred dominant sub-updates exceeds in absolute score."""
    return float(np.quantile(scores["dominant", "before"].abs().numpy(), 1 - SHARE))


def extreme_sub_updates(
    trace: Trace, clusters: Clusters, threshold: float, scores: TraceScores | None = None
) -> pd.DataFrame:
    """Find dominant sub-updates with scores beyond a threshold in either direction, see `_table_of`."""
    scores = scores or trace.score
    sizes = scores["dominant", "before"].abs()
    if not bool((sizes > threshold).any()):
        raise InputError(
            f"threshold must be less than the largest score, {sizes.max():g}, got {threshold:g}."
        )
    return _table_of((sizes > threshold).nonzero(), trace, clusters, scores)


def sample_sub_updates(
    trace: Trace, clusters: Clusters, n: int, scores: TraceScores | None = None, *, seed: int = 0
) -> pd.DataFrame:
    """Sample ``n`` dominant sub-updates, or all if there are fewer, see `_table_of`."""
    scores = scores or trace.score
    shape = scores["dominant", "before"].shape
    sampled = np.random.default_rng(seed).permutation(int(np.prod(shape)))[:n]
    places = np.stack(np.unravel_index(np.sort(sampled), shape), axis=1)
    return _table_of(torch.from_numpy(places), trace, clusters, scores)


def _table_of(
    places: Int[Tensor, "m 3"], trace: Trace, clusters: Clusters, scores: TraceScores
) -> pd.DataFrame:
    """A row for each sub-update, in the order of examples and layers.

    Columns are ``example, layer``; ``row`` of the value vector, as in `ValueVectors.at`; ``coefficient``;
    ``score`` for the top candidate before the update; ``cluster``; ``sign`` of the coefficient; whether it
    has ``raised`` the candidate; and whether it is at a ``sink``.
    """
    at = example, layer, _ = places.unbind(1)
    d_mlp = len(clusters.labels) // trace.n_layers
    columns = {
        "example": example, "layer": layer, "row": layer * d_mlp + trace.index["dominant"][at],
        "coefficient": trace.coefficient["dominant"][at], "score": scores["dominant", "before"][at],
        "sink": trace.sinks[example],
    }  # fmt: skip
    table = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    return table.assign(
        cluster=clusters.labels[table["row"]], sign=np.where(table["coefficient"] < 0, -1, 1),
        raised=table["score"] > 0,
    )  # fmt: skip


def cluster_activity(
    sub_updates: pd.DataFrame,
    clusters: Clusters,
    trace: Trace,
    values: ValueVectors,
    projection: Projection,
    frequency: TokenFrequency,
) -> pd.DataFrame:
    """One row per cluster and sign of the coefficients (section 5.2).

    The clusters with most sub-updates come first.

    Columns are `ACTIVITY_COLUMNS`: the cluster and the sign; the kind, see `frequency_kinds`; the number of
    value vectors in the cluster, and the mean cosine between two of them; the number of its sub-updates and
    their share of all; the share of these that raise the candidate, and that are at attention sinks; the
    share of the trace's examples with one; their mean, first and last layer; the shares of the 30 promoted
    tokens that are common and that do not occur; the names of the value vectors; and the first ten tokens.
    """
    table = sub_updates.groupby(["cluster", "sign"]).agg(
        extremes=("layer", "size"), raised=("raised", "mean"), at_sinks=("sink", "mean"),
        examples=("example", "nunique"), layer=("layer", "mean"), first_layer=("layer", "min"),
        last_layer=("layer", "max"),
    ).reset_index()  # fmt: skip
    cluster_ids = table["cluster"].tolist()
    directions = clusters.directions(values, cluster_ids)
    signs = directions.new_tensor(table["sign"].tolist())
    ids = projection.top(signs[:, None] * directions, 30).ids.numpy()
    common, unseen = frequency.shares(ids)
    texts = [", ".join(map(visible, token_texts(projection.tokenizer, row[:10]))) for row in ids.tolist()]
    table = table.assign(
        kind=frequency_kinds(common, unseen), size=clusters.sizes[cluster_ids],
        cosine=clusters.cosines(directions, cluster_ids), share=table["extremes"] / len(sub_updates),
        examples=table["examples"] / len(trace), common=common, unseen=unseen,
        members=[" ".join(str(values.at(row)) for row in clusters.members(i).tolist()) for i in cluster_ids],
        tokens=texts,
    )  # fmt: skip
    order = ["extremes", "cluster", "sign"]
    return table[list(ACTIVITY_COLUMNS)].sort_values(order, ascending=[False, True, True], ignore_index=True)


def concentration(activity: pd.DataFrame, clusters: Clusters) -> pd.DataFrame:
    """How few clusters account for the extreme sub-updates (section 5.2).

    One row for each reading and each ``of`` (0.5, 0.8 and 1 of the extreme sub-updates): the number of
    ``clusters``, largest first, that have this share, and their share of the value ``vectors``. ``activity``
    is that table of `extreme_tables`, and ``clusters`` those it was made with.
    """
    rows = []
    for read, table in activity[activity["sub_updates"] == "extreme"].groupby("read", sort=False):
        by_cluster = table.groupby("cluster")["extremes"].sum().sort_values(ascending=False, kind="stable")
        reached = by_cluster.cumsum().to_numpy()
        for part in (0.5, 0.8, 1.0):
            n = int((reached < part * reached[-1]).sum()) + 1
            vectors = clusters.sizes[by_cluster.index[:n]].sum() / len(clusters.labels)
            rows.append((read, part, n, vectors))
    return pd.DataFrame(rows, columns=["read", "of", "clusters", "vectors"])


class ExtremeTables(NamedTuple):
    """Tables of `extreme_tables`, and the ``thresholds`` that they were made with, by reading."""

    activity: pd.DataFrame
    groups: pd.DataFrame
    places: pd.DataFrame
    thresholds: dict[str, float]


def extreme_tables(
    trace: Trace,
    model: Model,
    clusters: Clusters,
    frequency: TokenFrequency,
    confidence: Float[Tensor, " n"],
    *,
    n_sampled: int = 2000,
    seed: int = 0,
) -> ExtremeTables:
    """`cluster_activity`, `group_table` and `position_table` by both readings of the scores.

    All have one more column, ``read``, which is ``score``, the trace's own, or ``lift``, relative to the mean
    over the vocabulary; that of the clusters has another, ``sub_updates``: ``extreme`` or ``sampled``.
    """
    values, projection = ValueVectors(model), Projection.from_model(model)
    tables: dict[str, list[pd.DataFrame]] = {"activity": [], "groups": [], "places": []}
    thresholds = {}
    for read, scores in (("score", trace.score), ("lift", relative_scores(trace, model, "mean"))):
        thresholds[read] = default_threshold(scores)
        extreme = extreme_sub_updates(trace, clusters, thresholds[read], scores)
        sampled = sample_sub_updates(trace, clusters, n_sampled, scores, seed=seed)
        activity = pd.concat(
            cluster_activity(chosen, clusters, trace, values, projection, frequency).assign(sub_updates=name)
            for name, chosen in (("extreme", extreme), ("sampled", sampled))
        )
        groups = group_table(extreme, sampled, activity, clusters, values, trace, confidence)
        places = position_table(extreme, activity, trace)
        for name, table in (("activity", activity), ("groups", groups), ("places", places)):
            tables[name].append(table.assign(read=read))
    together = {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}
    return ExtremeTables(**together, thresholds=thresholds)


def group_table(
    extreme: pd.DataFrame,
    sampled: pd.DataFrame,
    kind_of: pd.DataFrame,
    clusters: Clusters,
    values: ValueVectors,
    trace: Trace,
    confidence: Float[Tensor, " n"],
) -> pd.DataFrame:
    """Statistics of extreme sub-updates by kind, as a tidy table (section 5.2).

    The methods are the kinds, and ``all``; ``layer`` is the mean layer of the extreme sub-updates. Metrics:

    - ``share`` of the extreme sub-updates that are of the kind; ``share_sampled``, of the sampled ones;
    - ``clusters``, their number; ``vectors``, their share of the model's value vectors; ``active``, the share
      of value vectors with an extreme sub-update; ``cosine``, the median over the clusters of the mean cosine
      between two of their vectors;
    - ``raised`` and ``at_sinks``, shares of the extreme sub-updates that raise the candidate and that are at
      attention sinks;
    - ``position`` of the token in its sentence, from 1, ``confidence``, the probability of the
      prediction, and ``stays``, whether the top candidate stays on top: means over updates with such a
      sub-update, sinks excluded; ``position_else`` etc.: over the other updates, with the same weight for
      each layer.

    Sub-updates of one example are not independent of each other, so there are no intervals.
    """
    of_extreme, of_sampled = (_with_kinds(chosen, kind_of) for chosen in (extreme, sampled))
    shape = trace.rank.shape
    quantities = {
        "position": np.broadcast_to(trace.examples.positions[:, None] + 1.0, shape),
        "confidence": np.broadcast_to(confidence.double().numpy()[:, None], shape),
        "stays": (trace.rank == 1).double().numpy(),
    }
    counted = np.broadcast_to(~trace.sinks.numpy()[:, None], shape)
    rows = []
    for kind in ("all", *FREQUENCY_KINDS):
        of_kind = of_extreme if kind == "all" else of_extreme[of_extreme["kind"] == kind]
        if of_kind.empty:
            continue
        cluster_ids = of_kind["cluster"].unique()
        cosines = clusters.cosines(clusters.directions(values, cluster_ids.tolist()), cluster_ids.tolist())
        cosines = cosines[np.isfinite(cosines)]
        share_sampled = 1.0 if kind == "all" else float((of_sampled["kind"] == kind).mean())
        metric_values: dict[str, tuple[float, int]] = {
            "share": (len(of_kind) / len(of_extreme), len(of_extreme)),
            "share_sampled": (share_sampled, len(of_sampled)),
            "clusters": (len(cluster_ids), len(cluster_ids)),
            "vectors": (clusters.sizes[cluster_ids].sum() / len(values), len(cluster_ids)),
            "active": (of_kind["row"].nunique() / len(values), len(of_kind)),
            "cosine": (float(np.median(cosines)) if len(cosines) else math.nan, len(cosines)),
            "raised": (of_kind["raised"].mean(), len(of_kind)),
            "at_sinks": (of_kind["sink"].mean(), len(of_kind)),
        }
        active = np.zeros(shape, dtype=bool)
        active[of_kind["example"], of_kind["layer"]] = True
        for name, quantity in quantities.items():
            metric_values |= _active_and_idle(name, quantity, active & counted, ~active & counted)
        layer = float(of_kind["layer"].mean())
        for metric, (value, n) in metric_values.items():
            estimate = metrics.Estimate.without_interval(value, n)
            rows.append(trace_row(trace, EXTREME_GROUPS, kind, layer, metric, estimate))
    return result_table(rows)


def position_table(extreme: pd.DataFrame, kind_of: pd.DataFrame, trace: Trace) -> pd.DataFrame:
    """Number of extreme sub-updates per example by token position (section 5.2).

    The columns are ``kind, first_position, last_position, per_example, examples``, from 1, which is
    how many tokens a decoder has read. Sinks are included; most are first tokens.
    """
    labeled, position = _with_kinds(extreme, kind_of), trace.examples.positions + 1
    last_positions = (*(start - 1 for start in _FIRST_POSITIONS[1:]), int(position.max()))
    rows = []
    for first, last in zip(_FIRST_POSITIONS, last_positions, strict=True):
        in_range = (position >= first) & (position <= last)
        n_examples = int(in_range.sum())
        for kind in FREQUENCY_KINDS if n_examples else ():
            n = int(in_range[labeled.loc[labeled["kind"] == kind, "example"]].sum())
            rows.append((kind, first, last, n / n_examples, n_examples))
    return pd.DataFrame(rows, columns=["kind", "first_position", "last_position", "per_example", "examples"])


def _with_kinds(sub_updates: pd.DataFrame, kind_of: pd.DataFrame) -> pd.DataFrame:
    """Sub-updates with the ``kind`` of their cluster and sign."""
    return sub_updates.merge(kind_of[["cluster", "sign", "kind"]].drop_duplicates(), "left")


def _active_and_idle(
    name: str,
    quantity: Float[np.ndarray, "n l"],
    active: Bool[np.ndarray, "n l"],
    idle: Bool[np.ndarray, "n l"],
) -> dict[str, tuple[float, int]]:
    """Means over active updates, and over idle ones with the layer weights of the active ones."""
    layers = active.any(0) & idle.any(0)
    weights, n_idle = active.sum(0)[layers], int(idle[:, layers].sum())
    if not weights.sum():
        return {}
    means = [
        (np.where(updates, quantity, 0).sum(0)[layers] / updates.sum(0)[layers]) @ weights / weights.sum()
        for updates in (active, idle)
    ]
    return {name: (means[0], int(weights.sum())), f"{name}_else": (means[1], n_idle)}


# Methods of clustering


def compare_linkages(
    values: ValueVectors, n_clusters: int = 10_000, *, n_vectors: int = 12_000, seed: int = 0
) -> pd.DataFrame:
    """Compare ``average``, ``complete`` and ``neighbors`` clusters pairwise on a sample.

    The ``n_vectors`` are sampled at random and grouped into proportionally many clusters; their distances
    take ``8 n (n - 1)`` bytes. Columns are ``method, other, rand``, the adjusted Rand index of their
    clusters; ``cosine`` and ``other_cosine``, the mean cosine of a vector with the mean of its cluster;
    ``vectors`` and ``clusters``, their numbers.
    """
    vectors = torch.cat([values.layer(layer).cpu() for layer in range(values.n_layers)]).double()
    unit = (vectors / vectors.norm(dim=1, keepdim=True)).numpy()
    sampled = np.random.default_rng(seed).permutation(len(unit))[:n_vectors]
    unit = unit[np.sort(sampled)]
    n = min(len(unit), max(1, round(n_clusters * len(unit) / len(values))))
    labels = {
        "average": agglomerate(unit, n, "exact", "average"),
        "complete": agglomerate(unit, n, "exact", "complete"),
        "neighbors": agglomerate(unit, n, "neighbors"),
    }
    tight = {name: _tightness(unit, each) for name, each in labels.items()}
    rows = [
        (name, other, adjusted_rand_score(labels[name], labels[other]), tight[name], tight[other])
        for name, other in itertools.combinations(labels, 2)
    ]
    table = pd.DataFrame(rows, columns=["method", "other", "rand", "cosine", "other_cosine"])
    return table.assign(vectors=len(unit), clusters=n)


def _tightness(unit: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]) -> float:
    """The mean cosine of a vector with the mean of its cluster."""
    sums = np.zeros((labels.max() + 1, unit.shape[1]))
    np.add.at(sums, labels, unit)
    return float(np.linalg.norm(sums, axis=1).sum() / len(unit))
