"""Evaluate predictions against those of ``h^L``, token by token.

A table has one row per value: ``experiment, model, corpus, method, layer, target, metric, k, value, low,
high, n``; ``low`` and ``high`` bound the 95% interval where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens import metrics
from matlens.activations.activations import Activations
from matlens.data.overlap import warn_of_overlap
from matlens.errors import InputError, check_rows, checked, short
from matlens.io.tables import result_row, result_table
from matlens.lens.lens import Lens
from matlens.linear.maps import tensor_digest
from matlens.linear.mapsets import MapSet
from matlens.metrics import Estimate
from matlens.models.readout import Readout
from matlens.models.sites import STREAM, Site
from matlens.numerics import in_float64, kl_divergence, log_softmax
from matlens.parallel import Bar

FIT, PREDICTION, REPORT = "fit_quality", "prediction_quality", "lens_report"
MapMethod = Literal["mat", "id"]
METHODS: tuple[MapMethod, ...] = ("mat", "id")
AGAINST = "against"
"""Column with the reference lens of a difference; empty for other rows."""
KS = (1, 5, 10)
_ROWS = 256  # tokens whose distributions are in memory at once
Key = TypeVar("Key", bound=Hashable)
Metric = tuple[str, int | None]
Scores = Callable[[slice], Float[Tensor, "rows d_vocab"]]


class Evaluation(NamedTuple):
    """Predictions at each token, compared with the model's own.

    Attributes
    ----------
    rank
        The rank of the predicted token in the model's distribution, 1 for the same token.
    surprisal
        ``-ln p`` of the predicted token, by the model's distribution.
    kl
        ``KL(p || q)`` from the model's distribution to the predicted one, if requested.
    confidence
        ``q1 - q2``, the margin of the most probable token, if requested.
    truth
        A digest of some rows of ``h^L``, the vectors that predictions are compared with; None if unknown.
    """

    rank: Int[Tensor, " n"]
    surprisal: Float[Tensor, " n"]
    kl: Float[Tensor, " n"] | None = None
    confidence: Float[Tensor, " n"] | None = None
    truth: str | None = None

    def values(self) -> dict[Metric, Float[Tensor, " n"]]:
        """The metrics that are means over tokens: by name and, for Precision@k, k."""
        values: dict[Metric, Tensor] = {("precision", k): (self.rank <= k).double() for k in KS}
        values["surprisal", None] = self.surprisal.double()
        return values if self.kl is None else values | {("kl", None): self.kl.double()}

    def estimates(self) -> dict[Metric, Estimate]:
        """Each metric with its 95% interval: Wilson's for Precision@k, Student's for the others."""
        return {
            key: metrics.proportion(values > 0) if key[0] == "precision" else metrics.mean(values)
            for key, values in self.values().items()
        }

    def check_paired(self, other: Evaluation) -> None:
        """Raise InputError unless both compare with the same vectors, as far as these are known."""
        known = self.truth is not None and other.truth is not None
        if len(self.rank) != len(other.rank) or (known and self.truth != other.truth):
            raise InputError(
                f"Both evaluations must be at the same tokens of the same model, got {len(self.rank)} and "
                f"{len(other.rank)} tokens that differ. Evaluate both with one call of evaluate."
            )

    def differences(self, other: Evaluation) -> dict[Metric, Estimate]:
        """Paired differences to another evaluation at the same tokens, with 95% intervals.

        They are Agresti and Min's for Precision@k, Student's for the other metrics.
        """
        self.check_paired(other)
        theirs = other.values()
        return {
            key: metrics.difference(ours, theirs[key])
            if key[0] == "precision"
            else metrics.mean(ours - theirs[key])
            for key, ours in self.values().items()
            if key in theirs
        }


@checked
def evaluate(
    readout: Readout,
    truth: Float[Tensor, "n d_model"],
    predictions: Mapping[Key, Float[Tensor, "n d_model"] | Scores],
    *,
    kl: bool = False,
    confidence: bool = False,
    progress: bool = True,
) -> dict[Key, Evaluation]:
    """Compare predictions with those of ``h^L``, all on the same tokens.

    Vectors and scores that are not finite predict nothing: their rank is one more than there are tokens, and
    their surprisal and divergence are infinite.

    Parameters
    ----------
    truth
        ``h^L``.
    predictions
        By any name: vectors in place of ``h^L``, or a function from a slice of the tokens to scores.
    """
    n = len(truth)
    if not predictions or not n:
        raise InputError("predictions and truth must not be empty.")
    for key, given in predictions.items():
        if isinstance(given, Tensor) and len(given) != n:
            raise InputError(f"{short(key)} must have {n} vectors, one per token, got {len(given)}.")
    digest = tensor_digest(truth[:: -(-n // _ROWS)].float())
    evaluated = {
        key: Evaluation(
            torch.empty(n, dtype=torch.long), torch.empty(n, dtype=torch.float32),
            torch.empty(n, dtype=torch.float32) if kl else None,
            torch.empty(n, dtype=torch.float32) if confidence else None, digest,
        )
        for key in predictions
    }  # fmt: skip
    for start in Bar(range(0, n, _ROWS), desc="predictions", disable=not progress):
        part = slice(start, start + _ROWS)
        true = readout.log_probs(truth[part])
        for key, given in predictions.items():
            scores = _read_out(readout, given[part]) if isinstance(given, Tensor) else given(part)
            if scores.shape != true.shape:
                raise InputError(f"{short(key)} must have scores {tuple(true.shape)}, got {short(scores)}.")
            _fill(evaluated[key], part, true, scores)
    return evaluated


def _fill(evaluation: Evaluation, part: slice, true: Tensor, scores: Tensor) -> None:
    finite = scores.isfinite().all(-1)
    token = scores.argmax(-1)
    rank, surprisal = metrics.rank(true, token), metrics.surprisal(true, token)
    evaluation.rank[part] = rank.where(finite, true.shape[-1] + 1).cpu()
    evaluation.surprisal[part] = surprisal.where(finite, torch.inf).cpu()
    if evaluation.kl is not None:
        kl = kl_divergence(true, log_softmax(scores))
        evaluation.kl[part] = kl.where(finite, torch.inf).cpu()
    if evaluation.confidence is not None:
        evaluation.confidence[part] = confidence_in_top(scores).float().cpu()


def confidence_in_top(logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, " n"]:
    """``p1 - p2`` of each row's distribution, in float64."""
    p1, p2 = in_float64(log_softmax(logits).topk(2).values).exp().unbind(-1)
    return p1 - p2


def _read_out(readout: Readout, h: Tensor) -> Tensor:
    """Scores; NaN for vectors whose squares overflow, which a norm would hide."""
    h = h.float()
    readable = h.square().sum(-1).isfinite()
    logits = readout.logits(h.where(readable[:, None], torch.zeros_like(h)))
    return logits.where(readable.to(logits.device)[:, None], torch.nan)


def evaluate_layers(
    lenses: Mapping[str, Lens], data: Activations, layers: Sequence[int], **options: bool
) -> dict[tuple[int, str], Evaluation]:
    """Readouts of lenses by layer and name; options as in `evaluate`."""
    readout = next(iter(lenses.values())).on_readout

    def scores(layer: int, lens: Lens) -> Scores:
        scale = lens.scales.get(layer, 1.0)
        return lambda part: scale * _read_out(readout, lens(data[layer][part].to(readout.device), layer))

    predictions = {(layer, name): scores(layer, lens) for layer in layers for name, lens in lenses.items()}
    return evaluate(readout, data[data.provenance.identity.n_layers], predictions, **options)


@checked
def fit_quality(
    maps: MapSet,
    validation: Activations,
    *,
    rows: Bool[Tensor, " n"] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """r2 of ``mat`` and ``id`` for every pair of stream layers with a map (paper A, 3.3).

    Of maps between other sites, where both were collected, it has r2 of the map alone, under a name such as
    ``mat attn_in.3 -> attn_out.3``. ``rows`` is true for the samples to use.
    """
    maps.provenance.check_same(validation.provenance, ours="the maps", theirs="the activations")
    check_rows(rows, validation.n_rows, min=2)
    warn_of_overlap([maps.provenance], validation.at_rows, "The maps", rows)
    used = slice(None) if rows is None else rows
    table: list[dict[str, Any]] = []
    steady: dict[str, int] = {}
    pairs = [pair for pair in maps if all(_is_stream(site) or site in validation for site in pair)]
    for source, target in Bar(pairs, desc="r2", unit="pair", disable=not progress):
        h, truth = validation[source][used], validation[target][used]
        predictions = {"mat": maps[source, target](h), "id": h}
        if not (_is_stream(source) and _is_stream(target)):
            predictions = {f"mat {source} -> {target}": predictions["mat"]}
        for method, prediction in predictions.items():
            value, n_steady = metrics.r2_and_steady(prediction, truth)
            if n_steady:
                steady[target] = n_steady
            score = Estimate.without_interval(value, len(truth))
            layers = Site.parse(source).layer, Site.parse(target).layer
            table.append(validation_row(FIT, validation, method, *layers, "r2", None, score))
    if steady:
        metrics.warn_of_steady(*max(steady.items(), key=lambda item: item[1]))
    return result_table(table)


def _is_stream(site: str) -> bool:
    return Site.parse(site).kind == STREAM


@checked
def prediction_quality(
    readout: Readout,
    maps: MapSet,
    validation: Activations,
    *,
    methods: Sequence[MapMethod] = METHODS,
    progress: bool = True,
) -> pd.DataFrame:
    """Precision@1, 5, 10 and surprisal of ``mat`` and ``id`` at every layer (paper A, 4.1)."""
    warn_of_overlap([maps.provenance], validation.at_rows, "The maps")
    if not methods:
        raise InputError("methods must have mat, id, or both.")
    lenses = map_lenses(readout, maps, validation)
    last = validation.provenance.identity.n_layers
    layers = [*lenses["mat"].layers, last]
    lenses = {method: lenses[method] for method in methods}
    evaluated = evaluate_layers(lenses, validation, layers, progress=progress)
    return result_table(
        row
        for (layer, method), evaluation in evaluated.items()
        for row in prediction_rows(PREDICTION, validation, method, layer, evaluation)
    )


def map_lenses(readout: Readout, maps: MapSet, validation: Activations) -> dict[str, Lens]:
    """``mat`` and ``id`` as lenses, of the layers that have a map onto the last one."""
    maps.provenance.check_same(validation.provenance, ours="the maps", theirs="the activations")
    readout.check_same(validation.provenance)
    mat = replace(Lens.from_maps(maps), readout=readout)
    return {"mat": mat, "id": replace(mat, maps=dict.fromkeys(mat.layers), method="id")}


@checked
def prediction_rows(
    experiment: str, data: Activations, method: str, layer: float, evaluation: Evaluation
) -> list[dict[str, Any]]:
    """Table rows of one method and layer: Precision@1, 5, 10, surprisal, and KL if known."""
    last = data.provenance.identity.n_layers
    return [
        validation_row(experiment, data, method, layer, last, metric, k, estimate)
        for (metric, k), estimate in evaluation.estimates().items()
    ]


def validation_row(
    experiment: str,
    data: Activations,
    method: str,
    layer: float | None,
    target: int,
    metric: str,
    k: int | None,
    estimate: Estimate,
) -> dict[str, Any]:
    """One row of a table, about the examples and the model of ``data``."""
    return result_row(
        experiment, model=data.provenance.model_name, corpus=data.provenance.corpus, method=method,
        layer=layer, target=target, metric=metric, k=k, estimate=estimate,
    )  # fmt: skip


@checked
def evaluate_lenses(
    lenses: Mapping[str, Lens],
    validation: Activations,
    *,
    layers: Sequence[int] | None = None,
    against: str | None = None,
    sinks: Bool[Tensor, " n"] | None = None,
    seconds: Mapping[str, float] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Evaluate lenses on the same validation tokens.

    The metrics are Precision@1, 5, 10, surprisal, KL and, unless vectors are standardised, r2. Rows with
    ``against`` are paired differences. Costs are per layer: ``parameters`` and, if given, ``seconds``.

    Parameters
    ----------
    validation
        Vectors of the layers and of the last one, at tokens that no lens was fitted on.
    layers
        By default all that every lens has and that were collected.
    against
        The reference lens of paired differences, if any.
    sinks
        True for attention sinks: r2 is then given without them too.
    seconds
        CPU seconds of each fit, all layers together.
    """
    if against is not None and against not in lenses:
        raise InputError(f"against must be one of {short(list(lenses))}, got {short(against)}.")
    if seconds is not None and set(seconds) != set(lenses):
        raise InputError(f"seconds must be of {short(list(lenses))}, got those of {short(list(seconds))}.")
    wanted = shared_layers(lenses, validation, layers)
    warn_of_overlap([lens.provenance for lens in lenses.values()], validation.at_rows, "The lenses")
    samples: dict[str, Any] = {"r2": slice(None)}
    if sinks is not None:
        check_rows(~sinks, validation.n_rows, "~sinks", min=2)
        samples["r2 without sinks"] = ~sinks
    last = validation.provenance.identity.n_layers
    table: list[dict[str, Any]] = []

    def add(
        name: str, layer: int | None, metric: str, k: int | None, estimate: Estimate, other: str = ""
    ) -> None:
        row = validation_row(REPORT, validation, name, layer, last, metric, k, estimate)
        table.append(row | {AGAINST: other})

    evaluated = evaluate_layers(lenses, validation, wanted, kl=True, progress=progress)
    for (layer, name), evaluation in evaluated.items():
        for key, estimate in evaluation.estimates().items():
            add(name, layer, *key, estimate)
        if against is not None and name != against:
            for key, estimate in evaluation.differences(evaluated[layer, against]).items():
                add(name, layer, *key, estimate, against)
        if lenses[name].norm is not None:  # r2 of standardised vectors is of another variance
            continue
        for metric, rows in samples.items():
            truth = validation[last][rows]
            score = metrics.r2(lenses[name](validation[layer][rows], layer), truth)
            add(name, layer, metric, None, Estimate.without_interval(score, len(truth)))
    for name, lens in lenses.items():
        costs = {} if seconds is None else {"seconds": seconds[name]}
        for metric, value in (costs | {"parameters": lens.n_parameters}).items():
            n = len(lens.layers)
            add(name, None, metric, None, Estimate.without_interval(value / n, n))
    return result_table(table, AGAINST)


def shared_layers(
    lenses: Mapping[str, Lens], validation: Activations, layers: Sequence[int] | None
) -> list[int]:
    """The requested layers, or all that every lens has and that were collected."""
    if not lenses:
        raise InputError("lenses must have at least one lens, got none.")
    for lens in lenses.values():
        lens.provenance.check_same(validation.provenance, ours="the lens", theirs="the activations")
    last = validation.provenance.identity.n_layers
    shared = set.intersection(*(set(lens.layers) for lens in lenses.values()))
    if layers is None:
        wanted = {layer for layer in shared if f"h.{layer}" in validation}
    else:
        wanted = {validation.resolve(layer).layer for layer in layers}
    absent = [layer for layer in [*wanted, last] if f"h.{layer}" not in validation]
    if absent or not wanted or wanted - shared:
        raise InputError(
            f"layers must be of those that all lenses have, {short(sorted(shared))}, and were collected "
            f"with the last one, got {short(sorted(wanted))}."
        )
    return sorted(wanted)
