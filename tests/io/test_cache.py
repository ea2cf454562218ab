"""Entries of the cache: whole or absent, damaged ones recomputed, one process at a time fills one."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from matlens.errors import InputError
from matlens.io.cache import Cache, file_states

KEY = {"content": "a"}


def writer(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "numbers.bin").write_bytes(content) and None


def test_an_entry_is_found_by_its_key_alone(tmp_path):
    cache = Cache(tmp_path / "cache")
    assert cache.find("thing", KEY) is None
    stored = cache.store("thing", KEY, writer(b"12345"), about={"what": "five"})
    found = cache.find("thing", KEY)
    assert stored is not None
    assert found is not None
    assert (found.folder, found.kind, found.about) == (stored.folder, "thing", {"what": "five"})
    assert found.n_bytes == 5
    assert (found.folder / "numbers.bin").read_bytes() == b"12345"
    assert cache.find("thing", {"content": "b"}) is None
    assert cache.find("other", KEY) is None
    assert cache.store("thing", KEY, lambda folder: pytest.fail("filled again")) is not None


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a byte": lambda folder: (folder / "numbers.bin").write_bytes(b"12346"),
    "a pipe": lambda folder: ((folder / "numbers.bin").unlink(), os.mkfifo(folder / "numbers.bin")),
    "the record": lambda folder: (folder.parent / "config.json").write_text(
        (folder.parent / "config.json").read_text().replace("thing", "thong")
    ),
    "no JSON": lambda folder: (folder.parent / "config.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_removed(damage, tmp_path, capsys):
    cache = Cache(tmp_path)
    entry = cache.store("thing", KEY, writer(b"12345"))
    assert entry is not None
    DAMAGES[damage](entry.folder)
    assert cache.find("thing", KEY) is None
    assert "damaged and recomputed" in capsys.readouterr().err
    assert not entry.folder.exists()
    assert cache.store("thing", KEY, writer(b"12345")) is not None
    assert cache.find("thing", KEY) is not None


def _die(root: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").write_bytes(b"1")
        os._exit(9)

    Cache(root).store("thing", KEY, fill)


def test_a_killed_filler_leaves_no_entry_and_blocks_nobody(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert Cache(tmp_path).find("thing", KEY) is None
    entry = Cache(tmp_path).store("thing", KEY, writer(b"12345"))
    assert entry is not None
    assert [path.name for path in entry.folder.iterdir()] == ["numbers.bin"]


def test_the_entry_used_longest_ago_is_removed_first(tmp_path):
    cache = Cache(tmp_path, limit=25)
    for number in range(2):
        cache.store("thing", {"n": number}, writer(b"0123456789"))
    for number, age in ((0, 50), (1, 100)):
        entry = cache.find("thing", {"n": number})
        assert entry is not None
        os.utime(entry.folder.parent / "config.json", (time.time() - age,) * 2)
    assert cache.find("thing", {"n": 1}) is not None  # which is a use
    cache.store("thing", {"n": 2}, writer(b"0123456789"))
    assert [cache.find("thing", {"n": number}) is not None for number in range(3)] == [False, True, True]
    assert cache.store("thing", {"n": 3}, writer(b"0" * 26)) is None  # larger than the cache
    assert [entry.n_bytes for entry in cache.entries()] == [10, 10]


@pytest.mark.parametrize(
    ("error", "told"), [(OSError(errno.ENOSPC, "full"), True), (InputError("mine"), False)]
)
def test_an_entry_that_cannot_be_filled_leaves_nothing(error, told, tmp_path, capsys):
    def fill(folder: Path) -> None:
        (folder / "half").write_bytes(b"1")
        raise error

    with nullcontext() if told else pytest.raises(type(error)):
        assert Cache(tmp_path).store("thing", KEY, fill) is None
    assert (f"is not used. {type(error).__name__}: " in capsys.readouterr().err) is told
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_state_of_a_file_changes_with_it(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"first")
    before, state = path.stat(), file_states([path])
    assert file_states([path]) == state
    time.sleep(0.02)  # longer than a tick of the file system's clock
    path.write_bytes(b"other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_states([path]) != state


def test_an_entry_that_another_process_fills_is_left_alone(tmp_path):
    context = multiprocessing.get_context("fork")
    began, ends = context.Event(), context.Event()

    def fill(folder: Path) -> None:
        began.set()
        ends.wait(60)
        (folder / "numbers.bin").write_bytes(b"12345")

    process = context.Process(target=lambda: Cache(tmp_path).store("thing", KEY, fill))
    process.start()
    assert began.wait(60)
    assert Cache(tmp_path).find("thing", KEY) is None
    Cache(tmp_path).clear()
    ends.set()
    process.join()
    assert Cache(tmp_path).find("thing", KEY) is not None
