"""Maps of several fits evaluated on the same examples: drawn and all positions, fewer and fewer sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd
import torch

from matlens.activations.activations import Activations
from matlens.activations.collecting import stream
from matlens.data.examples import Examples
from matlens.data.readers import is_masked
from matlens.errors import InputError
from matlens.lens.evaluation import fit_quality, prediction_quality
from matlens.linear.fitting import fit_samples, fit_stream
from matlens.linear.mapsets import MapSet
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.layout import ModelLayout
from matlens.models.readout import Readout

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


def fit_drawn_and_all(
    model: TransformerBridge, examples: Examples, *, progress: bool = True
) -> dict[str, MapSet]:
    """Maps onto the last layer from one pass, fitted on the ``drawn`` positions and on ``all`` positions.

    The drawn vectors are held, the others are streamed.
    """
    if is_masked(model):
        raise InputError(
            f"{model.cfg.model_name} is a masked-LM model: only the drawn token of each sentence is masked, "
            "and the others are no predictions. Expected a decoder."
        )
    sites = list(map(str, ModelLayout.from_model(model).stream))
    last = len(sites) - 1
    pairs = [(layer, last) for layer in range(last)]
    starts = examples.offsets[examples.sentences]
    number_of = {int(row): i for i, row in enumerate(starts + examples.positions)}
    drawn = {site: torch.empty(examples.n_positions, model.cfg.d_model) for site in sites}

    def all_vectors() -> Iterator[dict[str, torch.Tensor]]:
        for rows in stream(model, examples, sites, positions="all", progress=progress):
            kept = [(i, number_of[int(row)]) for i, row in enumerate(rows.index) if int(row) in number_of]
            here, there = map(list, zip(*kept, strict=True))
            for site, vectors in rows.vectors.items():
                drawn[site][there] = vectors[here]
            yield rows.vectors

    origin = Provenance(ModelIdentity.from_model(model), examples.provenance)
    of_all = MapSet(fit_stream(all_vectors(), pairs, provenance=replace(origin, positions="all")))
    of_drawn = MapSet(fit_samples(drawn, pairs, provenance=replace(origin, positions="drawn")))
    return {"drawn": of_drawn, "all": of_all}


def compare_fits(readout: Readout, maps: Mapping[str, MapSet], validation: Activations) -> pd.DataFrame:
    """r2 and prediction quality of ``mat`` of each fit; the methods are called ``mat, <fit>``."""
    tables = []
    for name, fits in maps.items():
        table = pd.concat([fit_quality(fits, validation), prediction_quality(readout, fits, validation)])
        tables.append(table[table["method"] == "mat"].assign(method=f"mat, {name}"))
    return pd.concat(tables, ignore_index=True)


def fit_quality_by_size(
    train: Activations, validation: Activations, *, halvings: int = 3, progress: bool = True
) -> pd.DataFrame:
    """r2 onto the last layer of maps fitted on all training sentences, on the first half of them, and so on.

    A table with one more column, ``n_fitted``.
    The number is halved ``halvings`` times.
    """
    sizes = [len(train.examples) >> i for i in range(halvings + 1)]
    if sizes[-1] < 1:
        raise InputError(f"{sizes[0]} sentences cannot be halved {halvings} times. Expected fewer halvings.")
    tables = []
    for size in sizes:
        maps = MapSet.fit(train.head(size), pairs="last", progress=progress)
        table = fit_quality(maps, validation, progress=progress)
        tables.append(table[table["method"] == "mat"].assign(n_fitted=size))
    return pd.concat(tables, ignore_index=True)


def fits_side_by_side(table: pd.DataFrame) -> pd.DataFrame:
    """A table of `compare_fits` for people, a row for each layer: ``r2 <method>`` and ``P@1 <method>``."""
    chosen = table[(table["metric"] == "r2") | ((table["metric"] == "precision") & (table["k"] == 1))]
    wide = chosen.pivot_table(index="layer", columns=["metric", "method"], values="value")
    wide.columns = [" ".join(column).replace("precision", "P@1") for column in wide.columns.to_list()]
    return wide
