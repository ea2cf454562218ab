"""Which lens to fit: closed forms by their options, others by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from matlens.errors import InputError, NonNegative, PositiveInt, check_choice, checked, short
from matlens.models.sites import Site


@checked
@dataclass(frozen=True)
class LensConfig:
    """A least-squares fit of every layer onto the last one (definitions, section 9).

    ``LensConfig(standardise=True, intercept=True, rank=64, sinks="exclude")``

    Attributes
    ----------
    intercept
        Whether the map has a bias.
    ridge
        Penalty in units of ``mean diag(X'X)``; ``"loo"`` chooses it by leave-one-out.
    toward
        What the penalty pulls the map towards.
    standardise
        Map standardised vectors to standardised vectors, as the final norm standardises them.
    weighted
        Weigh each sample by ``1 / ||h^L||^2``.
    rank
        Rank of the map, full by default.
    shared_map
        Fit one map for all layers.
    sinks
        Whether attention sinks are among the samples.
    """

    intercept: bool = False
    ridge: NonNegative | Literal["loo"] = 0.0
    toward: Literal["zero", "identity"] = "zero"
    standardise: bool = False
    weighted: bool = False
    rank: PositiveInt | None = None
    shared_map: bool = False
    sinks: Literal["include", "exclude"] = "include"

    def __post_init__(self) -> None:
        if self.weighted and self.standardise:
            raise InputError("Standardised samples are equally long: give weighted or standardise, not both.")
        if self.toward == "identity" and (self.ridge == 0 or self.rank is not None):
            raise InputError("toward='identity' needs a ridge and full rank.")

    @property
    def name(self) -> str:
        """What tables and folders call it, such as ``"normed+affine without sinks"``."""
        ridge = "ridge" if self.toward == "zero" else "ridge-identity"
        words = {
            "one-jump": self.shared_map,
            "weighted": self.weighted,
            "normed": self.standardise,
            "affine": self.intercept,
            ridge if self.ridge == "loo" else f"{ridge}({self.ridge})": self.ridge != 0,
            f"narrow({self.rank})": self.rank is not None,
        }
        name = "+".join(word for word, is_given in words.items() if is_given) or "mat"
        return name if self.sinks == "include" else f"{name} without sinks"


PRESETS: Mapping[str, LensConfig | None] = {
    "id": None,
    "mat": LensConfig(),
    "affine": LensConfig(intercept=True),
    "ridge": LensConfig(ridge="loo"),
    "ridge-identity": LensConfig(ridge="loo", toward="identity"),
    "weighted": LensConfig(weighted=True),
    "normed": LensConfig(standardise=True),
    "normed+affine": LensConfig(standardise=True, intercept=True),
    "narrow(64)": LensConfig(rank=64),
    "one-jump": LensConfig(shared_map=True),
    "scaled": None,
    "polished": None,
    "tuned": None,
    "jacobian": None,
}
"""Lenses by name; those without a `LensConfig` are not closed forms."""
Method = str | LensConfig


@checked
def parse_methods(methods: Method | Sequence[Method]) -> dict[str, LensConfig | None]:
    """Lenses by name, with the `LensConfig` of closed forms.

    Raises
    ------
    InputError
        A name is none of `PRESETS`, or there is none.
    """
    parsed: dict[str, LensConfig | None] = {}
    for method in [methods] if isinstance(methods, Method) else methods:
        if isinstance(method, LensConfig):
            parsed[method.name] = method
        else:
            parsed[method] = PRESETS[check_choice(method, PRESETS, "method")]
    if not parsed:
        raise InputError(f"methods must name one lens or more of {', '.join(PRESETS)}, got none.")
    return parsed


def closed_forms(methods: Method | Sequence[Method]) -> dict[str, LensConfig]:
    """Closed forms by name.

    Raises
    ------
    InputError
        A method is none, or no closed form.
    """
    parsed = parse_methods(methods)
    if others := [name for name, config in parsed.items() if config is None]:
        raise InputError(f"{', '.join(others)} cannot be fitted in closed form. Use Lens.fit.")
    return {name: config for name, config in parsed.items() if config is not None}


def layers_read(methods: Mapping[str, LensConfig | None], layers: Sequence[int], n_layers: int) -> list[int]:
    """Layers of the stream that methods need vectors of: all where one excludes sinks."""
    if any(config is not None and config.sinks == "exclude" for config in methods.values()):
        return list(range(n_layers + 1))
    return [*layers, n_layers]


def resolve_layers(layers: Sequence[int] | None, n_layers: int) -> tuple[int, ...]:
    """Numbers of layers, ascending and without the last; by default all of these."""
    if layers is None:
        return tuple(range(n_layers))
    numbers = sorted({Site.parse(layer, n_layers).layer for layer in layers} - {n_layers})
    if not numbers:
        raise InputError(f"layers must have one or more of 0 to {n_layers - 1}, got {short(layers)}.")
    return tuple(numbers)
