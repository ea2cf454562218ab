"""The share of dominant sub-updates in what FFNs write (paper B, Figure 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import torch

from matlens import metrics
from matlens.activations.collecting import stream
from matlens.data.examples import Examples
from matlens.errors import Seed, checked
from matlens.ffn.updates import DOMINANT, random_sub_updates, relative
from matlens.ffn.values import ValueVectors
from matlens.io.tables import result_row, result_table
from matlens.models.sites import COEFFICIENTS, Site

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

DOMINANCE = "dominance"  # the experiment's name in tables


@checked
def dominance(
    model: TransformerBridge,
    examples: Examples,
    *,
    k: int = DOMINANT,
    seed: Seed = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Share of the ``k`` dominant sub-updates at each layer, and of ``k`` random ones (Figure 6).

    The columns are those of all tables; the methods are ``dominant`` and ``random``, ``target`` is the layer.
    The metrics are ``share`` and ``negative``, the part of the ``k`` whose coefficients are negative (A.3).
    The random sub-updates are drawn for each example and layer from the seed, whatever the batches are.

    Parameters
    ----------
    model, examples
        The model to run, and the examples that it is run on, one position each.
    k
        How many sub-updates of each layer.
    seed
        Seed of the random sub-updates.
    batch_tokens
        Most tokens in a batch, padding counted. It does not change the numbers.
    progress
        Whether to show a bar over the examples.
    """
    values = ValueVectors(model)
    sites = [str(Site(COEFFICIENTS, layer)) for layer in range(values.n_layers)]
    drawn = random_sub_updates(values, examples.n_positions, k, seed=seed)
    norms = [values.norms(layer).cpu() for layer in range(values.n_layers)]
    shape = values.n_layers, examples.n_positions
    shares = {
        (method, metric): torch.empty(shape)
        for method in ("dominant", "random")
        for metric in ("share", "negative")
    }
    for rows in stream(model, examples, sites, batch_tokens=batch_tokens, progress=progress):
        index = torch.from_numpy(rows.index)
        for layer, site in enumerate(sites):
            share = relative(rows.vectors[site].abs() * norms[layer])
            chosen = {"dominant": share.topk(k).indices, "random": drawn[layer][index].long()}
            for method, of_method in chosen.items():
                shares[method, "share"][layer, index] = share.gather(1, of_method).sum(1)
                negative = rows.vectors[site].gather(1, of_method) < 0
                shares[method, "negative"][layer, index] = negative.float().mean(1)
    corpus = examples.provenance.get("corpus", "unnamed")
    return result_table(
        result_row(
            DOMINANCE, model=values.identity.name, corpus=corpus, method=method, layer=layer, target=layer,
            metric=metric, k=k, estimate=metrics.mean(numbers[layer]),
        )
        for layer in range(values.n_layers)
        for (method, metric), numbers in shares.items()
    )  # fmt: skip
