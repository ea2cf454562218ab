"""How far the final norm changes what vectors promote: the overlap of their top tokens (appendix A.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from matlens import metrics
from matlens.errors import InputError
from matlens.ffn.projection import TOP, Projection
from matlens.ffn.values import ValueVectors
from matlens.storage.tables import result_row, result_table

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

EXPERIMENT = "overlap"
_ROWS = 1024  # lists that are compared at once


def iou(one: Int[Tensor, "n k"], other: Int[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """Intersection over union of two lists of different tokens, row by row.

    Raises
    ------
    InputError
        The lists are not of one shape.
    """
    if one.shape != other.shape or one.ndim != 2:
        raise InputError(
            f"Lists of the shapes {tuple(one.shape)} and {tuple(other.shape)} cannot be compared. Expected "
            "the same number of lists and of tokens in each."
        )
    pairs = zip(one.split(_ROWS), other.split(_ROWS), strict=True)
    both = torch.cat([(a[:, :, None] == b[:, None, :]).sum((1, 2)) for a, b in pairs])
    return both / (2 * one.shape[1] - both)


def norm_overlap(
    model: TransformerBridge, *, n_random: int = 1000, k: int = TOP, seed: int = 0, progress: bool = True
) -> pd.DataFrame:
    """Overlap of the top tokens by ``E v`` and by ``E ln_f(v)``, layer by layer (Figure 4).

    One row a layer and method: ``values`` are all value vectors of the layer, ``random`` are vectors drawn
    with their mean and standard deviation. The columns are those of all tables; ``k`` is the length of the
    lists, ``target`` the layer itself, and there is no corpus.

    Parameters
    ----------
    model
        Its weights are all that is read.
    n_random
        Random vectors for each layer.
    k
        Length of the lists.
    seed
        Of the random vectors.
    """
    values, plain, normed = ValueVectors(model), Projection.from_model(model), Projection.after_norm(model)
    rows = []
    layers = range(values.n_layers)
    for layer in tqdm(layers, desc="overlap", unit="layer", disable=not progress, delay=1):
        drawn = values.random(layer, n_random, seed=seed)
        for method, vectors in (("values", values.layer(layer)), ("random", drawn)):
            found = metrics.mean(iou(plain.top(vectors, k).ids, normed.top(vectors, k).ids))
            rows.append(
                result_row(
                    EXPERIMENT, model=values.model_name, corpus="none", method=method, layer=layer,
                    target=layer, metric="iou", k=k, estimate=found,
                )
            )  # fmt: skip
    return result_table(rows)
