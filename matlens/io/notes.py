"""What an unfinished job has done so far, noted line by line so that a later call can check it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matlens.io.bounds import JSON, parse_json
from matlens.io.files import SEAL, content_hash, damaged, read_bounded, read_json

UNFINISHED = "unfinished.json"
"""The file that says what an unfinished folder will hold."""
NOTES = "progress.jsonl"
"""The file of an unfinished folder that the notes are in."""


class Notes:
    """Notes of an unfinished folder, each with a hash of itself, of all before it, and of what the job is.

    So notes of another job are not taken for this one's. A line that a kill has cut short is as if it had
    never been; what was changed is refused.

    Attributes
    ----------
    records
        What has been noted, in order.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._job = folder / NOTES, _job(folder)
        self.records: list[dict[str, Any]] = []
        self._hash, self._size = self._job, 0
        try:
            content = read_bounded(self._path, JSON)
        except FileNotFoundError:
            return
        lines = content.split(b"\n")[:-1]  # what follows the last newline was cut short
        for number, line in enumerate(lines, start=1):
            note = parse_json(line.decode("ascii", "replace"), f"line {number} of {self._path}")
            if not isinstance(note, dict) or not isinstance(note.get("note"), dict):
                raise damaged(self._path, f"holds no note in line {number}")
            self._hash = content_hash(note["note"], before=self._hash)
            if note.get("digest") != self._hash:
                raise damaged(self._path, f"does not hold what was noted in line {number}")
            self.records.append(note["note"])
            self._size += len(line) + 1

    def add(self, record: Mapping[str, Any]) -> None:
        """Note what has been done, once it is on the disk."""
        self._hash = content_hash(record, before=self._hash)
        line = json.dumps({"note": record, "digest": self._hash}, separators=(",", ":")) + "\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        # The descriptor is closed by the file, also where the disk is full.
        with os.fdopen(os.open(self._path, flags, 0o666), "wb") as file:
            file.truncate(self._size)
            file.seek(self._size)
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self._size += len(line)
        self.records.append(dict(record))

    def clear(self) -> None:
        """Forget all that was done."""
        self._path.unlink(missing_ok=True)
        self.records, self._hash, self._size = [], self._job, 0


def _job(folder: Path) -> str:
    """The hash of what a folder will hold, and of what was asked for."""
    try:
        return str(read_json(folder / UNFINISHED).get(SEAL, ""))
    except FileNotFoundError:
        return ""
