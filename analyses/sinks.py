"""Attention sinks in the residual stream and their effect on r2 (paper A, Figure 2).

Norms of sinks and first tokens by layer, and the largest share of the residual stream's variance in one
dimension, with and without them; r2 of the maps of ``paper_a_fig2_r2.py`` without first tokens, and without
sinks; and training samples that are sinks without being first tokens. Expect, in a model with sinks, one
dimension to have nearly all variance where they exist, and r2 to fall on both sides of the layers that
create them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import torch
from jaxtyping import Bool, Float
from studies import LayerRow, Report, Study, layer_table, run_study
from torch import Tensor

from matlens import MapSet, Site, plots
from matlens.activations import Activations, sink_counts, sink_rows
from matlens.errors import Tokenizer
from matlens.lens import fit_quality
from matlens.metrics import Estimate
from matlens.models import token_texts
from matlens.numerics import in_float64

NAME, FIT, LATER = "sinks", "sinks_r2", "sinks_later"
_BEFORE = 4  # tokens shown before a sink


def main(study: Study, report: Report) -> None:
    """Measure sinks at all layers, exclude them from r2, and list sinks after first tokens."""
    train, validation = study.stream
    sinks = sink_rows(train)
    origin = study.origin | {"sinks": sink_counts(sinks, train.places)}
    report.write(NAME, sink_norms(train, sinks), origin)
    report.write(LATER, later_sinks(train, sinks, study.model.tokenizer), origin)
    sinks = sink_rows(validation)
    table = fit_quality_without_sinks(study.maps, validation, sinks)
    figure = plots.plot_r2(table[table["examples"] == "not sinks"])
    report.write(FIT, table, origin | {"sinks": sink_counts(sinks, validation.places)}, figure)


def sink_norms(samples: Activations, sinks: Bool[Tensor, " n"]) -> pd.DataFrame:
    """Norms of sinks by layer, and the share of variance in a single dimension.

    ``median_norm`` is that of ``first tokens``, of ``sinks``, and of ``others``, which are neither;
    ``largest_dimension`` is the largest share of the variance in one dimension, over ``all`` samples and over
    ``not sinks``. ``sinks`` is a mask of samples.
    """
    first = torch.from_numpy(samples.places == 0)
    groups = {"first tokens": first, "sinks": sinks, "others": ~first & ~sinks}
    rows = list[LayerRow]()
    for layer, h in _stream(samples):
        values = [
            (name, "median_norm", h[mask].norm(dim=1).median(), mask)
            for name, mask in groups.items()
            if mask.any()
        ]
        values += [
            (name, "largest_dimension", _largest_share(h[mask]), mask)
            for name, mask in (("all", torch.ones_like(sinks)), ("not sinks", ~sinks))
        ]
        rows += [
            (name, layer, metric, None, Estimate.without_interval(value, int(mask.sum())))
            for name, metric, value, mask in values
        ]
    return layer_table(NAME, samples.provenance.model_name, samples.provenance.corpus, rows)


def fit_quality_without_sinks(
    maps: MapSet, validation: Activations, sinks: Bool[Tensor, " n"]
) -> pd.DataFrame:
    """r2 of `fit_quality` without first tokens, or without sinks; the maps are the same.

    A table with one more column, ``examples``: ``not first tokens`` or ``not sinks``.
    """
    subsets = {"not first tokens": torch.from_numpy(validation.places > 0), "not sinks": ~sinks}
    tables = [
        fit_quality(maps, validation, rows=rows).assign(experiment=FIT, examples=name)
        for name, rows in subsets.items()
    ]
    return pd.concat(tables, ignore_index=True)


def later_sinks(samples: Activations, sinks: Bool[Tensor, " n"], tokenizer: Tokenizer) -> pd.DataFrame:
    """Sinks after the first token: the preceding text, and the layer of the largest norm.

    One row per sink: its ``position`` in the sentence, its ``token``, the ``text`` up to it, the
    ``layer`` where its norm is largest relative to the median, and both norms.
    """
    layers = [layer for layer, _ in _stream(samples)]
    norms = torch.stack([h.norm(dim=1) for _, h in _stream(samples)], 1)
    medians = norms.median(0).values
    examples, rows = samples.examples, []
    for row in (sinks & torch.from_numpy(samples.places > 0)).nonzero().flatten().tolist():
        place, start = int(samples.places[row]), int(examples.offsets[examples.sentences[row]])
        tokens = examples.tokens[start + max(0, place - _BEFORE) : start + place + 1]
        texts = token_texts(tokenizer, tokens.tolist())
        at = int((norms[row] / medians).argmax())
        rows.append(
            {
                "position": place, "token": texts[-1], "text": "".join(texts), "layer": layers[at],
                "norm": float(norms[row, at]), "median_norm": float(medians[at]),
            }
        )  # fmt: skip
    return pd.DataFrame(rows, columns=["position", "token", "text", "layer", "norm", "median_norm"])


def _stream(samples: Activations) -> Iterator[tuple[int, Float[Tensor, "n d_model"]]]:
    """Collected layers of the residual stream, with their vectors."""
    sites = [site for site in map(Site.parse, samples) if site.kind == "h"]
    return ((site.layer, in_float64(samples[site])) for site in sorted(sites, key=lambda site: site.layer))


def _largest_share(h: Float[Tensor, "n d_model"]) -> float:
    """The largest dimension's share of the variance."""
    variance = h.var(0, correction=0)
    return float(variance.max() / variance.sum())


if __name__ == "__main__":
    run_study(main)
