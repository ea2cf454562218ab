"""One writer a folder: others wait, whatever ends the first, and find what it has left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from trees import tree

from matlens.errors import InputError
from matlens.io.files import write_text
from matlens.io.folders import Workplace
from matlens.io.locks import LOCK, is_transient, locked

FORK = multiprocessing.get_context("fork")


def hold(folder: Path, ready: Any, seconds: float = 60.0) -> None:
    with locked(folder):
        ready.set()
        time.sleep(seconds)


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """Another process that has locked the folder ``x``."""
    ready = FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path / "x", ready))
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_the_lock_is_there_while_it_is_held_and_goes(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b") as made:
        assert made == [tmp_path / "a" / "b", tmp_path / "a"]
        assert (tmp_path / "a" / "b" / LOCK).read_text() == f"{os.getpid()} {socket.gethostname()}\n"
        with locked(tmp_path / "a" / "b") as again, locked(tmp_path / "a" / ".." / "a" / "b"):
            assert again == []  # had already
        assert (tmp_path / "a" / "b" / LOCK).exists()
    assert tree(tmp_path) == {}


def test_a_second_process_is_told_who_has_it_and_waits(
    holder: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = threading.Timer(2, holder.kill)
    killed.start()
    with locked(tmp_path / "x"):
        assert killed.finished.is_set()
    expected = f"The process {holder.pid} on {socket.gethostname()} is at work in {tmp_path / 'x'}. Waiting"
    assert capfd.readouterr().err.count(expected) == 1
    assert tree(tmp_path / "x") == {}


def test_a_thread_waits_for_another(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def second() -> None:
        with locked(tmp_path):
            order.append("second")

    with locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        while "is at work" not in capfd.readouterr().err:
            time.sleep(0.01)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_who_waits_can_be_interrupted(holder: Any, tmp_path: Path) -> None:
    timer = threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt), locked(tmp_path / "x"):
            pytest.fail("two have the lock")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "x" / LOCK).exists()  # the other's


def test_a_second_job_finds_the_first_ones_work(tmp_path: Path) -> None:
    """Whoever comes second does nothing; whoever comes after a failure begins anew."""
    log = tmp_path / "log"

    def work(delay: float, failing: bool) -> None:
        place = Workplace(tmp_path / "out", "things", {"seed": 0})
        with contextlib.suppress(InputError), place.working():
            if not place.finished:
                write_text(place.folder / "numbers", "1 2 3")
                time.sleep(delay)
                if failing:
                    raise InputError("the first fails")
                with log.open("a") as file:
                    file.write("worked\n")
                place.finish()

    first = FORK.Process(target=work, args=(0.3, True))
    first.start()
    while not (tmp_path / "out" / "unfinished.json").exists():
        time.sleep(0.005)
    others = [FORK.Process(target=work, args=(0.05, False)) for _ in range(3)]
    for process in others:
        process.start()
    for process in (first, *others):
        process.join(120)
        assert process.exitcode == 0
    assert log.read_text() == "worked\n"
    assert sorted(tree(tmp_path / "out")) == ["config.json", "numbers"]


def test_what_a_killed_process_has_left_is_cleared_away(tmp_path: Path) -> None:
    for name in (LOCK, ".h.0.npy.0123456789abcdef.partial"):
        (tmp_path / name).write_text("left")
    for name in ("x.partial", ".hidden", ".y.0123.partial"):
        (tmp_path / name).write_text("somebody else's")
    with locked(tmp_path):
        pass
    assert sorted(tree(tmp_path)) == [".hidden", ".y.0123.partial", "x.partial"]
    assert is_transient(LOCK)
    assert is_transient(".h.0.npy.0123456789abcdef.partial")
    assert not is_transient("h.0.npy.0123456789abcdef.partial")


@pytest.mark.parametrize("planted", ["link", "hard link", "dangling", "fifo", "folder"])
def test_nothing_is_written_through_what_stands_at_the_place_of_the_lock(
    planted: str, tmp_path: Path
) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "x"
    victim.write_text("years of work")
    folder.mkdir()
    {
        "link": lambda: (folder / LOCK).symlink_to(victim),
        "hard link": lambda: (folder / LOCK).hardlink_to(victim),
        "dangling": lambda: (folder / LOCK).symlink_to(tmp_path / "new"),
        "fifo": lambda: os.mkfifo(folder / LOCK),
        "folder": lambda: (folder / LOCK).mkdir(),
    }[planted]()
    with pytest.raises(InputError), Workplace(folder, "things", {}).working():
        pytest.fail("the body must not run")
    assert victim.read_text() == "years of work"
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for folder in (tmp_path / "loop", tmp_path / "loop" / "x"):
        with pytest.raises(InputError, match="cannot be written"), Workplace(folder, "things", {}).working():
            pytest.fail("the body must not run")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_used_without(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unable)
    write_text(tmp_path / "file", "text")
    assert tree(tmp_path) == {"file": b"text"}
