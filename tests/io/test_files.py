"""Single files: written completely or not at all, and read with care whatever is in their place."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import tree

from matlens.errors import InputError
from matlens.io.files import (
    check_file,
    checksummed,
    describe_file,
    locked,
    read_json,
    verified,
    write_files,
)


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"\0\1", b"\0\1"), ("Schließlich", "Schließlich".encode()), ({"a": [1]}, b'{\n "a": [\n  1\n ]\n}\n')],
)
def test_a_file_is_written_completely_or_not_at_all(content, expected, tmp_path, monkeypatch):
    path, synced = tmp_path / "file", list[bytes]()
    path.write_bytes(b"the old content")

    def sync(_: int) -> None:
        # The content is on its way to the disk under another name; the file itself is as it was.
        synced.extend(other.read_bytes() for other in tmp_path.iterdir() if other != path)
        assert path.read_bytes() == b"the old content"

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_files({path: content})
    assert tree(tmp_path) == {"file": b"the old content"}
    monkeypatch.setattr(os, "fsync", sync)
    write_files({path: content})
    assert synced == [expected]
    assert tree(tmp_path) == {"file": expected}


def test_several_files_are_all_written_or_none(tmp_path, monkeypatch):
    (tmp_path / "csv").write_bytes(b"old")
    calls: list[int] = []

    def full_at_the_second(_: int) -> None:
        calls.append(1)
        if len(calls) == 2:
            full_disk()

    monkeypatch.setattr(os, "fsync", full_at_the_second)
    new = {tmp_path / "csv": b"new", tmp_path / "a" / "b" / "json": b"where it is from"}
    with pytest.raises(OSError, match="No space"):
        write_files(new)
    assert tree(tmp_path) == {"csv": b"old"}
    write_files(new)
    assert tree(tmp_path) == {"csv": b"new", "a/b/json": b"where it is from"}
    os.mkfifo(tmp_path / "fifo")
    for name in ("a", "fifo"):
        with pytest.raises(InputError, match="got a folder, a pipe or a device"):
            write_files({tmp_path / "csv": b"newer", tmp_path / name: b"x"})
    assert (tmp_path / "csv").read_bytes() == b"new"


def test_links_are_replaced_and_not_followed(tmp_path):
    (tmp_path / "victim").write_text("years of work")
    for name, target in (("link", "victim"), ("dangling", "absent")):
        (tmp_path / name).symlink_to(tmp_path / target)
        write_files({tmp_path / name: "ours"})
        assert not (tmp_path / name).is_symlink()
    (tmp_path / "hard").hardlink_to(tmp_path / "victim")
    write_files({tmp_path / "hard": "ours"})
    assert tree(tmp_path)["victim"] == b"years of work"


@pytest.mark.parametrize("text", ["{", "", "1" * 5000, "[" * 100_000, "nul"])
def test_a_file_that_is_not_json_is_refused(text, tmp_path):
    write_files({tmp_path / "a.json": text})
    with pytest.raises(InputError) as raised:
        read_json(tmp_path / "a.json")
    assert len(str(raised.value)) < 400


def test_a_changed_record_or_file_is_refused(tmp_path):
    path, own = tmp_path / "config.json", checksummed({"a": [1.5, None, {"b": "ü"}], "c": float("inf")})
    write_files({path: own})
    assert verified(read_json(path), path) == own == checksummed(own)
    for changed in ({**own, "a": 2}, {**own, "more": 0}, {"a": 1}, [], {"digest": None}):
        with pytest.raises(InputError, match=r"config\.json does not hold"):
            verified(changed, path)
    record = describe_file(path)
    check_file(path, record)
    for content in (b"{" + path.read_bytes()[1:-1] + b"\t", b"{}", None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=r"config\.json .*changed or damaged"):
            check_file(path, record)
        path.touch()


def _hold(folder: Path) -> None:
    with locked(folder):
        (folder / f".x.{'0' * 16}.partial").write_text("half")
        (folder / ".tmpXzsAV2").write_text("what safetensors was writing")
        os._exit(9)


def test_the_lock_of_a_killed_process_is_free_and_its_partial_files_are_removed(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path / "a",))
    process.start()
    process.join()
    assert process.exitcode == 9
    with locked(tmp_path / "a"):
        assert [path.name for path in (tmp_path / "a").iterdir()] == [".lock"]
    assert not list((tmp_path / "a").iterdir())
