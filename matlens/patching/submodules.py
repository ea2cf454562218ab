"""Linear maps of sub-modules, fitted on their own inputs and outputs (paper A, section 7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxtyping import Bool, Float
from torch import Tensor

from matlens.activations.activations import Activations
from matlens.errors import InputError, checked, short
from matlens.linear.fitting import fit_samples, fitting_bar
from matlens.linear.maps import LinearMap
from matlens.linear.pairs import resolve_pairs
from matlens.models.layout import ModelLayout

SUBMODULES = ("attn", "ffn", "ln1", "ln2")


@checked
def submodule_pairs(layout: ModelLayout, names: Sequence[str] = SUBMODULES) -> list[tuple[str, str]]:
    """Input and output sites of the sub-modules in every block that the architecture has.

    In blocks whose norms all follow attention and FFN (OLMo-2), ``ln1`` and ``ln2`` are these norms.
    """
    if not layout.kinds:
        raise InputError(
            f"The wiring of this model is unknown ({layout.wiring.name}), so "
            "its sub-modules cannot be fitted or replaced."
        )
    unknown = [name for name in names if name not in (*SUBMODULES, "ln1_post", "ln2_post")]
    if unknown or not names:
        raise InputError(f"names must be from {', '.join(SUBMODULES)}, got {short(unknown or names)}.")
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
    """Fit maps of sub-modules from collected samples.

    ``pairs`` are those of `submodule_pairs`; the options are those of `fit_samples`. Exclude attention sinks
    with ``rows=~sink_rows(samples)``: they dominate a fit.
    """
    pairs = resolve_pairs(pairs, samples.provenance)
    maps = fit_samples(samples, pairs, rows=rows, weights=weights, intercept=intercept, ridge=ridge)
    yield from fitting_bar(maps, len(pairs), progress=progress)
