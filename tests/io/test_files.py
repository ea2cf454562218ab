"""Single files: made anew, whole or not at all, and read with care whatever stands at their place."""

import errno
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trees import tree

from matlens.errors import InputError
from matlens.io.files import (
    LOCK,
    check_file_name,
    check_seal,
    create,
    open_regular,
    read_json,
    sealed,
    system_errors,
    write_bytes,
    write_json,
    write_text,
    write_together,
)


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


def test_names_of_files_that_are_being_written_cannot_be_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda _: names.update(os.listdir(tmp_path)))
    for _ in range(20):
        write_bytes(tmp_path / "file", b"1")
    assert len(names - {LOCK, "file"}) == 20


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("years of work")
    for name, target in (("link", "victim"), ("dangling", "absent"), ("loop", "loop")):
        path = tmp_path / name
        path.symlink_to(tmp_path / target)
        write_text(path, "ours")
        assert not path.is_symlink()
        assert path.read_text() == "ours"
    (tmp_path / "hard").hardlink_to(tmp_path / "victim")
    write_text(tmp_path / "hard", "ours")
    assert tree(tmp_path)["victim"] == b"years of work"
    assert not (tmp_path / "absent").exists()


def test_a_name_that_is_taken_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda n: "ab" * n)
    (tmp_path / "victim").write_text("years of work")
    (tmp_path / f".file.{'ab' * 8}.partial").mkdir()  # what is no file is not cleared away either
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "file", "ours")
    with pytest.raises(FileExistsError):
        create(tmp_path / "victim")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(FileExistsError):
        create(tmp_path / "link")
    assert tree(tmp_path) == {"victim": b"years of work"}


def test_a_folder_at_the_place_of_one_file_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "table").write_text("old")
    (tmp_path / "origin").mkdir()
    with pytest.raises(IsADirectoryError):
        write_together({tmp_path / "table": b"new", tmp_path / "origin": b"new"})
    assert tree(tmp_path) == {"table": b"old"}


# Reading


def test_a_pipe_at_the_place_of_a_file_is_refused_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for write in (lambda path: write_bytes(path, b"x"), check_file_name):
        with pytest.raises(InputError, match="is a pipe, a socket or a device"):
            write(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    with pytest.raises(InputError, match="is a folder"):
        check_file_name(tmp_path)
    check_file_name(tmp_path / "new" / "a.html")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    short = tempfile.mkdtemp()  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short}/s")
        for path in (tmp_path / "fifo", tmp_path / "link", tmp_path, Path("/dev/zero"), Path("/dev/null")):
            with pytest.raises(InputError, match=rf"{path} is a folder, a pipe or a device"):
                open_regular(path)
        with pytest.raises(OSError, match="No such device"):
            open_regular(f"{short}/s")
    shutil.rmtree(short)


def test_a_file_past_its_bound_is_refused_with_the_variable_that_raises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(65 * 2**20)  # a hole: nothing of it is on the disk, or read
    with pytest.raises(InputError, match=r"large\.json has more than 64 MiB of JSON.* MATLENS_MAX_JSON_MIB"):
        read_json(path)
    monkeypatch.setenv("MATLENS_MAX_JSON_MIB", "1")
    path.write_bytes(b"[" + b"0," * 2**19 + b"0]")
    with pytest.raises(InputError, match="more than 1 MiB of JSON"):
        read_json(path)
    monkeypatch.setenv("MATLENS_MAX_JSON_MIB", "2")
    assert len(read_json(path)) == 2**19 + 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"\xff",
        b"\x00",
        b"nul",
    ],
)
def test_what_is_no_json_is_refused_by_its_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(InputError, match=r"x\.json"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("record", [{"a": 1}, {"a": [1.5, None, {"b": "ü"}], "c": float("inf")}, {}])
def test_a_record_knows_its_own_content(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, sealed(record))
    assert check_seal(read_json(path), path) == sealed(record) == sealed(sealed(record))
    for changed in ({**sealed(record), "a": 2}, {**sealed(record), "more": 0}, record, [], {"digest": None}):
        with pytest.raises(InputError, match=r"config\.json does not hold what matlens has written"):
            check_seal(changed, path)


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
