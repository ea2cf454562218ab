"""Races and kills of commands on a small model.

Imports and the model are shared; each command is a forked process in its own folder, whose files are
compared with those of an undisturbed run. A race is identical if all processes succeed and no byte
differs, a killed job if its files after resuming are those of an undisturbed one.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import typer
from attack.world import World
from marked import table_lines, write_between
from matplotlib.figure import Figure
from tqdm import tqdm

import matlens
from matlens.ffn import Clusters, Trace

Files = dict[str, bytes]
_PATIENCE = 900.0  # seconds until a process counts as hanging
_IN_A_ROW = 4  # kills of one job before it runs to its end


class Command(NamedTuple):
    """A command, and the command to run before it in the same folder.

    A process that finds the work done by another exits with code 2 and a message with ``told``; by default
    it succeeds.
    """

    work: Callable[[], Any]
    after: str = ""
    told: str = ""


@dataclass
class Process:
    """A running command."""

    pid: int
    log: Path

    def wait(self) -> int:
        """Its exit code, or the negative signal number."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)


class Campaign:
    """A small model, a corpus, and the commands on them.

    Attributes
    ----------
    commands
        By name: ``collect, fit, evaluate, run, trace, cluster, lens fit, part, merge, values explore,
        prune`` and ``linearity``.
    """

    def __init__(self, root: Path, draws: bool) -> None:
        self._root, self._alone, world = root, dict[str, tuple[Files, float]](), World(root)
        model, examples, values = world.model, world["Examples"], world["ValueVectors"]
        for module in pkgutil.walk_packages(matlens.__path__, "matlens."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)  # once, before the forks
        patches: dict[str, Any] = {
            # Processes share the model, and are too short for the usual time between two checkpoints.
            "models.loading.load": lambda *_, **__: model,
            "linear.streaming._STATE_EVERY": 0.0,
            "linear.streaming._SHARE_OF_WRITING": 0.0,
            "linear.fitting.chunk_size": lambda _: 64,
            "explorer.usage._CHUNK": 16,
            # Only times differ between runs: here they are constant.
            "linearity.atlas.time": SimpleNamespace(process_time=float),
            "pruning.evaluation.time": SimpleNamespace(perf_counter=count().__next__),
        }
        for name, value in patches.items():
            patch(f"matlens.{name}", value).start()
        if not draws:
            patch.object(Figure, "savefig", _write_instead).start()
        data = ["--model", world.model_folder, "--corpus", world.text, "--device", "cpu", "--out", "out"]
        main = [*data, "--train", 40, "--val", 20, "--batch-tokens", 48]
        self.commands = {
            "collect": Command(_line("collect", *main)),
            "fit": Command(_line("fit", "out"), "collect"),
            "evaluate": Command(_line("evaluate", "out", "--device", "cpu"), "fit"),
            "run": Command(_line("run", *main)),
            "trace": Command(
                lambda: Trace.run(model, examples, k=4, folder="out", batch_tokens=48, progress=False)
            ),
            "cluster": Command(lambda: Clusters.fit(values, 9, folder="out", progress=False)),
            "lens fit": Command(
                _line("lens", "fit", *main, "--method", "mat", "--method", "affine", "--exclude-sinks")
            ),
            "part": Command(_line("part", "--part", "1/1", *main)),
            "merge": Command(_line("merge", "out", "--out", "merged"), "part"),
            "values explore": Command(_line("values", "explore", *data, "--neighbors", 2)),
            "prune": Command(
                _line("prune", *data, "--blocks", "1,", "--window", 16), told="new or empty folder"
            ),
            "linearity": Command(
                _line("linearity", *data, "--window", 12, "--windows", 30, "--eval-windows", 3)
            ),
        }

    def folder(self, name: str) -> Path:
        """A new folder with everything that a command needs."""
        folder = self._root / f"work-{random.SystemRandom().getrandbits(48):x}"
        folder.mkdir()
        after = self.commands[name].after
        if after:
            self.alone(after)
            shutil.copytree(self._root / f"alone-{after}" / "out", folder / "out")
        return folder

    def alone(self, name: str) -> tuple[Files, float]:
        """Files and seconds of an undisturbed command."""
        if name not in self._alone:
            folder = self.folder(name)
            begun = time.monotonic()
            process = self.start(name, folder)
            if process.wait():
                raise RuntimeError(f"{name} fails alone:\n{process.log.read_text()}")
            self._alone[name] = files(folder), time.monotonic() - begun
            folder.rename(self._root / f"alone-{name}")
        return self._alone[name]

    def found_it_done(self, name: str, process: Process, code: int) -> bool:
        """Whether a process ended because another did the work."""
        told = self.commands[name].told
        return code == 2 and told != "" and told in process.log.read_text()

    def start(self, name: str, folder: Path, delay: float = 0.0) -> Process:
        """Run a command in a forked process."""
        log = self._root / f"log-{random.SystemRandom().getrandbits(48):x}"
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return Process(pid, log)
        code = 70
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            os.chdir(folder)
            # The lock of progress bars is shared by forks: a killed process would block the others.
            tqdm.set_lock(threading.RLock())
            time.sleep(delay)
            self.commands[name].work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@contextmanager
def campaign(*, draws: bool = False) -> Iterator[Campaign]:
    """A campaign in a temporary folder.

    Figures take twenty times as long as the rest of a command, so unless ``draws``, they are replaced by
    files of one line.
    """
    torch.set_num_threads(1)  # threads do not survive a fork
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # figures bear no date
    with TemporaryDirectory(prefix="campaign-") as root:
        yield Campaign(Path(root), draws)


def _write_instead(figure: Figure, file: Any, *, format: str, **_: Any) -> None:
    file.write(f"figure of {len(figure.axes)} panels as {format}".encode())


def files(folder: Path) -> Files:
    """All files of a folder but locks, which a process killed after its work leaves behind."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def differing(these: Files, those: Files) -> list[str]:
    """Names of files that differ."""
    return sorted(name for name in {*these, *those} if these.get(name) != those.get(name))


def _line(*arguments: object) -> Callable[[], None]:
    def work() -> None:
        sys.argv = ["matlens", *map(str, arguments)]
        importlib.import_module("matlens.cli.app").main()

    return work


def race(setting: Campaign, name: str, n: int, draw: random.Random) -> str | None:
    """Run a command in several processes with random starts; returns the failure, if any."""
    expected, seconds = setting.alone(name)
    folder = setting.folder(name)
    racing = [setting.start(name, folder, draw.uniform(0, 0.8 * seconds) if i else 0.0) for i in range(n)]
    codes = [process.wait() for process in racing]
    for process, code in zip(racing, codes, strict=True):
        if code and not (0 in codes and setting.found_it_done(name, process, code)):
            return f"{name}, {n} processes: one ended with {code}:\n{process.log.read_text()[-3000:]}"
    wrong = differing(files(folder), expected)
    shutil.rmtree(folder)
    return f"{name}, {n} processes: {', '.join(wrong)} differ from those of a lone one" if wrong else None


def kill(
    setting: Campaign, name: str, draw: random.Random, in_a_row: int = _IN_A_ROW
) -> tuple[int, str | None]:
    """Kill and resume a command in one folder; returns the number of kills and the failure, if any."""
    expected, seconds = setting.alone(name)
    folder, kills = setting.folder(name), 0
    for attempt in range(in_a_row + 1):
        process = setting.start(name, folder)
        if attempt < in_a_row:
            time.sleep(draw.uniform(0, seconds))
            os.kill(process.pid, signal.SIGKILL)
        code = process.wait()
        if code == -signal.SIGKILL:
            kills += 1
        elif code and not setting.found_it_done(name, process, code):
            return kills, f"{name} ended with {code} after {kills} kills:\n{process.log.read_text()[-3000:]}"
    wrong = differing(files(folder), expected)
    shutil.rmtree(folder)
    return kills, f"{name}, {kills} kills: {', '.join(wrong)} differ" if wrong else None


def main(
    races: Annotated[int, typer.Option(min=0, help="Races of each command with two and with four.")] = 50,
    kills: Annotated[int, typer.Option(min=0, help="Kills of each command.")] = 17,
    command: Annotated[list[str] | None, typer.Option(help="Only these commands.")] = None,
    draws: Annotated[bool, typer.Option(help="Draw real figures (slow).")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the times of starts and kills.")] = 0,
    page: Annotated[
        Path | None, typer.Option(help="A page whose table, between two marks, is written.")
    ] = None,
) -> None:
    """Race and kill every command, and print a table."""
    draw, failures = random.Random(seed), list[str]()
    rows: list[tuple[Any, ...]] = []
    page = page and page.resolve()
    with campaign(draws=draws) as setting:
        for name in command or list(setting.commands):
            raced = [race(setting, name, n, draw) for n in (2, 4) for _ in range(races)]
            done, jobs = 0, list[str | None]()
            while done < kills:
                more, failure = kill(setting, name, draw)
                done, jobs = done + more, [*jobs, failure]
            failures += filter(None, [*raced, *jobs])
            rows.append((name, len(raced), raced.count(None), done, len(jobs), jobs.count(None)))
            print(*rows[-1], flush=True)
    if page is not None:
        head = ("command", "races", "identical races", "kills", "killed jobs", "identical jobs")
        total = [sum(counts) for counts in zip(*(row[1:] for row in rows), strict=True)]
        write_between(page, "campaign", "\n".join(table_lines([head, ("all", *total)])))
    for failure in failures[:5]:
        print(failure)
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
