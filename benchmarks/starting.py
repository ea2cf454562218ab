"""Time to import the package, and to run short commands.

Each start is a separate process with its files in the system's cache. Targets: at most 0.3 s for ``import
matlens``, 0.6 s for ``matlens --help``, and 5 s for the second call of any short command, Python's own
start included. The first call of each fills a cache folder that is empty.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from ratios import Measured, Out, Rounds, fastest

from matlens.models import SMOLLM2

_STARTS = {"python": ["-c", "pass"], "import matlens": ["-c", "import matlens"]}
_STARTS["matlens --help"] = ["-m", "matlens", "--help"]
_TARGETS = {"import matlens": 0.3, "matlens --help": 0.6}
_SHORT = {
    "values show": ["values", "show", "L3D12", "--model", SMOLLM2],
    "values search": ["values", "search", "␣wine", "--model", SMOLLM2],
    "values promoting": ["values", "promoting", "␣wine", "--model", SMOLLM2],
    "plan": ["plan", "--model", SMOLLM2],
    "cache show": ["cache", "show"],
}
_MAX_SECONDS = 5.0  # seconds of a second call


def main(
    rounds: Rounds = 5,
    warm: Annotated[int, typer.Option(help="Turns of short commands, after the first call of each.")] = 2,
    out: Out = None,
) -> None:
    """Measure the seconds of a start."""
    run = partial(subprocess.run, check=True, capture_output=True)
    works = {name: partial(run, [sys.executable, *arguments]) for name, arguments in _STARTS.items()}
    measured = Measured("starting", out, model=SMOLLM2, rounds=rounds, warm=warm)
    for name, seconds in fastest(works, rounds, time.perf_counter).items():
        measured.add(name, seconds, unit="seconds", max=_TARGETS.get(name))
    for name, arguments in _SHORT.items():
        with TemporaryDirectory() as folder:
            environment = os.environ | {"MATLENS_CACHE": str(Path(folder) / "cache")}
            work = {name: partial(run, [sys.executable, "-m", "matlens", *arguments], env=environment)}
            first = fastest(work, 1, time.perf_counter)[name]
            measured.add(f"matlens {name}, first call", first, unit="seconds")
            later = fastest(work, warm, time.perf_counter)[name]
            measured.add(f"matlens {name}, second call", later, unit="seconds", max=_MAX_SECONDS)
    measured.write()


if __name__ == "__main__":
    typer.run(main)
