"""Which replacements touch the same part of a model, or make each other's work be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matlens.models.anatomy import Anatomy
from matlens.models.sites import MID, STREAM, Site

if TYPE_CHECKING:
    from matlens.patching.replacements import Replacement


def find_overlap(anatomy: Anatomy, replacement: Replacement, others: Sequence[Replacement]) -> str | None:
    """Name the first part that a replacement has in common with others; ``None`` if there is none."""
    for part in _parts(replacement):
        for other in others:
            if any(_clash(part, taken) for taken in _parts(other)):
                return _part_name(part)
    lost = (_find_lost(anatomy, replacement, other) for other in others)
    return next((name for name in lost if name), None)


def _parts(replacement: Replacement) -> list[tuple[int, str]]:
    """Parts of the model that are replaced, as ``(block, sub-module)``; a whole block is ``(block, "")``.

    A map over no blocks replaces the place before a block, ``(block, "h")``, which a jump over both sides
    of it replaces too.
    """
    source, blocks = replacement.source, replacement.blocks
    if replacement.is_patch:
        return []
    if not replacement.is_jump:
        return [(source.layer, source.kind.removesuffix("_in"))]
    if not blocks:
        return [(source.layer, STREAM)]
    return [(block, "") for block in blocks] + [(block, STREAM) for block in blocks[1:]]


def _clash(part: tuple[int, str], taken: tuple[int, str]) -> bool:
    names = part[1], taken[1]
    whole = "" in names and STREAM not in names
    return part[0] == taken[0] and (names[0] == names[1] or whole)


def _part_name(part: tuple[int, str]) -> str:
    block, name = part
    if name == STREAM:
        return f"layer {block} of the stream"
    return f"{name} of block {block}" if name else f"block {block}, or a part of it,"


def _find_lost(anatomy: Anatomy, one: Replacement, other: Replacement) -> str | None:
    """Name what a pass does not come to, or what is lost, where two are made of which one is a patch."""
    if not one.is_patch and not other.is_patch:
        return None
    if anatomy.written_at(one.target)[0] == anatomy.written_at(other.target)[0]:
        return str(one.target)
    for outer, inner in sorted(((one, other), (other, one)), key=lambda both: not both[0].is_jump):
        moments = {inner.target: anatomy.write_order(inner.target)}
        if outer.is_jump:
            moments[inner.source] = anatomy.order(inner.source)
        start, end = _covered(anatomy, outer)
        hidden = [site for site, moment in moments.items() if start < moment < end]
        if hidden:
            return f"{hidden[0]}, which {outer} covers,"
    return None


def _covered(anatomy: Anatomy, replacement: Replacement) -> tuple[int, int]:
    """Between which two moments of a pass all that is written is lost, as the replacement writes over it."""
    source, target = replacement.source, replacement.target
    end = anatomy.write_order(target)
    if replacement.is_jump:
        return (anatomy.start_of_block(source.layer), end) if replacement.blocks else (end, end)
    if not isinstance(replacement.where, str) or replacement.where != "all":
        return end, end  # at the other tokens it is not
    start = anatomy.order(source)
    if target.kind in (STREAM, MID):
        return start, end
    before = target.kind.removesuffix("_out") + "_in"
    if before not in anatomy.kinds or before == target.kind:
        return end, end
    return max(start, anatomy.order(Site(before, target.layer))), end
