"""Sub-modules of blocks: fitting linear maps of them, and attention replaced without any context.

A sub-module is named by its sites: ``ffn`` is what lies between ``ffn_in`` and ``ffn_out``. In every family
of blocks a map is fitted on the sub-module's own input and output (paper A, section 7), so what it
reads and where its output goes follows from how the block is wired.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens.activations.activations import Activations
from matlens.errors import InputError, checked, short
from matlens.linear.fitting import fit_samples, fitting_bar
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
from matlens.linear.pairs import check_collected, resolve_pairs
from matlens.linear.samples import NoisyFit, warn_of_noise
from matlens.models.families.vision import is_visual
from matlens.models.layout import ModelLayout, probe_inputs
from matlens.models.sites import CROSS, STREAM, Site, check_finite
from matlens.patching.replacements import Replacement, mat_attn, resolve_replacements
from matlens.patching.variants import run_to_layers

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

SUBMODULES = ("attn", "ffn", "ln1", "ln2")


@checked
def submodule_pairs(layout: ModelLayout, names: Sequence[str] = SUBMODULES) -> list[tuple[str, str]]:
    """Input and output sites of the sub-modules in every block; those that a family lacks are left out.

    In blocks whose norms all stand behind attention and FFN (OLMo-2), ``ln1`` and ``ln2`` are these norms.

    Raises
    ------
    InputError
        The wiring of the blocks is not known, so that they have no known sub-modules; or no family has a
        sub-module of that name.
    """
    if not layout.kinds:
        raise InputError(
            f"The blocks of this model are {layout.wiring.name}: none of the known sums holds in them, so "
            "their sub-modules cannot be fitted or replaced."
        )
    unknown = [name for name in names if name not in (*SUBMODULES, "ln1_post", "ln2_post")]
    if unknown or not names:
        raise InputError(f"names must be some of {', '.join(SUBMODULES)}, got {short(unknown or names)}.")
    if "ln1_in" not in layout.kinds:
        names = [f"{name}_post" if name in ("ln1", "ln2") else name for name in names]
    return [
        (f"{name}_in.{layer}", f"{name}_out.{layer}")
        for layer in range(layout.n_layers)
        for name in dict.fromkeys(names)
        if f"{name}_in" in layout.kinds
    ]


@checked
def fit_submodules(
    samples: Activations,
    pairs: Sequence[tuple[str, str]],
    *,
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    intercept: bool = False,
    ridge: float = 0.0,
    progress: bool = True,
) -> Iterator[LinearMap]:
    """Fit maps of sub-modules from collected samples, one after the other, which bounds memory.

    ``rows``, ``weights``, ``intercept`` and ``ridge`` are those of `fit_samples`; ``~sink_rows(...)`` leaves
    attention sinks out, whose activations are so large that a fit follows little else.

    Parameters
    ----------
    samples
        Vectors at the inputs and outputs, such as `matlens.collect` gives for `submodule_pairs`.
    pairs
        Sites before and after each sub-module.
    """
    pairs = resolve_pairs(pairs, samples.provenance)
    check_collected(pairs, samples)
    noisy: list[NoisyFit] = []
    one_by_one = (
        fit_samples(
            samples, [pair], rows=rows, weights=weights, intercept=intercept, ridge=ridge, noisy=noisy
        )
        for pair in pairs
    )
    yield from fitting_bar(itertools.chain.from_iterable(one_by_one), len(pairs), progress=progress)
    warn_of_noise(noisy, len(pairs))


@checked
@torch.inference_mode()
def attend_nowhere(
    model: TransformerBridge, maps: MapSet, h: Float[Tensor, "n d_model"], first: int, last: int
) -> Float[Tensor, "n d_model"]:
    """``mat_attn`` from layer ``first`` to ``last`` for single vectors, without their sentences.

    The map of attention reads no other token, so a vector of layer ``first`` alone determines what
    ``mat_attn`` makes of it (appendix A): each vector is run as a sentence of one token. Negative layers
    count from the end.

    Raises
    ------
    InputError
        The range runs backwards or leaves the model, or the blocks read other tokens without that attention
        too, as the decoder of an encoder-decoder does.
    """
    layout = ModelLayout.from_model(model)
    first, last = (layout.resolve(Site(STREAM, layer)).layer for layer in (first, last))
    if layout.wiring is CROSS:
        raise InputError(
            f"The blocks of {model.cfg.architecture} cannot be run on single vectors: they read the "
            "encoder's last layer as well. Use matlens.patched(model, matlens.mat_attn(maps, first, last))."
        )
    check_finite(h, str(Site(STREAM, first)))
    if not len(h):
        return h.float()
    start = Site(STREAM, first)
    vectors = Replacement(lambda value: h[:, None].to(value).expand_as(value), start, start)
    replacements = resolve_replacements(model, [vectors, *mat_attn(maps, first, last)])
    one, options = probe_inputs(model)[0][:1], dict[str, Any]()
    if not is_visual(model):
        one, options = one[:, :1], {"use_cache": False}
    inputs = one.repeat(len(h), *[1] * (one.ndim - 1)), options
    return run_to_layers(model, inputs, replacements, [last])[last][:, 0].float()
