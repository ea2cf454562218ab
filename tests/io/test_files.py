"""Single files: written completely or not at all, and read with care whatever is in their place."""

from __future__ import annotations

import errno
import multiprocessing
import os
import secrets
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors import SafetensorError
from trees import tree

from matlens.errors import InputError
from matlens.io.files import (
    check_writable,
    checksummed,
    locked,
    open_regular,
    read_json,
    system_errors,
    verified,
    write_files,
)


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"\0\1", b"\0\1"), ("Schließlich", "Schließlich".encode()), ({"a": [1]}, b'{\n "a": [\n  1\n ]\n}\n')],
)
@pytest.mark.parametrize("before", [None, b"the old content"])
def test_a_file_is_written_completely_or_not_at_all(
    content: Any, expected: bytes, before: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    as_it_was = tree(tmp_path)
    synced: list[bytes] = []

    def sync(_: int) -> None:
        # The content is on its way to the disk under another name; the file itself is as it was.
        synced.extend(other.read_bytes() for other in tmp_path.iterdir() if other != path)
        assert (path.read_bytes() if path.exists() else None) == before

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(InputError, match="full"):
        write_files({path: content})
    assert tree(tmp_path) == as_it_was
    monkeypatch.setattr(os, "fsync", sync)
    write_files({path: content})
    assert synced == [expected]
    assert tree(tmp_path) == {"file": expected}


def test_several_files_are_all_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "csv").write_bytes(b"old")
    calls: list[int] = []

    def full_at_the_second(_: int) -> None:
        calls.append(1)
        if len(calls) == 2:
            full_disk()

    monkeypatch.setattr(os, "fsync", full_at_the_second)
    new = {tmp_path / "csv": b"new", tmp_path / "a" / "b" / "json": b"where it is from"}
    with pytest.raises(InputError):
        write_files(new)
    assert tree(tmp_path) == {"csv": b"old"}
    write_files(new)
    assert tree(tmp_path) == {"csv": b"new", "a/b/json": b"where it is from"}
    with pytest.raises(InputError, match="got a folder"):
        write_files({tmp_path / "csv": b"newer", tmp_path / "a": b"x"})
    assert tree(tmp_path)["csv"] == b"new"


def test_of_two_writers_at_once_all_files_are_from_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins between the two replacements of the first."""
    replace, is_between, is_done = Path.replace, threading.Event(), threading.Event()

    def write(text: str) -> None:
        write_files({tmp_path / "csv": text, tmp_path / "json": text})

    def replacing(self: Path, target: Path) -> Path:
        replaced = replace(self, target)
        if threading.current_thread() is first and target.name == "csv":
            is_between.set()
            is_done.wait(0.5)
        return replaced

    first = threading.Thread(target=write, args=["first"])
    monkeypatch.setattr(Path, "replace", replacing)
    (tmp_path / f".x.{'0' * 16}.partial").write_text("of a third one")
    first.start()
    is_between.wait()
    write("second")
    is_done.set()
    first.join()
    assert tree(tmp_path) == {
        "csv": b"second",
        "json": b"second",
        f".x.{'0' * 16}.partial": b"of a third one",
    }


def test_links_are_replaced_and_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "victim").write_text("years of work")
    for name, target in (("link", "victim"), ("dangling", "absent"), ("loop", "loop")):
        path = tmp_path / name
        path.symlink_to(tmp_path / target)
        write_files({path: "ours"})
        assert not path.is_symlink()
        assert path.read_text() == "ours"
    (tmp_path / "hard").hardlink_to(tmp_path / "victim")
    write_files({tmp_path / "hard": "ours"})
    assert tree(tmp_path)["victim"] == b"years of work"
    names: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda _: names.update(os.listdir(tmp_path)))
    for _ in range(20):
        write_files({tmp_path / "file": b"1"})
    assert len([name for name in names if name.endswith(".partial")]) == 20  # names that cannot be foreseen
    monkeypatch.setattr(secrets, "token_hex", lambda n: "ab" * n)
    (tmp_path / f".file.{'ab' * 8}.partial").symlink_to(tmp_path / "absent")
    with pytest.raises(InputError):
        write_files({tmp_path / "file": "ours"})
    assert not (tmp_path / "absent").exists()


def test_pipes_and_devices_are_neither_read_nor_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path / "link", tmp_path, Path("/dev/zero")):
        with pytest.raises(InputError, match=rf"{path} must be a file"):
            open_regular(path)
    with pytest.raises(InputError, match="got a folder, a pipe or a device"):
        write_files({tmp_path / "fifo": b"x"})
    with pytest.raises(InputError, match="got a folder, a pipe or a device"):
        check_writable(tmp_path, ["fifo"])
    assert stat.S_ISFIFO((tmp_path / "fifo").lstat().st_mode)
    check_writable(tmp_path / "new" / "folder", ["a.html"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "link"]


def test_a_file_larger_than_its_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(65 * 2**20)  # a hole: nothing of it is on the disk, or read
    with pytest.raises(InputError, match=r"large\.json has more than 64 MiB of JSON.* MATLENS_MAX_JSON_MIB"):
        read_json(path)
    path.write_bytes(b"[" + b"0," * 2**19 + b"0]")
    assert len(read_json(path)) == 2**19 + 1
    monkeypatch.setenv("MATLENS_MAX_JSON_MIB", "1")
    with pytest.raises(InputError, match="more than 1 MiB of JSON"):
        read_json(path)
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"large\.json must be UTF-8"):
        read_json(path)


@pytest.mark.parametrize("record", [{"a": 1}, {"a": [1.5, None, {"b": "ü"}], "c": float("inf")}, {}])
def test_a_changed_record_is_refused(record: dict[str, Any], tmp_path: Path) -> None:
    path, own = tmp_path / "config.json", checksummed(record)
    write_files({path: own})
    assert verified(read_json(path), path) == own == checksummed(own)
    for changed in ({**own, "a": 2}, {**own, "more": 0}, record, [], {"digest": None}):
        with pytest.raises(InputError, match=r"config\.json does not hold"):
            verified(changed, path)


def test_errors_of_the_file_system_are_input_errors() -> None:
    for number in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EDQUOT):
        error = OSError(number, os.strerror(number), "/somewhere")
        with pytest.raises(InputError, match="/somewhere") as raised, system_errors():
            raise error
        assert raised.value.__cause__ is error
    with pytest.raises(InputError, match="/somewhere is full"), system_errors("/somewhere"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    for other in (OSError(errno.EIO, "broken"), ValueError("x"), KeyboardInterrupt()):
        with pytest.raises(type(other)) as passed, system_errors("/somewhere"):
            raise other
        assert passed.value is other


def _hold(folder: Path, is_held: Any) -> None:
    with locked(folder):
        (folder / f".x.{'0' * 16}.partial").write_text("half")
        is_held.set()
        os._exit(9)


def test_the_lock_of_a_killed_process_is_free_and_its_partial_files_are_removed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    is_held = context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "a", is_held))
    process.start()
    process.join()
    assert is_held.is_set()
    with locked(tmp_path / "a"):
        assert [path.name for path in (tmp_path / "a").iterdir()] == [".lock"]
    assert not list((tmp_path / "a").iterdir())


def test_a_folder_that_cannot_be_made_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "a", Path("/proc/nothing/there")):
        with pytest.raises((FileNotFoundError, NotADirectoryError)), locked(folder):
            pass


def test_a_lock_whose_file_cannot_be_removed_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where the file is open."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "in use")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with locked(tmp_path):
            pass
    with FileLock(tmp_path / ".lock", timeout=0):
        pass
