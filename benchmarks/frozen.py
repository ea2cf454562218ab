"""Check that a change lost no number: tables, README, speed and mutants against the stored ones.

Tables that take less than a CPU minute are remade by their `make` targets in a separate folder and
compared with ``results/``: the same columns and rows, counts and text exactly, floats to a relative 1e-5.
On another processor some cells near zero differ by more; ``--against FOLDER`` compares with the tables of
an earlier call on the same machine. The models that tables need (a small BERT, small GPT-2s, a small
WikiLM) are trained once and stored in ``--models``. README's code blocks are compared with their printed
output. With ``--speed`` the speed ratios are measured again and may be at most 15% worse; with
``--mutants FILE`` only the kill rate of a run of ``mutants.py --sample 4`` is compared with that of
``mutants_before.jsonl``, the run before tests were removed (seed 28). Exit status 1 if anything was lost.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "results"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
BEFORE = ROOT / "benchmarks" / "mutants_before.jsonl"
RELATIVE = 1e-5  # relative tolerance, in addition to the rounding of tables to six digits
SLOWER = 1.15  # a ratio may be worse by this factor: two runs on one machine differ by up to 10%
# Targets of the Makefile, each a table, and more tables that they make. Those without a model read SmolLM2.
TARGETS = (
    "paper_a_fig2_r2", "paper_a_table1_tokens", "sinks", "sample_sizes", "paper_b_sec4_search",
    "compatibility", "paper_a_fig2_r2_bert", "paper_a_table1_tokens_bert", "paper_a_fig9_early_exit_bert",
    "paper_a_sec5_corpora_bert", "paper_b_removal_bert", "paper_a_fig7_models_gpts",
    "paper_a_fig10_submodules_gpts", "paper_b_table9_saturation_wikilm",
)  # fmt: skip
MORE_TABLES = {
    "sinks": ("sinks_r2", "sinks_later"),
    "paper_b_sec4_search": ("paper_b_sec4_updates",),
    "paper_b_table9_saturation_wikilm": ("paper_b_table4_events_wikilm",),
}
MODELS = {"_bert": "small_bert", "_gpts": "small_gpts", "_wikilm": "small_wikilm"}
SPEED = ("collecting", "fitting", "projecting", "events", "skipping", "starting")


def main(
    only: Annotated[list[str] | None, typer.Option(help="A target, such as sinks; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="Where tables are remade; deleted first.")] = ROOT / "out/frozen",
    models: Annotated[Path, typer.Option(help="Trained models, kept between calls.")] = ROOT
    / "out/frozen-models",
    against: Annotated[
        Path, typer.Option(help="The tables to compare with, such as those of an earlier call.")
    ] = KEPT,
    readme: Annotated[bool, typer.Option(help="Run README's blocks.")] = True,
    speed: Annotated[bool, typer.Option(help="Measure the speed ratios again: 20 minutes.")] = False,
    mutants: Annotated[
        Path | None, typer.Option(help="results.jsonl of mutants.py, compared with the run before.")
    ] = None,
) -> None:
    """Compare current with stored results, and print a row for each table."""
    rows = []
    if not mutants:
        names = only or list(TARGETS)
        make_tables(names, out, models)
        tables = [table for name in names for table in (name, *MORE_TABLES.get(name, ()))]
        rows += [compare(table, out, against) for table in tables]
    if readme and not mutants and only is None:
        rows.append(run_readme())
    if speed:
        rows += compare_speed(out)
    if mutants:
        rows.append(compare_kill_rates(mutants))
    table = pd.DataFrame(rows, columns=["what", "compared", "changed", "largest difference"])
    print(table.to_string(index=False))
    raise typer.Exit(bool(table["changed"].any()))


Row = tuple[str, int, int, str]


def make_tables(names: list[str], out: Path, models: Path) -> None:
    """Make tables in an empty folder by the Makefile's targets, with the trained models."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    trained = [target for suffix, target in MODELS.items() if any(suffix in name for name in names)]
    call_make([f"{models}/{name}.csv" for name in trained], models)
    for path in models.iterdir() if models.is_dir() else ():
        if path.name.startswith("small"):  # not what was collected during training
            (out / path.name).symlink_to(path.resolve())
    # In order: the others reuse what the first collects.
    for name in names:
        call_make([f"{out}/{name}.csv"], out)


def call_make(targets: list[str], folder: Path) -> None:
    """Make targets in ``folder`` instead of ``out/results``."""
    if targets:
        variables = [f"RESULTS={folder}", f"BIN={Path(sys.executable).parent}"]
        command = ["make", "--silent", "--old-file=install", *targets, *variables]
        ended = subprocess.run(command, cwd=ROOT, env=ONE_THREAD, capture_output=True, text=True)
        print(*targets, "made" if ended.returncode == 0 else ended.stderr, file=sys.stderr)
        ended.check_returncode()


def compare(name: str, out: Path, against: Path) -> Row:
    """Compare one table: number of cells, of changed ones, and the largest relative difference."""
    sys.path.insert(0, str(KEPT))
    keep_table, tables = importlib.import_module("gather").keep_table, list[pd.DataFrame]()
    for source in (against, out):
        with tempfile.TemporaryDirectory() as folder:
            if source != KEPT:
                keep_table(source / f"{name}.csv", Path(folder))
            tables.append(pd.read_csv((source if source == KEPT else Path(folder)) / f"{name}.csv"))
    before, after = tables
    if list(before.columns) != list(after.columns) or len(before) != len(after):
        return name, before.size, before.size, f"{before.shape} became {after.shape}"
    return name, before.size, *differences(before, after)


def differences(before: pd.DataFrame, after: pd.DataFrame) -> tuple[int, str]:
    """Number of differing cells of two tables of one shape, and the largest relative difference."""
    changed, worst = 0, 0.0
    for column in before.columns:
        for old, new in zip(before[column], after[column], strict=True):
            if isinstance(old, float) and isinstance(new, float):
                apart = 0.0 if old == new or (math.isnan(old) and math.isnan(new)) else relative(old, new)
                changed, worst = changed + (apart > RELATIVE), max(worst, apart)
            elif old != new:
                changed, worst = changed + 1, math.inf
    return changed, f"{worst:.1e}"


def relative(old: float, new: float) -> float:
    """A relative difference beyond the rounding of both to six digits."""
    if math.isnan(old) or math.isnan(new):
        return math.inf
    size = max(abs(old), abs(new))
    step = 10.0 ** (math.floor(math.log10(size)) - 5)
    return max(abs(old - new) - step, 0.0) / size


def run_readme() -> Row:
    """Run README's Python blocks in order, and compare their output."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    names: dict[str, object] = {}
    checked, wrong = 0, list[str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for (language, code), (following, expected) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
            if language != "python":
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "README.md", "exec"), names)
            if following == "text":
                checked += 1
                if printed.getvalue().split() != expected.split():
                    wrong.append(printed.getvalue())
    return "README", checked, len(wrong), wrong[0] if wrong else ""


def compare_speed(out: Path) -> list[Row]:
    """Measure the ratios of the benchmarks again; count those worse by more than noise."""
    rows = []
    for name in SPEED:
        command = [sys.executable, f"benchmarks/{name}.py", "--out", str(out)]
        subprocess.run(command, cwd=ROOT, env=ONE_THREAD, check=True)
        tables = [pd.read_csv(folder / f"speed_{name}.csv") for folder in (KEPT, out)]
        before, after = (table[table["goal"].notna()].set_index("method") for table in tables)
        both = before.join(after["value"].rename("now"), how="left")
        worse = list[float]()
        for row in both.to_dict("records"):
            kept, now = float(row["value"]), float(row["now"])
            worse.append(now / kept if str(row["goal"]).startswith("at most") else kept / now)
        lost = sum(not factor <= SLOWER for factor in worse)  # a missing ratio is lost too
        rows.append((f"speed of {name}", len(worse), lost, f"{max(worse, default=1.0):.2f} times as slow"))
    return rows


def compare_kill_rates(after: Path) -> Row:
    """Compare the share of killed mutants with the one before."""
    counts = []
    for path in (BEFORE, after):
        rows = [json.loads(line) for line in path.open()]
        last = {(row["module"], row["key"]): row["outcome"] for row in rows if row["key"] != "as it is"}
        counts.append(Counter(last.values()))
    rates = [1 - count["lives"] / count.total() for count in counts]
    lost = int(rates[1] < rates[0])
    return "kill rate of mutants", counts[1].total(), lost, f"{rates[0]:.1%} to {rates[1]:.1%}"


if __name__ == "__main__":
    typer.run(main)
