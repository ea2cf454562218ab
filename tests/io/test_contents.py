"""Hashes of files: remembered while the file is untouched, and never where it could have changed."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from matlens.io import contents
from matlens.io.contents import hash_contents
from matlens.io.entries import Cache


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were read."""
    seen: list[str] = []
    monkeypatch.setattr(contents, "_GRAIN", -1.0)
    opened = contents.open_regular
    monkeypatch.setattr(contents, "open_regular", lambda path: seen.append(Path(path).name) or opened(path))
    return seen


def test_a_file_is_read_once(tmp_path: Path, reads: list[str]) -> None:
    cache, path = Cache(tmp_path / "cache"), tmp_path / "a.bin"
    path.write_bytes(b"first")
    for _ in range(2):
        assert hash_contents(cache, [path]) == {"a.bin": sha256(path)}
    assert reads == ["a.bin"]


@pytest.mark.parametrize("how", ["written over", "with its old time", "replaced"])
def test_a_file_that_was_changed_is_read_again(how: str, tmp_path: Path, reads: list[str]) -> None:
    cache, path = Cache(tmp_path / "cache"), tmp_path / "a.bin"
    path.write_bytes(b"first")
    hash_contents(cache, [path])
    before = path.stat()
    time.sleep(0.02)  # past the grain of the clock
    if how == "replaced":
        (tmp_path / "b.bin").write_bytes(b"other")
        (tmp_path / "b.bin").replace(path)
    else:
        path.write_bytes(b"other")
    if how != "written over":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert hash_contents(cache, [path]) == {"a.bin": sha256(path)}
    assert reads == ["a.bin", "a.bin"]


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    cache, path = Cache(tmp_path / "cache"), tmp_path / "a.bin"
    path.write_bytes(b"first")
    hash_contents(cache, [path])
    assert not (tmp_path / "cache").exists()


def test_a_damaged_note_is_not_believed(tmp_path: Path, reads: list[str]) -> None:
    cache, path = Cache(tmp_path / "cache"), tmp_path / "a.bin"
    path.write_bytes(b"first")
    hash_contents(cache, [path])
    (note,) = (tmp_path / "cache" / "hashes").glob("*.json")
    note.write_text(note.read_text().replace(sha256(path), "0" * 64))
    assert hash_contents(cache, [path]) == {"a.bin": sha256(path)}
