"""Attention sinks: the tokens whose vectors in the stream are huge, and which samples they are.

Many models let attention that has nowhere to go rest on one token, mostly the first, and mark it by
activations a hundred times larger than all others. Squares make such a token weigh as much as ten thousand
others in a fit, and a stand-in at its place ends the sink and, with it, the attention of all tokens after
it. It is not always the first token, and there can be several in a sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens.activations.activations import Activations
from matlens.activations.collecting import stream
from matlens.corpora.examples import Examples
from matlens.errors import InputError
from matlens.models.anatomy import Anatomy
from matlens.models.sites import STREAM, Site
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

FACTOR = 20.0


@checked
def sink_rows(samples: Activations, *, factor: float = FACTOR) -> Bool[Tensor, " n"]:
    """Which samples are sinks: at some layer their norm is ``factor`` times the median over the samples.

    Raises
    ------
    InputError
        The samples hold no layer of the stream.
    """
    layers = [site for site in samples if Site.parse(site).kind == STREAM]
    if not layers:
        raise InputError("The samples hold no layer of the stream, by which sinks are known.")
    return outlying_rows(torch.stack([samples[site].norm(dim=1) for site in layers], 1), factor=factor)


@checked
def find_sinks(
    model: TransformerBridge,
    examples: Examples,
    *,
    factor: float = FACTOR,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Bool[Tensor, "n longest"]:
    """Which token of each sentence is a sink, by the same rule over all tokens of the sentences.

    One pass over the sentences. ``~find_sinks(...)`` says to `Replacement` and `Variant` where to replace.
    """
    layers = [str(site) for site in Anatomy.from_model(model).stream]
    norms = torch.zeros(len(examples.tokens), len(layers))
    for rows in stream(
        model, examples, layers, positions="all", batch_tokens=batch_tokens, progress=progress
    ):
        norms[torch.from_numpy(rows.index)] = torch.stack(
            [rows.vectors[site].norm(dim=1) for site in layers], 1
        )
    sinks = torch.zeros(len(examples), int(examples.lengths.max()), dtype=torch.bool)
    places = torch.from_numpy(examples.places)
    sentence = torch.repeat_interleave(torch.arange(len(examples)), torch.from_numpy(examples.lengths))
    sinks[sentence, places] = outlying_rows(norms, factor=factor)
    return sinks


@checked
def outlying_rows(norms: Float[Tensor, "n layers"], *, factor: float = FACTOR) -> Bool[Tensor, " n"]:
    """Which rows are, at some layer, ``factor`` times as long as the median row there."""
    return (norms > factor * norms.median(0).values).any(1)
