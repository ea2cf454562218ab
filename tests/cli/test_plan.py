"""What a job takes is printed without loading weights."""

from __future__ import annotations

import pytest
from command_lines import cells, run_command

from matlens.study.plan import Shape, format_bytes, plan_study


@pytest.mark.parametrize(("disk", "fits"), [(10**12, "yes"), (10**9, "no")])
def test_what_is_printed_is_the_plan(disk, fits, capsys, monkeypatch):
    monkeypatch.setattr("matlens.study.plan.free_memory", lambda: 10**12)
    monkeypatch.setattr("matlens.study.plan.free_disk", lambda _: disk)
    arguments = [
        "--layers", 32, "--width", 4096, "--mlp", 14336, "--vocab", 128256, "--sentences", 10000,
        "--positions", "all", "--pairs", "last", "--keep-rows",
    ]  # fmt: skip
    printed = run_command(["plan", *arguments], capsys, width=200).out
    shape = Shape(n_layers=32, d_model=4096, d_mlp=14336, d_vocab=128256)
    plan = plan_study(shape, 10_000, 1000, positions="all", pairs="last", keep_rows=True)
    assert [row[:3] for row in cells(printed)] == [
        [step, format_bytes(need.memory), format_bytes(need.disk) if need.disk else "–"]
        for step, need in plan.needs.items()
    ]
    assert [row[4] for row in cells(printed)][:2] == ["yes", fits]  # the model, and collecting
    memory, written = plan.job
    (line,) = (line for line in printed.splitlines() if line.startswith("--pairs last: "))
    for part in (f"statistics of {format_bytes(plan.statistics)}", f"{format_bytes(memory)} of memory"):
        assert part in line
    assert f"{format_bytes(written)} of disk. Fits: {fits}." in line
