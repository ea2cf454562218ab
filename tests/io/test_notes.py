"""Notes of what is done: what was cut short does not count, and what was changed is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from damage import outcome

from matlens.errors import InputError
from matlens.io.files import sealed, write_json
from matlens.io.notes import NOTES, UNFINISHED, Notes

RECORDS: list[dict[str, Any]] = [{"batches": n, "rows": [[n, 2]], "sha256": {"h.0": "ab"}} for n in (1, 2, 3)]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    written = Notes(tmp_path)
    for record in RECORDS:
        written.add(record)
    assert written.records == RECORDS
    return tmp_path / NOTES


def test_notes_are_read_back_and_gone_on_with(notes: Path) -> None:
    assert Notes(notes.parent).records == RECORDS
    again = Notes(notes.parent)
    again.add({"batches": 4})
    assert Notes(notes.parent).records == [*RECORDS, {"batches": 4}]
    again.clear()
    assert Notes(notes.parent).records == []
    again.add({"batches": 1})
    assert Notes(notes.parent).records == [{"batches": 1}]


def test_a_note_that_was_cut_short_at_any_byte_is_none(notes: Path) -> None:
    whole = notes.read_bytes()
    ends = [end for end, byte in enumerate(whole, start=1) if byte == ord("\n")]
    for size in range(len(whole)):
        notes.write_bytes(whole[:size])
        n_whole = sum(end <= size for end in ends)
        cut = Notes(notes.parent)
        assert cut.records == RECORDS[:n_whole]
        if size % 37 == 0:  # and the next call writes over it
            for record in RECORDS[n_whole:]:
                cut.add(record)
            assert notes.read_bytes() == whole


def test_a_note_that_was_changed_at_any_byte_is_refused(notes: Path) -> None:
    whole = notes.read_bytes()
    for place in range(len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        notes.write_bytes(changed)
        read, refusal = outcome(lambda: Notes(notes.parent).records)
        if refusal is not None:
            assert NOTES in refusal
        else:
            assert read == RECORDS[: len(read)], place  # a line's end that was changed cuts it short


def test_notes_in_another_order_are_refused(notes: Path) -> None:
    lines = notes.read_bytes().splitlines(keepends=True)
    for order in ([1, 0, 2], [0, 2, 1], [1, 2], [0, 0, 1]):
        notes.write_bytes(b"".join(lines[i] for i in order))
        with pytest.raises(InputError, match=rf"{NOTES} does not hold what was noted in line"):
            Notes(notes.parent)


@pytest.mark.parametrize("line", ["[]", "{}", "[" * 5000, json.dumps({"note": 1, "digest": ""}), "{", "\x00"])
def test_what_is_no_note_is_refused(line: str, notes: Path) -> None:
    with notes.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=NOTES):
        Notes(notes.parent)


def test_notes_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / NOTES).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        Notes(tmp_path / "x").add({"batches": 1})
    assert (tmp_path / "victim").read_text() == ""


def test_notes_of_another_job_are_refused(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other", "none")]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        if folder.name != "none":
            write_json(folder / UNFINISHED, sealed({"holds": "rows", "request": {"seed": seed}}))
        Notes(folder).add(RECORDS[0])
    whole = {(folder / NOTES).read_bytes() for folder in folders}
    assert len(whole) == 3
    for folder in folders:
        assert Notes(folder).records == RECORDS[:1]
        for content in whole - {(folder / NOTES).read_bytes()}:
            own = (folder / NOTES).read_bytes()
            (folder / NOTES).write_bytes(content)
            with pytest.raises(InputError, match=r"progress\.jsonl .*damaged"):
                Notes(folder)
            (folder / NOTES).write_bytes(own)
