"""How tests break off work that is being written to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from matlens.io.rows import RowFiles


def break_off_at(
    patch: pytest.MonkeyPatch,
    batch: int,
    error: type[BaseException] = KeyboardInterrupt,
    *,
    after: bool,
) -> None:
    """Raise when this batch is to be written, before or after it is."""
    write, written = RowFiles.write, [0]

    def breaking(self: RowFiles, index: Any, vectors: Any) -> None:
        if after or written[0] < batch:
            write(self, index, vectors)
        written[0] += 1
        if written[0] > batch:
            raise error

    patch.setattr(RowFiles, "write", breaking)


def batches_noted(folder: Path) -> int:
    """How many batches the notes of an unfinished folder say are done."""
    notes = folder / "progress.jsonl"
    lines = notes.read_text().splitlines(keepends=True) if notes.is_file() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return int(whole[-1]["note"]["batches"]) if whole else 0


def forget_notes(folder: Path, n_kept: int) -> None:
    """Leave only the first so many notes, as a kill before the others would have."""
    notes = folder / "progress.jsonl"
    notes.write_text("".join(notes.read_text().splitlines(keepends=True)[:n_kept]))
