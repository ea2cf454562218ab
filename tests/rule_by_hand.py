"""The exit rule as a loop over examples, written from its definition."""

from __future__ import annotations

from fractions import Fraction


def common(mine: list[int], known: list[int], overlap: str) -> int:
    if overlap == "sets":
        return len(set(mine) & set(known))
    return sum(one == other for one, other in zip(mine, known, strict=True))


def layer_left(
    example: list[list[int]], known: list[list[list[int]]], made_at: list[int], others: str, overlap: str
) -> int:
    """Where one example leaves, given its clusters by layer, and those of the training examples."""
    for layer in range(len(example)):
        sizes: dict[int, list[int]] = {}
        for clusters, made in zip(known, made_at, strict=True):
            made = 99 if others == "together" and made != layer else made
            sizes.setdefault(made, []).append(common(example[layer], clusters[layer], overlap))
        inside = sizes.pop(layer, None)
        if others == "later":
            sizes = {made: each for made, each in sizes.items() if made > layer}
        if inside and all(
            Fraction(sum(inside), len(inside)) > Fraction(sum(each), len(each)) and max(inside) > max(each)
            for each in sizes.values()
        ):
            return layer
    return len(example) - 1
