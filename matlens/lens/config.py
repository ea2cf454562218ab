"""Which lens to fit: closed forms by their options, others by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Literal

from matlens.errors import InputError, NonNegative, PositiveInt, check_choice, checked


@checked
@dataclass(frozen=True)
class LensConfig:
    """A least-squares fit of every layer onto the last one.

    ``LensConfig(standardise=True, intercept=True, rank=64, sinks="exclude")``

    Attributes
    ----------
    standardise
        Map standardised vectors to standardised vectors, as the final norm standardises them.
    weighted
        Weight each sample by ``1 / ||h^L||^2``.
    intercept
        Whether the map has a bias.
    ridge
        Penalty in units of ``mean diag(X'X)``; ``"loo"`` chooses it by leave-one-out.
    toward
        The target of the penalty.
    rank
        Rank of the map; full by default, or if not below ``d_model``.
    shared_map
        Fit one map for all layers.
    sinks
        Whether attention sinks are part of the samples.
    """

    standardise: bool = False
    weighted: bool = False
    intercept: bool = False
    ridge: NonNegative | Literal["loo"] = 0.0
    toward: Literal["zero", "identity"] = "zero"
    rank: PositiveInt | None = None
    shared_map: bool = False
    sinks: Literal["include", "exclude"] = "include"

    def __post_init__(self) -> None:
        if self.weighted and self.standardise:
            raise InputError("weighted and standardise must not be combined: norms are equal then.")
        if self.toward == "identity" and (self.ridge == 0 or self.rank is not None):
            raise InputError("toward='identity' requires a ridge, and rank=None.")

    @property
    def name(self) -> str:
        """``"mat"``, ``"affine"``, or the options that differ, as ``"standardise+rank=64"``."""
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        changed = [
            option.name if options[option.name] is True else f"{option.name}={options[option.name]}"
            for option in fields(self)
            if options[option.name] != option.default
        ]
        name = "+".join(changed) or "mat"
        return "affine" if name == "intercept" else name


METHODS: dict[str, LensConfig | None] = {
    "id": None,
    "mat": LensConfig(),
    "affine": LensConfig(intercept=True),
    "scaled": None,
    "polished": None,
    "tuned": None,
    "jacobian": None,
}
"""Lenses by name; those without a `LensConfig` are not closed forms."""
ENTRY_POINTS = "matlens.lens_methods"
"""Group of entry points for lens methods of other packages, see docs/architecture.md."""
Method = str | LensConfig


@checked
def parse_methods(methods: Method | Sequence[Method]) -> dict[str, LensConfig | None]:
    """Lenses by name, with the `LensConfig` of closed forms."""
    known = [*METHODS, *entry_points(group=ENTRY_POINTS).names]
    parsed: dict[str, LensConfig | None] = {}
    for method in [methods] if isinstance(methods, Method) else methods:
        if isinstance(method, LensConfig):
            parsed[method.name] = method
        else:
            parsed[method] = METHODS.get(check_choice(method, known, "method"))
    if not parsed:
        raise InputError(f"methods must have at least one of {', '.join(known)}, got none.")
    return parsed
