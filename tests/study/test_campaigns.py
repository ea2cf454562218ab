"""A short round of the campaigns of `benchmarks/`: commands that race in one folder, or are killed there."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import matlens

BENCHMARKS = Path(matlens.__file__).parents[1] / "benchmarks"
CODE = """
import random
from campaign import campaign, kill, race

draw = random.Random(5)
with campaign() as setting:
    for name, n in (("collect", 2), ("fit", 4), ("evaluate", 2), ("cluster", 3), ("prune", 2)):
        print(name, race(setting, name, n, draw), *kill(setting, name, draw, 2))
"""


def test_commands_that_race_or_are_killed_leave_the_bytes_of_a_lone_one() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rounds = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert [name for name, *_ in rounds] == ["collect", "fit", "evaluate", "cluster", "prune"]
    assert [(raced, killed) for _, raced, _, killed in rounds] == [("None", "None")] * 5, done.stdout
    assert sum(int(kills) for _, _, kills, _ in rounds) > 2


def test_what_benchmarks_measure_is_a_table_with_its_aims_and_the_profile_of_what_misses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    turns = importlib.import_module("turns")
    ran = Counter[str]()

    def work(name: str, seconds: float) -> None:
        ran[name] += 1
        clock[0] += seconds

    clock = [0.0]
    works = {"slow": partial(work, "slow", 3.0), "quick": partial(work, "quick", 2.0)}
    best = turns.fastest(works, 4, lambda: clock[0])
    assert ran == {"slow": 4, "quick": 4}
    assert best == pytest.approx({"slow": 3.0, "quick": 2.0})
    measured = turns.Measured("some", tmp_path, model="m", size=5)
    measured.add_times(best)
    measured.add("slow / quick", 1.5, most=1.2, profiled=works["slow"])
    measured.add("quick / slow", 2 / 3, most=1.0, profiled=works["quick"])
    measured.add("size / size", 1.0, least=0.9, most=1.1)
    measured.add("size / floor", 1.0, least=2)
    measured.write()
    assert ran == {"slow": 5, "quick": 4}, "what misses its aim alone is profiled"
    table = pd.read_csv(tmp_path / "speed_some.csv", dtype={"reached": str}).set_index("method")
    assert table["value"].tolist() == pytest.approx([3.0, 2.0, 1.5, 2 / 3, 1.0, 1.0])
    assert table["aim"].tolist()[2:] == [
        "at most 1.2",
        "at most 1",
        "at least 0.9 and at most 1.1",
        "at least 2",
    ]
    assert table["reached"].tolist()[2:] == ["False", "True", "True", "False"]
    assert (
        table["aim"].tolist()[:2] == table["reached"].tolist()[:2] == [pytest.approx(np.nan, nan_ok=True)] * 2
    )
    made = json.loads((tmp_path / "speed_some.json").read_text())
    assert made["job"] == {"size": 5}
    assert list(made["profiles"]) == ["slow / quick"]
    assert any("work" in place for place, *_ in made["profiles"]["slow / quick"])
