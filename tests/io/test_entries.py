"""Entries of the cache: whole or absent, damaged ones made anew, old ones gone, one filler at a time."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from matlens.errors import InputError
from matlens.io.entries import Cache, default_cache

KEY = {"content": "a"}


def writer(content: bytes, name: str = "numbers.bin") -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def test_an_entry_is_found_by_its_key_alone(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    assert cache.find("thing", KEY) is None
    kept = cache.keep("thing", KEY, writer(b"12345"), about={"what": "five"})
    found = cache.find("thing", KEY)
    assert kept is not None
    assert found is not None
    assert (found.folder, found.kind, found.about) == (kept.folder, "thing", {"what": "five"})
    assert found.n_bytes == 5
    assert (found.folder / "numbers.bin").read_bytes() == b"12345"
    assert cache.find("thing", {"content": "b"}) is None
    assert cache.find("other", KEY) is None


def test_an_entry_is_filled_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    first = cache.keep("thing", KEY, writer(b"1"))
    second = cache.keep("thing", KEY, lambda folder: pytest.fail("filled again"))
    assert first is not None
    assert second is not None
    assert first.folder == second.folder


def test_what_is_no_entry_is_not_removed(tmp_path: Path) -> None:
    cache, other = Cache(tmp_path / "cache"), tmp_path / "thing-0123456789abcdef0123456789abcdef"
    kept = cache.keep("thing", KEY, writer(b"1"))
    assert kept is not None
    other.mkdir()
    for folder in (other, tmp_path, cache.root, kept.folder / "numbers.bin", Path("/x")):
        with pytest.raises(InputError):
            cache.discard(folder, "it is damaged")
    assert other.is_dir()
    assert cache.find("thing", KEY) is not None


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a byte": lambda folder: (folder / "numbers.bin").write_bytes(b"12346"),
    "the length": lambda folder: (folder / "numbers.bin").write_bytes(b"1234"),
    "a file": lambda folder: (folder / "numbers.bin").unlink(),
    "a pipe": lambda folder: ((folder / "numbers.bin").unlink(), os.mkfifo(folder / "numbers.bin")),
    "the record": lambda folder: (folder.parent / "config.json").write_text(
        (folder.parent / "config.json").read_text().replace("thing", "thong")
    ),
    "no JSON": lambda folder: (folder.parent / "config.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_never_given_and_is_made_anew(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Cache(tmp_path)
    entry = cache.keep("thing", KEY, writer(b"12345"))
    assert entry is not None
    DAMAGES[damage](entry.folder)
    assert cache.find("thing", KEY) is None
    assert "damaged and recomputed" in capsys.readouterr().err
    assert not entry.folder.exists()
    again = cache.keep("thing", KEY, writer(b"12345"))
    assert again is not None
    assert cache.find("thing", KEY) is not None
    assert capsys.readouterr().err == ""


def test_a_filler_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"1")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.keep("thing", KEY, fail)
    assert cache.find("thing", KEY) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _die(root: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").write_bytes(b"1")
        os._exit(9)

    Cache(root).keep("thing", KEY, fill)


def test_a_killed_filler_leaves_no_entry_and_stops_nobody(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 9
    cache = Cache(tmp_path)
    assert cache.find("thing", KEY) is None
    entry = cache.keep("thing", KEY, writer(b"12345"))
    assert entry is not None
    assert [path.name for path in entry.folder.iterdir()] == ["numbers.bin"]


def test_two_that_ask_at_once_fill_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun, filled = threading.Event(), []

    def fill(folder: Path) -> None:
        begun.set()
        time.sleep(2)  # until the second has asked
        filled.append(folder)
        (folder / "numbers.bin").write_bytes(b"1")

    first = threading.Thread(target=Cache(tmp_path).keep, args=("thing", KEY, fill))
    first.start()
    begun.wait()
    assert Cache(tmp_path).keep("thing", KEY, fill) is not None
    first.join()
    assert Cache(tmp_path).find("thing", KEY) is not None
    assert len(filled) == 1
    assert "Waiting" in capsys.readouterr().err


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=25)
    for number in range(2):
        cache.keep("thing", {"n": number}, writer(b"0123456789"))
    for number, age in ((0, 50), (1, 100)):
        entry = cache.find("thing", {"n": number})
        assert entry is not None
        os.utime(entry.folder.parent / "config.json", (time.time() - age,) * 2)
    assert cache.find("thing", {"n": 1}) is not None  # which is a use
    cache.keep("thing", {"n": 2}, writer(b"0123456789"))
    assert [cache.find("thing", {"n": number}) is not None for number in range(3)] == [False, True, True]
    assert sum(entry.n_bytes for entry in cache.entries()) <= 25


def test_what_is_larger_than_the_cache_is_not_kept_and_drives_nothing_out(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=10)
    cache.keep("thing", {"n": 0}, writer(b"12345"))
    assert cache.keep("thing", {"n": 1}, writer(b"0123456789a")) is None
    assert [entry.n_bytes for entry in cache.entries()] == [5]


def test_a_place_that_cannot_be_written_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    assert cache.find("thing", KEY) is None
    assert cache.keep("thing", KEY, writer(b"1")) is None
    assert "Nothing is kept" in capsys.readouterr().err
    assert cache.entries() == []
    assert cache.clear() == 0


def numbers_where_no_folder_is(folder: Path) -> None:
    save_file({"x": torch.ones(2)}, folder / "nowhere" / "numbers.safetensors")


def words_where_no_folder_is(folder: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(folder / "nowhere" / "words"))


@pytest.mark.parametrize("fill", [numbers_where_no_folder_is, words_where_no_folder_is])
def test_a_library_that_cannot_write_is_no_error(
    fill: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a full disk, as of a folder that is not there, libraries say what is no OSError, each another."""
    assert Cache(tmp_path).keep("thing", KEY, fill) is None
    expected = f"Nothing is kept in the cache {tmp_path}: No such file or directory.\n"
    assert capsys.readouterr().err == expected
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_error_that_is_not_the_systems_comes_through(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        Cache(tmp_path).keep("thing", KEY, fill)


def test_clearing_leaves_what_somebody_fills(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.keep("thing", {"n": 0}, writer(b"12345"))
    freed = []

    def fill(folder: Path) -> None:
        (folder / "numbers.bin").write_bytes(b"1")
        freed.append(cache.clear())

    entry = cache.keep("thing", KEY, fill)
    assert entry is not None
    assert cache.find("thing", KEY) is not None
    assert freed[0] > 5
    assert [entry.n_bytes for entry in cache.entries()] == [1]
    cache.clear()
    assert not tmp_path.exists()


@pytest.mark.parametrize("word", ["off", "0", "OFF"])
def test_the_cache_is_switched_off_by_a_word(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATLENS_CACHE", word)
    assert default_cache() is None


def test_the_cache_is_where_the_variable_or_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("MATLENS_CACHE_GIB", "0.5")
    cache = default_cache()
    assert cache is not None
    assert (cache.root, cache.limit) == (tmp_path / "here", 2**29)
    monkeypatch.setenv("MATLENS_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    cache = default_cache()
    assert cache is not None
    assert cache.root.name == "matlens"
    assert not cache.root.exists() or tmp_path not in cache.root.parents


@pytest.mark.parametrize("text", ["many", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATLENS_CACHE_GIB", text)
    with pytest.raises(InputError, match=r"MATLENS_CACHE_GIB.*above 0"):
        default_cache()
