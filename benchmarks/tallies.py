"""What runs of a benchmark have counted, kept in a CSV that runs of other commands add to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd


class Tally:
    """Counts by keys, a line of a CSV each, written whenever one is known.

    A line of the same keys takes the place of the one before, so that nothing is counted twice; runs with
    other seeds add up.

    Attributes
    ----------
    table
        All lines, in the order in which their commands were first run.
    """

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        self._path, self._keys = path, list(keys)
        self.table = pd.read_csv(path) if path.is_file() else pd.DataFrame()

    def put(self, **line: object) -> None:
        """Keep a line, in the place of one of the same keys."""
        new = pd.DataFrame([line])
        if len(self.table):
            same = (self.table[self._keys] == new.loc[0, self._keys]).all(axis=1)
            new = pd.concat([self.table[~same], new], ignore_index=True)
        self.table = new
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.table.to_csv(self._path, index=False, lineterminator="\n")

    def summed(self, by: Sequence[str], counts: Sequence[str]) -> list[list[object]]:
        """Rows of a table: heads, the counts of each group added up, and those of all."""
        groups = self.table.groupby(list(by), sort=False)[list(counts)].sum().reset_index()
        rows: list[list[object]] = [
            [*(str(row[key]) for key in by), *(int(row[count]) for count in counts)]
            for row in groups.to_dict("records")
        ]
        total: list[object] = ["all", *[""] * (len(by) - 1), *(int(groups[count].sum()) for count in counts)]
        return [[*by, *counts], *rows, total]
