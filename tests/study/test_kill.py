"""Killed at any moment, a command goes on where it was and gives the same bytes as an unbroken one.

Commands run in processes of their own. Because importing takes seconds, a server (this file, run as a
script) imports once and forks a process for every command.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from breaking import batches_noted

import matlens

WORDS = [f"w{i}" for i in range(50)]
N_TRAIN, N_VALIDATION, BATCH_TOKENS = 65, 65, 5
N_KILLS = 10
FOREVER = 600.0
NOTED_EVERY = 3  # batches

# --- in the server and its children -----------------------------------------------------------------


def _serve() -> None:
    """Fork a process for each request on stdin; say its id, then how it ended."""
    # What every child needs.
    for module in (
        "matlens.cli.app",
        "matlens.study.results",
        "transformer_lens.model_bridge",
        "transformers",
    ):
        importlib.import_module(module)

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(request)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _child(request: dict[str, Any]) -> None:
    """Run one command; `os._exit` whatever happens, so that the server's loop is never entered."""
    code = 70
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(request["cwd"])
        # A shell that starts tests in the background has them, and so this, ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["matlens", *request["arguments"]]
        import torch
        from tqdm import tqdm

        torch.set_num_threads(1)  # threads do not survive a fork
        tqdm.set_lock(threading.RLock())  # the lock of all bars is shared: a kill would hold up the others
        _slow_down(request["batches"])
        if request["die_before"]:
            _die_before(*request["die_before"])
        from matlens.cli import app

        try:
            app.main()
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _slow_down(batches: int | None) -> None:
    """Take a moment over every batch, note progress every third, and stop after so many until killed."""
    from matlens.io import rows

    write = rows.RowFiles.write
    written = 0

    def slow_write(self: rows.RowFiles, index: Any, vectors: Any) -> None:
        nonlocal written
        rows._NOTED_EVERY = -1.0 if (written + 1) % NOTED_EVERY == 0 else FOREVER
        write(self, index, vectors)
        written += 1
        print("wrote a batch", flush=True)
        time.sleep(0.002)
        if written == batches:
            time.sleep(FOREVER)

    rows.RowFiles.write = slow_write  # type: ignore[method-assign]


def _die_before(event: str, name: str, occurrence: int) -> None:
    """Be killed just before the file system does something to a path of this name."""
    seen = 0

    def hook(heard: str, details: tuple[Any, ...]) -> None:
        nonlocal seen
        if heard == event:
            path = details[1] if event == "os.rename" else details[0]
            seen += isinstance(path, str | os.PathLike) and Path(path).name == name
            if seen == occurrence:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


# --- in the tests -----------------------------------------------------------------------------------


@dataclass
class Running:
    """A command under way."""

    pid: int
    log: Path
    read_status: Callable[[], str]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, or the negative number of the signal that ended it."""
        return int(self.read_status())

    @property
    def n_batches(self) -> int:
        return self.log.read_text().count("wrote a batch")


class Server:
    """Starts commands, one at a time."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])},
        )

    def start(
        self,
        cwd: Path,
        arguments: Sequence[str],
        *,
        batches: int | None = None,
        die_before: tuple[str, str, int] | None = None,
    ) -> Running:
        request = {
            "cwd": str(cwd),
            "arguments": list(arguments),
            "log": str(self._log),
            "batches": batches,
            "die_before": die_before,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._log.write_text("")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Running(int(self._process.stdout.readline()), self._log, self._process.stdout.readline)

    def run(self, cwd: Path, arguments: Sequence[str], **how: Any) -> Running:
        """Run a command to its good end."""
        running = self.start(cwd, arguments, **how)
        assert running.wait() == 0, running.log.read_text()
        return running

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The whole group: a test that failed may have left a command waiting to be killed.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server") / "log.txt") as server:
        yield server


@pytest.fixture(scope="module")
def collect(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that is killed; its output folder is relative, so that its words are the same each time."""
    generator = random.Random(0)
    corpus = tmp_path_factory.mktemp("corpus") / "words.txt"
    lines = [" ".join(generator.choices(WORDS, k=5 + i % 16)) for i in range(N_TRAIN + N_VALIDATION)]
    corpus.write_text("\n".join(lines))
    options = f"--train {N_TRAIN} --val {N_VALIDATION} --batch-tokens {BATCH_TOKENS} --device cpu --out out"
    return ["collect", "--model", str(model_folder("gpt2")), "--corpus", str(corpus), *options.split()]


@dataclass
class Unbroken:
    """What an unbroken collection and fit have written, and in how many batches."""

    folder: Path
    files: dict[str, bytes]
    n_train: int
    n_batches: int

    @property
    def collected(self) -> dict[str, bytes]:
        return {name: data for name, data in self.files.items() if not name.startswith("maps/")}

    @property
    def maps(self) -> dict[str, bytes]:
        return {name[5:]: data for name, data in self.files.items() if name.startswith("maps/")}


@pytest.fixture(scope="module")
def unbroken(server: Server, collect: list[str], tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    cwd = tmp_path_factory.mktemp("unbroken")
    n_batches = server.run(cwd, collect).n_batches
    server.run(cwd, ["fit", "out"])
    parts = (
        matlens.activations.Activations.load(cwd / "out" / part).examples for part in ("train", "validation")
    )
    n_train, n_validation = (len(list(part.up_to_positions().batches(BATCH_TOKENS))) for part in parts)
    assert n_train + n_validation == n_batches
    return Unbroken(cwd / "out", _files(cwd / "out"), n_train, n_batches)


def _files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _noted(out: Path, unbroken: Unbroken) -> int:
    """How many batches a command that goes on can leave out."""
    if not (out / "train" / "config.json").is_file():
        return batches_noted(out / "train")
    return unbroken.n_train + batches_noted(out / "validation")


def _wait(running: Running, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not happened():
        assert time.monotonic() < deadline, f"nothing happens any more: {running.log.read_text()}"
        time.sleep(0.005)


def test_ten_kills_change_no_byte(
    server: Server, collect: list[str], unbroken: Unbroken, tmp_path: Path
) -> None:
    generator = random.Random(20240)
    out = tmp_path / "out"
    waits = [3, 3, 3, 6, 6, 6, 6, 9, 9, 9]
    more = NOTED_EVERY - 1  # batches that a command may write after the noted one, until it is killed
    assert len(waits) == N_KILLS
    assert unbroken.n_train < sum(waits)  # some kills fall into the second part,
    assert sum(waits) + more < unbroken.n_batches  # and the collection cannot end before the last
    generator.shuffle(waits)
    # None while the first part is being finished: those moments have a test of their own.
    assert not any(0 <= unbroken.n_train - noted <= more for noted in itertools.accumulate(waits))
    parts_hit = []
    for n_more in waits:
        before = _noted(out, unbroken)
        running = server.start(tmp_path, collect, batches=n_more + more)
        _wait(running, lambda: _noted(out, unbroken) >= before + n_more)  # noqa: B023
        time.sleep(generator.uniform(0, 0.05))
        assert running.kill() == -signal.SIGKILL
        part = "validation" if (out / "train" / "config.json").is_file() else "train"
        assert not (out / "validation" / "config.json").exists()
        if (out / part / "progress.jsonl").is_file():
            parts_hit.append(part)
    assert len(parts_hit) >= N_KILLS - 2  # in the middle of a part, with progress noted
    assert set(parts_hit) == {"train", "validation"}
    # And at moments that nothing was waited for: while the model loads, before the first batch, ...
    for _ in range(3):
        running = server.start(tmp_path, collect, batches=1)
        time.sleep(generator.uniform(0, 1))
        assert running.kill() == -signal.SIGKILL

    noted = _noted(out, unbroken)
    last = server.run(tmp_path, collect)
    assert _files(out) == unbroken.collected
    assert last.n_batches == unbroken.n_batches - noted  # what had been noted was not run again


def test_interrupting_notes_every_batch_and_says_so(
    server: Server, collect: list[str], unbroken: Unbroken, tmp_path: Path
) -> None:
    running = server.start(tmp_path, collect, batches=5)
    _wait(running, lambda: running.n_batches == 5)
    assert running.kill(signal.SIGINT) == 130
    assert "Run the same command again" in running.log.read_text()
    assert "Traceback" not in running.log.read_text()
    assert _noted(tmp_path / "out", unbroken) == 5
    assert server.run(tmp_path, collect).n_batches == unbroken.n_batches - 5
    assert _files(tmp_path / "out") == unbroken.collected


@pytest.mark.parametrize(
    "moment",
    [
        ("os.rename", "unfinished.json", 1),
        ("open", "progress.jsonl", 1),  # to read it, and then to write into it
        ("open", "progress.jsonl", 2),
        ("open", "progress.jsonl", 3),
        ("os.rename", "config.json", 1),
        ("os.remove", "progress.jsonl", 1),
        ("os.remove", "unfinished.json", 1),
        ("os.remove", ".lock", 1),
        ("os.mkdir", "validation", 1),
        ("os.rename", "unfinished.json", 2),
        ("os.rename", "config.json", 2),
        ("os.remove", "unfinished.json", 2),
    ],
    ids=lambda moment: "-".join(map(str, moment)),
)
def test_a_collection_killed_at_an_awkward_moment_goes_on(
    server: Server, collect: list[str], unbroken: Unbroken, tmp_path: Path, moment: tuple[str, str, int]
) -> None:
    running = server.start(tmp_path, collect, die_before=moment)
    assert running.wait() == -signal.SIGKILL, running.log.read_text()
    server.run(tmp_path, collect)
    assert _files(tmp_path / "out") == unbroken.collected


@pytest.mark.parametrize(
    ("moment", "kept"),
    [
        (("os.rename", "unfinished.json", 1), 0),
        (("os.rename", "h.0.safetensors", 1), 0),
        (("os.rename", "h.1.safetensors", 1), 1),
        (("os.rename", "h.2.safetensors", 1), 2),
        (("open", "progress.jsonl", 4), 2),  # the third file is there, but not noted
        (("os.rename", "config.json", 1), 3),
        (("os.remove", "unfinished.json", 1), 3),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_a_killed_fit_goes_on_where_it_was(
    server: Server, unbroken: Unbroken, tmp_path: Path, moment: tuple[str, str, int], kept: int
) -> None:
    (tmp_path / "out").mkdir()
    for part in ("train", "validation"):
        (tmp_path / "out" / part).symlink_to(unbroken.folder / part)
    running = server.start(tmp_path, ["fit", "out"], die_before=moment)
    assert running.wait() == -signal.SIGKILL, running.log.read_text()
    maps = tmp_path / "out" / "maps"
    there = {path: path.stat().st_ino for path in sorted(maps.glob("*.safetensors"))[:kept]}
    assert len(there) == kept
    server.run(tmp_path, ["fit", "out"])
    assert {path: path.stat().st_ino for path in there} == there  # not written again
    assert _files(maps) == unbroken.maps


@pytest.mark.parametrize("name", ["results.csv", "results.json"])
def test_a_killed_evaluation_is_done_again(
    server: Server, unbroken: Unbroken, tmp_path: Path, name: str
) -> None:
    (tmp_path / "out").mkdir()
    for part in ("train", "validation", "maps"):
        (tmp_path / "out" / part).symlink_to(unbroken.folder / part)
    command = ["evaluate", "out", "--device", "cpu"]
    assert server.start(tmp_path, command, die_before=("os.rename", name, 1)).wait() == -signal.SIGKILL
    server.run(tmp_path, command)
    once = _files(tmp_path / "out")
    assert sorted(name for name in once if "/" not in name) == ["results.csv", "results.json", "run.json"]
    server.run(tmp_path, command)
    assert _files(tmp_path / "out") == once


if __name__ == "__main__":
    _serve()
