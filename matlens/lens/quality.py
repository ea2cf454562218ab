"""Tables, layer by layer: how well maps fit, and how well what they give predicts.

A table has one row a number: ``experiment, model, corpus, method, layer, target, metric, k, value, low,
high, n``. Methods are ``mat`` and ``id``; ``low`` and ``high`` bound the 95% interval where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from matlens import metrics
from matlens.activations.activations import Activations
from matlens.errors import InputError, check_choice, check_rows, checked, short
from matlens.io.tables import COLUMNS, check_columns, result_row, result_table
from matlens.lens.judgement import Judgement, Substitute, judge_predictions
from matlens.linear.mapsets import MapSet
from matlens.linear.samples import warn_of_same_sentences
from matlens.models.readout import Readout
from matlens.models.sites import STREAM, Site
from matlens.parallel import Bar

FIT, PREDICTION = "fit_quality", "prediction_quality"
METHODS = ("mat", "id")


@checked
def fit_quality(
    maps: MapSet,
    validation: Activations,
    *,
    rows: Bool[Tensor, " n"] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """r2 of ``mat`` and ``id`` for every pair of stream layers that there is a map for (paper A, 3.3).

    Of maps between other sites, where both were collected, there is r2 of the map alone; the method's name
    then says which sites, such as ``mat attn_in.3 -> attn_out.3``.

    Parameters
    ----------
    maps
        Maps that were fitted on the model of ``validation``.
    validation
        Vectors at layers that the maps come from and go to.
    rows
        True for the examples that count, by default all.
    progress
        Whether to show a bar.

    Raises
    ------
    InputError
        The maps or the rows are not those of the examples, or fewer than two rows are left.
    """
    maps.provenance.check_same(validation.provenance, ours="the maps", theirs="the activations")
    check_rows(rows, validation.n_rows, min=2)
    warn_of_same_sentences(maps.provenance, validation.provenance, "The maps", parts=rows is not None)
    counted = slice(None) if rows is None else rows
    table: list[dict[str, Any]] = []
    steady: dict[str, int] = {}
    pairs = [pair for pair in maps if all(_is_stream(site) or site in validation for site in pair)]
    for source, target in Bar(pairs, desc="r2", unit="pair", disable=not progress):
        h, truth = validation[source][counted], validation[target][counted]
        substitutes = {"mat": maps[source, target](h), "id": h}
        if not (_is_stream(source) and _is_stream(target)):
            substitutes = {f"mat {source} -> {target}": substitutes["mat"]}
        for method, prediction in substitutes.items():
            value, n_steady = metrics.r2_and_steady(prediction, truth)
            if n_steady:
                steady[target] = n_steady
            score = metrics.Estimate.without_interval(value, len(truth))
            layers = Site.parse(source).layer, Site.parse(target).layer
            table.append(validation_row(FIT, validation, method, *layers, "r2", None, score))
    if steady:
        metrics.warn_of_steady(*max(steady.items(), key=lambda item: item[1]))
    return result_table(table)


@checked
def prediction_quality(
    readout: Readout,
    maps: MapSet,
    validation: Activations,
    *,
    methods: Sequence[str] = METHODS,
    progress: bool = True,
) -> pd.DataFrame:
    """Precision@1, 5, 10 and surprisal of what every layer predicts by ``mat`` and ``id`` (paper A, 4.1).

    For each layer ``l``, the substitutes are ``mat_{l->L}(h^l)`` and ``h^l``; at ``L`` both are ``h^L``.
    Distributions are held for a few hundred examples at a time, and never for several layers.
    """
    maps.provenance.check_same(validation.provenance, ours="the maps", theirs="the activations")
    readout.check_same(validation.provenance)
    warn_of_same_sentences(maps.provenance, validation.provenance, "The maps", parts=False)
    for method in methods:
        check_choice(method, METHODS, "A method")
    if not methods:
        raise InputError("No methods are chosen. Expected mat, id, or both.")
    last = validation.provenance.identity.n_layers
    layers = [layer for layer in range(last) if (layer, last) in maps]
    if not layers:
        raise InputError(
            f"There is no map to the last layer {Site(STREAM, last)}, which predictions are read from."
        )
    to_last = {layer: maps[layer, last] for layer in layers}

    def substitute(layer: int, method: str) -> Substitute:
        mapped = to_last.get(layer) if method == "mat" else None
        return lambda part: (mapped or _as_it_is)(validation[layer][part].to(readout.device))

    wanted = [(layer, method) for layer in [*layers, last] for method in methods]
    judged = judge_predictions(
        readout, validation[last], {key: substitute(*key) for key in wanted}, progress=progress
    )
    return result_table(
        row
        for layer, method in wanted
        for row in prediction_rows(PREDICTION, validation, method, layer, judged[layer, method])
    )


def _as_it_is(h: Tensor) -> Tensor:
    return h


@checked
def prediction_rows(
    experiment: str, data: Activations, method: str, layer: float, judged: Judgement
) -> list[dict[str, Any]]:
    """Rows of a table for one method at one layer: Precision@1, 5, 10, surprisal, and KL if it is known."""
    last = data.provenance.identity.n_layers
    return [
        validation_row(experiment, data, method, layer, last, metric, k, estimate)
        for (metric, k), estimate in judged.estimates().items()
    ]


def validation_row(
    experiment: str,
    data: Activations,
    method: str,
    layer: float,
    target: int,
    metric: str,
    k: int | None,
    estimate: metrics.Estimate,
) -> dict[str, Any]:
    """One row of a table, about the examples and the model of ``data``."""
    return result_row(
        experiment,
        model=data.provenance.identity.name,
        corpus=data.provenance.corpus,
        method=method,
        layer=layer,
        target=target,
        metric=metric,
        k=k,
        estimate=estimate,
    )


def _is_stream(site: str) -> bool:
    return Site.parse(site).kind == STREAM


@checked
def layer_table(results: pd.DataFrame) -> pd.DataFrame:
    """A table for people, a row for each layer: r2 onto the last layer, Precision@1 and surprisal.

    Raises
    ------
    InputError
        It is no table of results.
    """
    check_columns(results, COLUMNS, what="the tables of lens.fit_quality and lens.prediction_quality")
    last = results["target"].max()
    names: Mapping[tuple[str, str], str] = {
        ("r2", "mat"): "r2 mat", ("r2", "id"): "r2 id",
        ("precision", "mat"): "P@1 mat", ("precision", "id"): "P@1 id",
        ("surprisal", "mat"): "surprisal mat", ("surprisal", "id"): "surprisal id",
    }  # fmt: skip
    shown = results[(results["target"] == last) & (results["k"].isna() | (results["k"] == 1))]
    wide = shown.pivot(index="layer", columns=["metric", "method"], values="value")
    return pd.DataFrame({name: wide[key] for key, name in names.items() if key in wide})


@checked
def r2_matrix(results: pd.DataFrame, method: str) -> Tensor:
    """r2 of a method as ``[layer, target]``, NaN where there is no map.

    Raises
    ------
    InputError
        It is no table of results, or has no r2 by this method.
    """
    check_columns(results, COLUMNS, what="the table of lens.fit_quality")
    part = results[(results["metric"] == "r2") & (results["method"] == method)]
    if part.empty:
        raise InputError(f"The table has no r2 by {short(method)}. Expected a method that it has.")
    size = int(results["target"].max()) + 1
    grid = torch.full((size, size), float("nan"))
    grid[torch.tensor(part["layer"].to_numpy()), torch.tensor(part["target"].to_numpy())] = torch.tensor(
        part["value"].to_numpy(), dtype=torch.float32
    )
    return grid
