"""Single files: made anew, whole or not at all, and read with care whatever stands at their place."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trees import tree

from matlens.errors import InputError
from matlens.storage.files import system_errors, write_bytes, write_json, write_text, write_together
from matlens.storage.locks import LOCK


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# Writing


@pytest.mark.parametrize(
    ("write", "content", "expected"),
    [
        (write_bytes, b"\0\1", b"\0\1"),
        (write_text, "Schließlich", "Schließlich".encode()),
        (write_json, {"a": [1]}, b'{\n "a": [\n  1\n ]\n}\n'),
    ],
)
@pytest.mark.parametrize("before", [None, b"the old content"])
def test_a_file_is_there_whole_or_not_at_all(
    write: Callable[[Path, Any], None], content: Any, expected: bytes, before: bytes | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    as_it_was = tree(tmp_path)
    synced: list[bytes] = []

    def sync(_: int) -> None:
        # The content is on its way to the disk under another name; the file itself is as it was.
        others = (other for other in tmp_path.iterdir() if other not in (path, tmp_path / LOCK))
        synced.extend(other.read_bytes() for other in others)
        assert (path.read_bytes() if path.exists() else None) == before

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write(path, content)
    assert tree(tmp_path) == as_it_was
    monkeypatch.setattr(os, "fsync", sync)
    write(path, content)
    assert synced == [expected]
    assert tree(tmp_path) == {"file": expected}


def test_files_that_belong_together_are_all_written_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table").write_bytes(b"old")
    new = {tmp_path / "table": b"new", tmp_path / "origin": b"where it is from"}
    calls: list[int] = []

    def full_at_the_second(_: int) -> None:
        calls.append(1)
        if len(calls) == 2:
            full_disk()

    monkeypatch.setattr(os, "fsync", full_at_the_second)
    with pytest.raises(OSError, match="No space"):
        write_together(new)
    assert tree(tmp_path) == {"table": b"old"}
    write_together(new)
    assert tree(tmp_path) == {"table": b"new", "origin": b"where it is from"}


# What the file system refuses


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no room on the disk of /somewhere"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "no room"),
        (OSError(errno.EFBIG, "File too large"), "no room"),
        (OSError("28 requested and 0 written: No space left"), "no room"),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            "/somewhere cannot be written: Permission denied",
        ),
        (OSError(errno.EROFS, "Read-only file system"), "cannot be written: Read-only file system"),
        (PermissionError(errno.EPERM, "Operation not permitted"), "cannot be written"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), "cannot be written"),
        (FileExistsError(errno.EEXIST, "File exists"), "cannot be written"),
    ],
)
def test_what_the_file_system_refuses_is_told(error: OSError, message: str) -> None:
    with pytest.raises(InputError, match=message) as told, system_errors("/somewhere"):
        raise error
    assert told.value.__cause__ is error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), ValueError("x"), KeyboardInterrupt()])
def test_what_is_no_refusal_of_the_file_system_stays_what_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as told, system_errors("/somewhere"):
        raise error
    assert told.value is error


def test_what_does_not_fail_passes() -> None:
    with system_errors("/somewhere"):
        passed = True
    assert passed
