"""What attention sinks are in the stream, and what they do to r2.

Least squares, and r2 with it, count squares: a few tokens whose vectors are a hundred times as long as all
others decide over both. Tables next to those of `fit_quality`, for the tokens that are no sinks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens.activations.activations import Activations
from matlens.errors import Tokenizer
from matlens.io.tables import result_table
from matlens.lens.evaluation import fit_quality, validation_row
from matlens.linear.mapsets import MapSet
from matlens.metrics import Estimate
from matlens.models.sites import STREAM, Site
from matlens.models.tokens import token_texts
from matlens.numerics import in_float64

SINK_NORMS, SINK_FIT = "sinks", "sinks_r2"  # experiments
_BEFORE = 4  # tokens that are shown before a sink


def sink_norms(samples: Activations, sinks: Bool[Tensor, " n"]) -> pd.DataFrame:
    """How long sinks are at each layer, and how much of the variance lies in a single coordinate.

    The metric ``median_norm`` is that of ``first tokens``, of ``sinks`` and of all ``others``, which are
    neither; ``largest_coordinate`` is the share that one coordinate has of the variance of ``all`` samples
    and of those that are ``not sinks``.

    ``sinks`` is true for the samples that are sinks.
    """
    first = torch.from_numpy(samples.places == 0)
    groups = {"first tokens": first, "sinks": sinks, "others": ~first & ~sinks}
    rows = []
    for layer, h in _stream(samples):
        numbers = [
            (name, "median_norm", h[mask].norm(dim=1).median(), mask)
            for name, mask in groups.items()
            if mask.any()
        ]
        numbers += [
            (name, "largest_coordinate", _largest_share(h[mask]), mask)
            for name, mask in (("all", torch.ones_like(sinks)), ("not sinks", ~sinks))
        ]
        for name, metric, value, mask in numbers:
            estimate = Estimate.without_interval(value, int(mask.sum()))
            rows.append(validation_row(SINK_NORMS, samples, name, layer, layer, metric, None, estimate))
    return result_table(rows)


def fit_quality_without_sinks(
    maps: MapSet, validation: Activations, sinks: Bool[Tensor, " n"], *, progress: bool = True
) -> pd.DataFrame:
    """r2 of `fit_quality` where first tokens, or sinks, are not among the examples; the maps are the same.

    A table with one more column, ``examples``: ``not first tokens`` or ``not sinks``.
    """
    kept = {"not first tokens": torch.from_numpy(validation.places > 0), "not sinks": ~sinks}
    tables = [
        fit_quality(maps, validation, rows=rows, progress=progress).assign(experiment=SINK_FIT, examples=name)
        for name, rows in kept.items()
    ]
    return pd.concat(tables, ignore_index=True)


def later_sinks(samples: Activations, sinks: Bool[Tensor, " n"], tokenizer: Tokenizer) -> pd.DataFrame:
    """The sinks that are no first tokens: each with the text before it, and where it stands out most.

    A row a sink: its ``place`` in the sentence, its ``token``, the ``text`` that ends with it, the ``layer``
    at which its norm is the greatest multiple of the median one, and both, ``norm`` and ``median_norm``.
    """
    layers = [layer for layer, _ in _stream(samples)]
    norms = torch.stack([h.norm(dim=1) for _, h in _stream(samples)], 1)
    medians = norms.median(0).values
    examples, rows = samples.examples, []
    sentences = examples.sentences
    if samples.positions == "all":
        sentences = np.repeat(np.arange(len(examples)), examples.lengths)
    for row in (sinks & torch.from_numpy(samples.places > 0)).nonzero().flatten().tolist():
        place, start = int(samples.places[row]), int(examples.offsets[sentences[row]])
        tokens = examples.tokens[start + max(0, place - _BEFORE) : start + place + 1]
        texts = token_texts(tokenizer, tokens.tolist())
        at = int((norms[row] / medians).argmax())
        rows.append(
            {
                "place": place, "token": texts[-1], "text": "".join(texts), "layer": layers[at],
                "norm": float(norms[row, at]), "median_norm": float(medians[at]),
            }
        )  # fmt: skip
    return pd.DataFrame(rows, columns=["place", "token", "text", "layer", "norm", "median_norm"])


def _stream(samples: Activations) -> Iterator[tuple[int, Float[Tensor, "n d_model"]]]:
    """Layers of the stream that were collected, with their vectors."""
    sites = [site for site in map(Site.parse, samples) if site.kind == STREAM]
    return ((site.layer, in_float64(samples[site])) for site in sorted(sites, key=lambda site: site.layer))


def _largest_share(h: Float[Tensor, "n d_model"]) -> float:
    """The largest coordinate's share of the variance."""
    variance = h.var(0, correction=0)
    return float(variance.max() / variance.sum())
