"""Which maps are meant: pairs of sites, spelled out for a model of so many layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from matlens.errors import InputError, check, checked, short
from matlens.models.identity import Provenance
from matlens.models.sites import STREAM, Site

Pair = tuple[str | int | Site, str | int | Site]
Pairs = Literal["all", "last"] | Iterable[Pair]


@checked
def resolve_pairs(pairs: Pairs, model: int | Provenance) -> list[tuple[str, str]]:
    """Names of the sites of each pair, in a model.

    Parameters
    ----------
    pairs
        ``"all"`` for every ``0 <= l < l' <= L`` of the stream, ``"last"`` for those onto ``L``, or a list of
        pairs of sites.
    model
        ``L``, the number of its blocks, or what its vectors say of it, where hooks have several names.

    Raises
    ------
    InputError
        These are not pairs, a site is out of range, or a layer of the stream does not lie before its target.
    """
    known = model if isinstance(model, Provenance) else None
    wanted_by_name = isinstance(pairs, str) and pairs in ("all", "last")
    n_layers = (
        model if not isinstance(model, Provenance) else model.identity.n_layers if wanted_by_name else 0
    )
    if isinstance(pairs, str) and pairs == "all":
        named: list[Pair] = [(a, b) for a in range(n_layers) for b in range(a + 1, n_layers + 1)]
    elif isinstance(pairs, str) and pairs == "last":
        named = [(a, n_layers) for a in range(n_layers)]
    else:
        named = list_pairs(pairs)

    def resolve(site: str | int | Site) -> Site:
        return Site.parse(site, n_layers) if known is None else known.resolve(site)

    sites = [(resolve(source), resolve(target)) for source, target in named]
    for source, target in sites:
        if source.kind == target.kind == STREAM and source.layer >= target.layer:
            raise InputError(
                f"A map from layer {source.layer} to layer {target.layer}: the source must lie before the "
                "target."
            )
    return [(str(source), str(target)) for source, target in sites]


def list_pairs(pairs: Any) -> list[Pair]:
    """Read a list of pairs of sites; raises InputError if it is empty, or if an item is not a pair."""
    check(pairs, Iterable[Any], "pairs")
    named = [both_ends(pair) for pair in pairs]
    if not named:
        raise InputError("pairs must have at least one pair of sites, such as (0, 3).")
    return named


def both_ends(pair: object) -> Pair:
    """Read a pair of sites; raises InputError if it is not one."""
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise InputError(f"A pair of sites must be two, such as (0, 3) or ('mid.1', 2), got {short(pair)}.")
    return pair[0], pair[1]


def check_collected(pairs: Iterable[tuple[str, str]], collected: Iterable[str]) -> None:
    """Refuse pairs that there are no samples of.

    Raises
    ------
    InputError
        A site was not collected; the message names all that are missing.
    """
    there = list(map(str, collected))
    absent = sorted({site for pair in pairs for site in pair} - set(there), key=Site.parse)
    if absent:
        raise InputError(f"There are no vectors of {', '.join(absent)}; collected were {', '.join(there)}.")


def by_source(pairs: Iterable[tuple[Any, Any]]) -> dict[str, list[str]]:
    """Targets of each source, both in the order in which they first occur."""
    grouped: dict[str, list[str]] = {}
    for source, target in dict.fromkeys((str(Site.parse(a)), str(Site.parse(b))) for a, b in pairs):
        grouped.setdefault(source, []).append(target)
    return grouped
