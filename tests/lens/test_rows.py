"""Rows that are kept stay together: vectors, keys, places and weights."""

from __future__ import annotations

import torch

from matlens.lens.rows import KeptRows


def rows(first: int, n: int, *, weights: bool = False) -> KeptRows:
    """Rows whose every number says which row it is."""
    numbers = torch.arange(first, first + n)
    vectors = {layer: (10 * layer + numbers).float()[:, None].repeat(1, 3) for layer in (0, 2)}
    return KeptRows(vectors, 100 - numbers, numbers, numbers.double() if weights else None)


def assert_are(held: KeptRows, numbers: list[int], *, index: list[int] | None = None) -> None:
    assert len(held) == len(numbers)
    for layer in (0, 2):
        assert held.vectors[layer].tolist() == [[10.0 * layer + number] * 3 for number in numbers]
    assert held.keys.tolist() == [100 - number for number in numbers]
    assert held.index.tolist() == (numbers if index is None else index)


def test_rows_are_chosen_by_a_mask_or_by_their_numbers() -> None:
    held = rows(1, 4, weights=True)
    for choice in (torch.tensor([False, True, False, True]), torch.tensor([1, 3])):
        assert_are(held.chosen(choice), [2, 4])
        assert held.chosen(choice).weights.tolist() == [2.0, 4.0]
    assert rows(1, 4).weights.tolist() == [1.0] * 4


def test_rows_of_another_part_come_after_these() -> None:
    both = rows(1, 2).with_rows(rows(7, 2, weights=True), 30)
    assert_are(both, [1, 2, 7, 8], index=[1, 2, 37, 38])
    assert both.weights.tolist() == [1.0, 1.0, 7.0, 8.0]


def test_the_rows_of_the_least_keys_are_the_first() -> None:
    held = rows(1, 5, weights=True)  # the later, the less
    assert_are(held.first_keys(2), [5, 4])
    assert held.first_keys(2).weights.tolist() == [5.0, 4.0]
    assert held.first_keys(5) is held


def test_rows_of_some_layers_are_the_same_rows() -> None:
    held = rows(1, 2, weights=True).of_layers([2])
    assert list(held.vectors) == [2]
    assert held.vectors[2].tolist() == [[21.0] * 3, [22.0] * 3]
    assert held.weights.tolist() == held.index.tolist() == [1, 2]
    assert held.keys.tolist() == [99, 98]
