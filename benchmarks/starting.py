"""How long it takes until the package is imported, and until the command line has said what it can do.

Each start is a process of its own, as a user starts it, with the files in the system's cache. The aims:
at most 0.3 s for ``import matlens`` and at most 0.6 s for ``matlens --help``, Python's own start included.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from typing import Annotated

import typer
from turns import Measured, Out, fastest

_STARTS = {
    "python": "pass",
    "import matlens": "import matlens",
    "matlens --help": "import sys; sys.argv[1:] = ['--help']; from matlens.commands.app import main; main()",
}
_AIMS = {"import matlens": 0.3, "matlens --help": 0.6}


def main(
    rounds: Annotated[int, typer.Option(help="Turns; the fastest of each counts.")] = 5, out: Out = None
) -> None:
    """Measure the seconds of a start."""
    run = partial(subprocess.run, check=True, capture_output=True)
    works = {name: partial(run, [sys.executable, "-c", code]) for name, code in _STARTS.items()}
    measured = Measured("starting", out, rounds=rounds)
    for name, seconds in fastest(works, rounds, time.perf_counter).items():
        measured.add(name, seconds, unit="seconds", most=_AIMS.get(name))
    measured.write()


if __name__ == "__main__":
    typer.run(main)
