"""Attack matlens: bad arguments of every public function, by its signature and by what a model has.

    PYTHONPATH=benchmarks python -m attack --show

prints a table of the classes of faults: how many cases were tried of each, and how many ended clearly (in an
`InputError` that says what was wrong; or in the right result, where the library may take what it is given).
The other columns are faults: messages that are late or too short; other numbers without a message; a
traceback; no end.
"""

from __future__ import annotations

import contextlib
import resource
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer
from marked import table_lines, write_between

from attack.annotations import signature_cases
from attack.arguments import argument_cases
from attack.cases import CLEAR, VERDICTS, Judgement, judge
from attack.world import make_world
from matlens.errors import printable

_MEMORY = 6 * 2**30  # bytes that the attack may take, so that a bomb fails and the machine does not


def main(
    only: Annotated[str, typer.Option(help="Only cases whose classes or names contain this.")] = "",
    drawn: Annotated[int, typer.Option(min=1, help="Eighths of the values drawn for each annotation.")] = 3,
    out: Annotated[Path, typer.Option(help="Where the tables are written.")] = Path("out/attack"),
    page: Annotated[
        Path | None, typer.Option(help="A page whose table, between two marks, is written anew.")
    ] = None,
    show: Annotated[bool, typer.Option(help="Print every case that is not clear.")] = False,
) -> None:
    """Try bad arguments, and print a table of the classes of faults."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    torch.set_num_threads(1)
    out, page = out.resolve(), page and page.resolve()
    with make_world() as world, contextlib.chdir(world.fresh("here").parent):
        cases = chain(signature_cases(drawn), argument_cases(world))
        judgements = [judge(case) for case in cases if only in f"{case.fault}: {case.name}"]
    table = _report(judgements, out, show=show)
    if page is not None:
        counts = table[["class", "cases", CLEAR]].itertuples(index=False)
        rows = [(str(name), int(n), int(clear)) for name, n, clear in counts]
        write_between(page, "attack", "\n".join(table_lines([("class", "cases", "clear"), *rows])))
    if any(judgement.verdict != CLEAR for judgement in judgements):
        raise typer.Exit(1)


def _report(judgements: list[Judgement], out: Path, *, show: bool) -> pd.DataFrame:
    """Write and print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    # Halves of surrogate pairs, which Hypothesis draws, fit neither pandas nor a file.
    lines = [(c.case.fault, printable(c.case.name), c.verdict, printable(c.words)) for c in judgements]
    cases = pd.DataFrame(lines, columns=["class", "case", "verdict", "words"])
    cases.to_csv(out / "cases.csv", index=False)
    summary = []
    for fault, part in cases.groupby("class", sort=False):
        counts = Counter(part["verdict"])
        summary.append((fault, len(part), *(counts[verdict] for verdict in VERDICTS)))
    table = pd.DataFrame(summary, columns=["class", "cases", *VERDICTS])
    table.loc[len(table)] = ["all", *table.iloc[:, 1:].sum()]
    table.to_csv(out / "attack.csv", index=False)
    if show:
        for _, row in cases[cases["verdict"] != CLEAR].iterrows():
            print(f"{row['verdict']:9} {row['case'][:200]}: {row['words']}")
    print(table.to_string(index=False))
    return table


if __name__ == "__main__":
    typer.run(main)
