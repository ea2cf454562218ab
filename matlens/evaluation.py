"""Tables, layer by layer: how well maps fit, and how well what they give predicts.

A table has one row a number: ``experiment, model, corpus, method, layer, target, metric, k, value, low,
high, n``. Methods are ``mat`` and ``id``; ``low`` and ``high`` bound the 95% interval where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from matlens import metrics
from matlens.activations import Activations
from matlens.errors import InputError
from matlens.maps import MapSet
from matlens.readout import Readout
from matlens.sites import STREAM, Site, require_finite

COLUMNS = (
    "experiment", "model", "corpus", "method", "layer", "target", "metric", "k", "value", "low", "high", "n",
)  # fmt: skip
FIT, PREDICTION = "fit_quality", "prediction_quality"
_KS = (1, 5, 10)
_ROWS = 256  # examples whose distributions are held at once


def fit_quality(maps: MapSet, validation: Activations, *, progress: bool = True) -> pd.DataFrame:
    """r2 of ``mat`` and ``id`` for every pair of stream layers that there is a map for (paper A, 3.3).

    Parameters
    ----------
    maps
        Fitted on the model that gave ``validation``.
    validation
        Vectors at layers that the maps come from and go to.
    """
    _require_same_model(maps, validation)
    rows = []
    pairs = [(source, target) for source, target in maps if _is_stream(source) and _is_stream(target)]
    for source, target in tqdm(pairs, desc="r2", unit="pair", disable=not progress, delay=1):
        h, truth = validation[source], validation[target]
        for method, prediction in (("mat", maps[source, target](h)), ("id", h)):
            score = metrics.Estimate(metrics.r2(prediction, truth), float("nan"), float("nan"), len(truth))
            rows.append(_row(FIT, validation, method, source, target, "r2", None, score))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def prediction_quality(
    readout: Readout, maps: MapSet, validation: Activations, *, progress: bool = True
) -> pd.DataFrame:
    """Precision@1, 5, 10 and surprisal of what every layer predicts by ``mat`` and ``id`` (paper A, 4.1).

    For each layer ``l``, the substitutes are ``mat_{l->L}(h^l)`` and ``h^l``; at ``L`` both are ``h^L``.
    Distributions are held for a few hundred examples at a time, and never for several layers.
    """
    _require_same_model(maps, validation)
    n_layers = validation.provenance["model"]["n_layers"]
    last = str(Site(STREAM, n_layers))
    layers = [layer for layer in range(n_layers) if (f"{STREAM}.{layer}", last) in maps]
    if not layers:
        raise InputError(f"There is no map to the last layer {last}, which predictions are read from.")
    methods = [(layer, method) for layer in [*layers, n_layers] for method in ("mat", "id")]
    n = validation.n_rows
    ranks = {key: torch.empty(n, dtype=torch.long) for key in methods}
    surprisals = {key: torch.empty(n) for key in methods}
    to_last = {layer: maps[layer, n_layers] for layer in layers}
    for rows in tqdm(list(_chunks(n)), desc="predictions", disable=not progress, delay=1):
        truth = readout.log_probs(validation[n_layers][rows])
        require_finite(truth, "the read-out")
        for layer, method in methods:
            h = validation[layer][rows].to(readout.device)
            substitute = to_last[layer](h) if method == "mat" and layer < n_layers else h
            token = readout.logits(substitute).argmax(-1)
            ranks[layer, method][rows] = metrics.rank(truth, token).cpu()
            surprisals[layer, method][rows] = metrics.surprisal(truth, token).cpu()

    table = []
    for layer, method in methods:
        for k in _KS:
            hits = metrics.proportion(ranks[layer, method] < k)
            table.append(
                _row(PREDICTION, validation, method, f"{STREAM}.{layer}", last, "precision", k, hits)
            )
        mean = metrics.mean(surprisals[layer, method])
        table.append(_row(PREDICTION, validation, method, f"{STREAM}.{layer}", last, "surprisal", None, mean))
    return pd.DataFrame(table, columns=list(COLUMNS))


def _row(
    experiment: str,
    data: Activations,
    method: str,
    source: str,
    target: str,
    metric: str,
    k: int | None,
    estimate: metrics.Estimate,
) -> dict[str, Any]:
    return {
        "experiment": experiment,
        "model": data.provenance["model"]["base_model_name_or_path"],
        "corpus": data.provenance["data"].get("corpus", "unnamed"),
        "method": method,
        "layer": Site.parse(source).layer,
        "target": Site.parse(target).layer,
        "metric": metric,
        "k": pd.NA if k is None else k,
        **estimate._asdict(),
    }


def _require_same_model(maps: MapSet, data: Activations) -> None:
    maps.require_model(data.provenance["model"]["fingerprint"])


def _is_stream(site: str) -> bool:
    return Site.parse(site).kind == STREAM


def _chunks(n: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS) for start in range(0, n, _ROWS))


def layer_table(results: pd.DataFrame) -> pd.DataFrame:
    """One row a layer, for people: r2 onto the last target, Precision@1 and surprisal of both methods."""
    last = results["target"].max()
    names: Mapping[tuple[str, str], str] = {
        ("r2", "mat"): "r2 mat", ("r2", "id"): "r2 id",
        ("precision", "mat"): "P@1 mat", ("precision", "id"): "P@1 id",
        ("surprisal", "mat"): "surprisal mat", ("surprisal", "id"): "surprisal id",
    }  # fmt: skip
    shown = results[(results["target"] == last) & (results["k"].isna() | (results["k"] == 1))]
    wide = shown.pivot(index="layer", columns=["metric", "method"], values="value")
    return pd.DataFrame({name: wide[key] for key, name in names.items() if key in wide})


def to_tensor(results: pd.DataFrame, method: str) -> Tensor:
    """r2 of a method as ``[layer, target]``, NaN where there is no map."""
    part = results[(results["metric"] == "r2") & (results["method"] == method)]
    size = int(results["target"].max()) + 1
    grid = torch.full((size, size), float("nan"))
    grid[torch.tensor(part["layer"].to_numpy()), torch.tensor(part["target"].to_numpy())] = torch.tensor(
        part["value"].to_numpy(), dtype=torch.float32
    )
    return grid
