"""Paper B, Figure 6: how much of an FFN's update comes from its ten dominant sub-updates.

The share of the ten sub-updates with the largest ``|m_i| ||v_i||`` at every layer, and of ten random
ones, at one sampled position of each sentence. Expect the dominant ones to hold 5% to 10% and more of the
whole, the random ones ``10 / d_mlp``. The table also has the share of negative coefficients, which flip
the sign of their vectors (A.3). The paper's figure is ``--model gpt2-medium``, 2,000 sentences.
"""

from __future__ import annotations

import pandas as pd
import torch
from figures.paper_b import shares_by_layer
from studies import Model, Report, Study, layer_table, run_study

from matlens import metrics
from matlens.activations import stream
from matlens.data import Examples
from matlens.errors import PositiveInt
from matlens.ffn import ValueVectors

NAME = "paper_b_fig6_dominance"


def main(study: Study, report: Report, dominant: PositiveInt = 10) -> None:
    """Measure the share of the dominant sub-updates over a corpus, and plot it by layer."""
    examples = study.validation_examples
    table = dominance(study.model, examples, k=dominant, seed=study.seed)
    origin = study.origin_of_weights | {"data": examples.provenance}
    shares = table[table["metric"] == "share"]
    report.write(NAME, table, origin, shares_by_layer(shares, f"share of {dominant} sub-updates"))


def dominance(
    model: Model, examples: Examples, *, k: int = 10, seed: int = 0, batch_tokens: int | None = None
) -> pd.DataFrame:
    """Share of the ``k`` dominant and of ``k`` random sub-updates by layer (Figure 6).

    The methods are ``dominant`` and ``random``, ``target`` is the layer. The metrics are ``share`` and
    ``negative``, the share of the ``k`` with negative coefficients (A.3).
    Random sub-updates are sampled per example and layer from the seed, independent of batches.
    """
    values = ValueVectors(model)
    sites = [f"ffn_post.{layer}" for layer in range(values.n_layers)]
    random = values.random_sub_updates(examples.n_positions, k, seed=seed)
    norms = [values.norms(layer).cpu() for layer in range(values.n_layers)]
    shape = values.n_layers, examples.n_positions
    shares = {
        (method, metric): torch.empty(shape)
        for method in ("dominant", "random")
        for metric in ("share", "negative")
    }
    for rows in stream(model, examples, sites, batch_tokens=batch_tokens):
        index = torch.from_numpy(rows.index)
        for layer, site in enumerate(sites):
            lengths = rows.vectors[site].abs() * norms[layer]
            share = lengths / lengths.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            chosen = {"dominant": share.topk(k).indices, "random": random[layer][index].long()}
            for method, of_method in chosen.items():
                shares[method, "share"][layer, index] = share.gather(1, of_method).sum(1)
                negative = rows.vectors[site].gather(1, of_method) < 0
                shares[method, "negative"][layer, index] = negative.float().mean(1)
    corpus = examples.provenance.get("corpus", "unnamed")
    measured = (
        (
            method,
            layer,
            metric,
            k,
            metrics.mean(per_token[layer])
            if metric == "share"
            else metrics.share(per_token[layer], n_entries=k * len(per_token[layer])),
        )
        for layer in range(values.n_layers)
        for (method, metric), per_token in shares.items()
    )
    return layer_table("dominance", values.identity.name, corpus, measured)


if __name__ == "__main__":
    run_study(main, sentences=2000)
