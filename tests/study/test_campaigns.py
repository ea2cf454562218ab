"""A short round of the campaigns of `benchmarks/`: commands that race in one folder, or are killed there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matlens

BENCHMARKS = Path(matlens.__file__).parents[1] / "benchmarks"
CODE = """
import random
from campaign import campaign, kill, race

draw = random.Random(5)
with campaign() as setting:
    for name, n in (("collect", 2), ("fit", 3), ("evaluate", 2), ("prune", 2)):
        print(name, race(setting, name, n, draw), *kill(setting, name, draw, 2))
"""


def test_commands_that_race_or_are_killed_leave_the_bytes_of_a_lone_one():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stderr
    rounds = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert [name for name, *_ in rounds] == ["collect", "fit", "evaluate", "prune"]
    assert [(raced, killed) for _, raced, _, killed in rounds] == [("None", "None")] * 4, done.stdout
    assert sum(int(kills) for _, _, kills, _ in rounds) > 0
