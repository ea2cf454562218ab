"""Attention sinks: tokens whose vectors in the residual stream are huge.

Many models let attention that has nowhere to go rest on one token, mostly the first, and mark it by
activations a hundred times larger than all others. Squares make such a token weigh as much as ten thousand
others in a fit, and a replacement at its place ends the sink and, with it, the attention of all tokens after
it. It is not always the first token, and there can be several in a sentence.

A sink is a token whose norm is 20 times the median at some layer. First tokens are sinks together, and known
by less: in some models they reach that at one layer alone, and stand out at all others by a factor of ten. At
a layer where the median first token is four times as long as the median row, and twice as long as all other
rows but one in a hundred, the first tokens are sinks that are longer than half of their median.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations
from matlens.activations.collecting import stream
from matlens.data.examples import Examples
from matlens.errors import InputError, InputWarning, PositiveInt, checked, short
from matlens.models.layout import ModelLayout
from matlens.models.sites import STREAM, Site

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_FACTOR = 20.0  # of the median row at some layer, above which a token is a sink
_FIRST_FACTOR = 4.0  # of the median first token, where nearly all other tokens stay below half of it
_MIN_TOKENS = 3  # first tokens, and others, to compare their norms


class SinkWarning(InputWarning):
    """Sinks could not be found, or not all of them."""


@checked
def sink_rows(samples: Activations) -> Bool[Tensor, " n"]:
    """Boolean mask of samples that are attention sinks, by norms of collected layers.

    Warns with `SinkWarning` where these cannot tell: where layers are missing, sinks that stand out only at
    these are not found; and where most samples are first tokens, there is nothing to compare them with.
    """
    layers = [site for site in samples if Site.parse(site).kind == STREAM]
    if not layers:
        raise InputError("samples must have layers of the residual stream, such as 'h.5', to find sinks.")
    norms = torch.stack([samples[site].norm(dim=1) for site in layers], 1)
    sinks, doubt = _sinks_and_doubt(norms, samples.places)
    model = samples.provenance.model
    if doubt:
        doubt += " Collect other positions too, or use find_sinks(model, examples)."
    elif model is not None and len(layers) <= model.n_layers:
        some = ", ".join(layers[:3]) + (", ..." if len(layers) > 3 else "")
        counts = sink_counts(sinks, samples.places)
        doubt = (
            f"{counts['n_sinks']} sinks are found at {some}, {counts['n_first_sinks']} of them first tokens, "
            "without those that stand out only at other layers: collect all layers, or use "
            "find_sinks(model, examples)."
        )
    if doubt:
        warnings.warn(doubt, SinkWarning, stacklevel=2)
    return sinks


@checked
def sink_counts(sinks: Bool[Tensor, " n"], places: Int[np.ndarray, " n"]) -> dict[str, int]:
    """How many samples are sinks, first tokens or later ones, and how many are first tokens.

    ``places`` are the positions of the samples in their sentences, from 0. `find_sinks` gives a mask by
    sentence and position; to count it, flatten it over all tokens:

    >>> tokens = examples.at_positions("all")
    >>> sink_counts(find_sinks(model, examples)[tokens.sentences, tokens.positions], examples.places)
    """
    if len(places) != len(sinks):
        raise InputError(f"places must be one for each of {len(sinks)} samples, got {len(places)}.")
    first = torch.from_numpy(places == 0)
    return {
        "n_sinks": int(sinks.sum()),
        "n_first_sinks": int((sinks & first).sum()),
        "n_later_sinks": int((sinks & ~first).sum()),
        "n_first_tokens": int(first.sum()),
    }


@checked
def find_sinks(
    model: TransformerBridge,
    examples: Examples,
    *,
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> Bool[Tensor, "n longest"]:
    """Boolean mask, by sentence and position, of tokens that are sinks by their norm at any layer.

    One pass over the sentences, which distributed processes divide. ``~find_sinks(...)`` says to
    `Replacement` and `Variant` where to replace. Warns with `SinkWarning` where fewer than three first tokens
    or three others are there to compare, and where most tokens are first tokens.
    """
    layers = [str(site) for site in ModelLayout.from_model(model).stream]
    index, found = [torch.empty(0, dtype=torch.long)], [torch.empty(0, len(layers), dtype=torch.float32)]
    for rows in stream(
        model, examples, layers, positions="all", batch_tokens=batch_tokens, progress=progress, divided=True
    ):
        index.append(torch.from_numpy(rows.index))
        found.append(torch.stack([rows.vectors[site].norm(dim=1) for site in layers], 1))
    of_all = parallel.concatenate({"index": torch.cat(index), "norms": torch.cat(found)}, "norms of tokens")
    norms = of_all["norms"][of_all["index"].argsort()]
    known, doubt = _sinks_and_doubt(norms, examples.places)
    if doubt:
        warnings.warn(f"{doubt} Use more sentences, or longer ones.", SinkWarning, stacklevel=2)
    sinks = torch.zeros(len(examples), int(examples.lengths.max()), dtype=torch.bool)
    tokens = examples.at_positions("all")
    sinks[torch.from_numpy(tokens.sentences), torch.from_numpy(tokens.positions)] = known
    return sinks


@checked
def outlying_rows(norms: Float[Tensor, "n layers"], places: Int[np.ndarray, " n"]) -> Bool[Tensor, " n"]:
    """Which rows are sinks, by their norms at some layers.

    ``places`` says which token of its sentence each row is, from 0.
    """
    return _sinks_and_doubt(norms, places)[0]


def _sinks_and_doubt(
    norms: Float[Tensor, "n layers"], places: Int[np.ndarray, " n"]
) -> tuple[Bool[Tensor, " n"], str | None]:
    """Which rows are sinks, and why some first tokens cannot be told from others."""
    if not norms.shape[1] or not bool((norms.isfinite() & (norms >= 0)).all()) or len(norms) != len(places):
        raise InputError(
            f"norms must be finite numbers of at least 0 at some layer, for {len(places)} places, got "
            f"{short(norms)}."
        )
    if not len(norms):
        return torch.zeros(0, dtype=torch.bool), None
    medians = norms.median(0).values
    sinks = (norms > _FACTOR * medians).any(1)
    first = torch.from_numpy(places == 0).to(norms.device)
    others = ~first & ~sinks
    n_first, n_others, standing = int(first.sum()), int(others.sum()), torch.zeros_like(sinks)
    if n_first and n_others:
        of_first = norms[first].median(0).values
        usual = norms[others].sort(0).values[int(0.99 * (n_others - 1))]
        stands_out = (of_first >= _FIRST_FACTOR * medians) & (of_first >= 2 * usual)
        standing = first & ((norms > of_first / 2) & stands_out).any(1)
    doubt = None
    if min(n_first, n_others) >= _MIN_TOKENS:
        sinks = sinks | standing
    elif bool((first & ~sinks).any()):
        n_doubted = int((standing & ~sinks).sum())
        doubt = (
            f"{n_doubted} first tokens stand out, by less than makes a token a sink alone, and there must be "
            f"{_MIN_TOKENS} first tokens and {_MIN_TOKENS} others to tell whether they are sinks, got "
            f"{n_first} and {n_others}. They count as none."
        )
    if 2 * n_first > len(norms):
        doubt = "Most of the tokens are first tokens, so sinks cannot be told by comparing them with others."
    return sinks, doubt
