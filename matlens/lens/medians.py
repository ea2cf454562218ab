"""Medians of numbers that come bit by bit, in time that grows with the numbers and not with their square."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 15  # bits of a number by which those of one bin are told apart; the 16 above them say the bin
_BINS, _WITHIN = 1 << (31 - _LOW), 1 << _LOW
_OPENED = 4  # bins of a column, on average, whose numbers are counted one by one


class RunningMedians:
    """The median of each column of all rows so far, to the last bit, asked for as often as one likes.

    Numbers of float32 that are not negative are ordered as their bits are. So they are counted by their
    upper bits, and those of the bin in which the median lies by their lower bits too: a new row costs the
    same however many there are.

    Parameters
    ----------
    n_columns
        How many columns there are.
    """

    def __init__(self, n_columns: int) -> None:
        self._parts: list[Tensor] = [torch.empty(0, n_columns)]
        self._bins = torch.zeros(n_columns, _BINS, dtype=torch.int32)
        self._opened: dict[tuple[int, int], Tensor] = {}
        self._n = 0

    @property
    def rows(self) -> Tensor:
        """All rows, ``[n, n_columns]``, in their order."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0]

    def add(self, values: Tensor) -> None:
        """Add rows ``[n, n_columns]`` of float32, none of them negative."""
        self._parts.append(values)
        self._n += len(values)
        for column, bits in enumerate(_bits(values).unbind(1)):
            bins = bits >> _LOW
            self._bins[column] += _counts(bins, _BINS)
            for opened in [bin_ for of_column, bin_ in self._opened if of_column == column]:
                self._opened[column, opened] += _within(bits, opened)

    def merge(self, other: RunningMedians) -> None:
        """Add all rows that another object has."""
        self._parts += other._parts
        self._bins += other._bins
        self._n += other._n
        self._opened.clear()

    def medians(self) -> Tensor:
        """The medians; of two in the middle the lower, as `torch.median` takes it."""
        rank = (self._n - 1) // 2 + 1
        found = []
        for column, counts in enumerate(self._bins):
            bin_, below = _place(counts, rank)
            low, _ = _place(self._open(column, bin_), rank - below)
            found.append((bin_ << _LOW) | low)
        return torch.tensor(found, dtype=torch.int32).view(torch.float32)

    def _open(self, column: int, bin_: int) -> Tensor:
        """How often each number of a bin has come."""
        if (column, bin_) not in self._opened:
            if len(self._opened) >= _OPENED * len(self._bins):
                self._opened.clear()
            self._opened[column, bin_] = _within(_bits(self.rows[:, column]), bin_)
        return self._opened[column, bin_]


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32) & 0x7FFFFFFF


def _counts(numbers: Tensor, n: int) -> Tensor:
    return torch.bincount(numbers, minlength=n).to(torch.int32)


def _within(bits: Tensor, bin_: int) -> Tensor:
    """Counts, by their lower bits, of the numbers that lie in a bin."""
    return _counts(bits[bits >> _LOW == bin_] & (_WITHIN - 1), _WITHIN)


def _place(counts: Tensor, rank: int) -> tuple[int, int]:
    """Which number the one of this rank, counted from 1, is, and how many are below that number."""
    upto = counts.cumsum(0)
    place = int(torch.searchsorted(upto, rank))
    return place, int(upto[place] - counts[place])
