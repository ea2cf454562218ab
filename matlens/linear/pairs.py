"""Pairs of sites that maps lie between, resolved in a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from matlens.errors import InputError, checked, short
from matlens.models.identity import Provenance
from matlens.models.sites import STREAM, Site

Pair = tuple[str | int | Site, str | int | Site]
Pairs = Literal["all", "last"] | Iterable[Pair]


@checked
def resolve_pairs(pairs: Pairs, model: int | Provenance) -> list[tuple[str, str]]:
    """Names of the sites of each pair in a model; raises InputError if a pair runs backward.

    ``"all"`` is every ``0 <= l < l' <= L`` of the residual stream, ``"last"`` those onto ``L``. ``model`` is
    ``L``, the number of its blocks, or the provenance of its vectors, which knows all names of hooks.
    """
    if isinstance(pairs, str):
        last = model if isinstance(model, int) else model.identity.n_layers
        layers = itertools.combinations(range(last + 1), 2)
        named: list[Pair] = [(a, b) for a, b in layers if pairs == "all" or b == last]
    else:
        named = [both_ends(pair) for pair in pairs]
        if not named:
            raise InputError("pairs must have at least one pair of sites, such as (0, 3).")
    resolved = []
    for ends in named:
        source, target = (
            Site.parse(site, model) if isinstance(model, int) else model.resolve(site) for site in ends
        )
        if source.kind == target.kind == STREAM and source.layer >= target.layer:
            raise InputError(
                f"The source of a map must lie before its target, got layer {source.layer} and layer "
                f"{target.layer}."
            )
        resolved.append((str(source), str(target)))
    return resolved


def both_ends(pair: object) -> Pair:
    """Read a pair of sites; raises InputError if it is not one."""
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise InputError(f"A pair must have two sites, such as (0, 3) or ('mid.1', 2), got {short(pair)}.")
    return pair[0], pair[1]


def check_collected(pairs: Iterable[tuple[str, str]], collected: Iterable[str]) -> None:
    """Raise InputError if the sites of some pairs were not collected."""
    existing = list(map(str, collected))
    absent = sorted({site for pair in pairs for site in pair} - set(existing), key=Site.parse)
    if absent:
        raise InputError(
            f"pairs must be of collected sites ({', '.join(existing)}), got {', '.join(absent)}."
        )


def by_source(pairs: Iterable[tuple[Any, Any]]) -> dict[str, list[str]]:
    """Targets of each source, in order of first occurrence."""
    grouped: dict[str, list[str]] = {}
    for source, target in dict.fromkeys((str(Site.parse(a)), str(Site.parse(b))) for a, b in pairs):
        grouped.setdefault(source, []).append(target)
    return grouped
