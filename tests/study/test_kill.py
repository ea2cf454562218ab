"""Killed at any moment, a command resumes and gives the same bytes as one that was not interrupted.

Commands run in processes of their own. Because importing takes seconds, a server (this file, run as a
script) imports once and forks a process for every command.
"""

from __future__ import annotations

import importlib
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

WORDS = [f"w{i}" for i in range(50)]
N_TRAIN, N_VALIDATION, BATCH_TOKENS = 65, 65, 5
FOREVER = 600.0

# --- in the server and its children -----------------------------------------------------------------


def _serve() -> None:
    """Fork a process for each request on stdin; say its id, then how it ended."""
    # What every child needs.
    for module in (
        "matlens.cli.app",
        "matlens.study.steps",
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
        _slow_down(request["files"])
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


def _slow_down(files: int | None) -> None:
    """Take a moment over every file of tensors, and stop after so many until killed."""
    from matlens.io.artifact import Artifact

    write, written = Artifact.write, [0]

    def slow_write(self: Artifact, name: str, tensors: Any) -> None:
        write(self, name, tensors)
        written[0] += 1
        print("wrote a file", flush=True)
        time.sleep(0.002)
        if written[0] == files:
            time.sleep(FOREVER)

    Artifact.write = slow_write  # type: ignore[method-assign]


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
    def n_files(self) -> int:
        return self.log.read_text().count("wrote a file")


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
        files: int | None = None,
        die_before: tuple[str, str, int] | None = None,
    ) -> Running:
        request = {
            "cwd": str(cwd),
            "arguments": list(arguments),
            "log": str(self._log),
            "files": files,
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


@pytest.fixture(scope="module")
def whole(server: Server, collect: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not interrupted, with its maps."""
    cwd = tmp_path_factory.mktemp("whole")
    server.run(cwd, collect)
    server.run(cwd, ["fit", "out"])
    return cwd / "out"


def _files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _collected(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in _files(folder).items() if not name.startswith("maps/")}


def _wait(running: Running, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not happened():
        assert time.monotonic() < deadline, f"nothing happens any more: {running.log.read_text()}"
        time.sleep(0.005)


def test_ten_kills_change_no_byte(server: Server, collect: list[str], whole: Path, tmp_path: Path) -> None:
    generator = random.Random(20240)
    out = tmp_path / "out"
    n_files = len([name for name in _collected(whole) if name.endswith(".safetensors")])
    for number in range(10):
        n_new = generator.randint(1, 3)
        running = server.start(tmp_path, collect, files=n_new)
        if number % 3:  # when so many files are written; else at any moment, while the model loads too
            _wait(running, lambda: running.n_files >= n_new)  # noqa: B023
        time.sleep(generator.uniform(0, 0.05 if number % 3 else 1))
        assert running.kill() == -signal.SIGKILL
    stored = {path: path.stat().st_ino for path in out.rglob("*.safetensors")}
    assert 6 < len(stored) < n_files
    last = server.run(tmp_path, collect)
    assert _collected(out) == _collected(whole)
    assert {path: path.stat().st_ino for path in stored} == stored  # what was there was not run again
    assert last.n_files == n_files - len(stored)


def test_an_interrupt_says_how_to_resume(
    server: Server, collect: list[str], whole: Path, tmp_path: Path
) -> None:
    running = server.start(tmp_path, collect, files=5)
    _wait(running, lambda: running.n_files == 5)
    assert running.kill(signal.SIGINT) == 130
    assert "Run the same command again" in running.log.read_text()
    assert "Traceback" not in running.log.read_text()
    server.run(tmp_path, collect)
    assert _collected(tmp_path / "out") == _collected(whole)


@pytest.mark.parametrize("name", ["config.json", "h.0.safetensors", "h.1.safetensors"])
def test_a_killed_fit_resumes(server: Server, whole: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    for part in ("train", "validation"):
        (tmp_path / "out" / part).symlink_to(whole / part)
    running = server.start(tmp_path, ["fit", "out"], die_before=("os.rename", name, 1))
    assert running.wait() == -signal.SIGKILL, running.log.read_text()
    server.run(tmp_path, ["fit", "out"])
    assert _files(tmp_path / "out" / "maps") == _files(whole / "maps")


@pytest.mark.parametrize("name", ["results.csv", "results.json"])
def test_a_killed_evaluation_is_done_again(server: Server, whole: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    for part in ("train", "validation", "maps"):
        (tmp_path / "out" / part).symlink_to(whole / part)
    command = ["evaluate", "out", "--device", "cpu"]
    assert server.start(tmp_path, command, die_before=("os.rename", name, 1)).wait() == -signal.SIGKILL
    server.run(tmp_path, command)
    once = _files(tmp_path / "out")
    assert sorted(name for name in once if "/" not in name) == ["results.csv", "results.json", "run.json"]
    server.run(tmp_path, command)
    assert _files(tmp_path / "out") == once


if __name__ == "__main__":
    _serve()
