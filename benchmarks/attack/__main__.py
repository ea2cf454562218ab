"""Attack matlens: bad inputs in Python and at the command line, damaged files, and states out of order.

    PYTHONPATH=benchmarks python -m attack --show

prints a table of the classes of faults: how many cases were tried of each, and how many ended clearly (in an
`InputError` that says what was wrong, at the command line with exit code 2; or in the right result, where the
library may take what it is given). The other columns are faults: words that are late, too long or too short;
other numbers without a word; a traceback; no end.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer
from marked import table_lines, write_between

from attack.cases import VERDICTS, Case, Judgement, judge
from attack.commands import command_cases, untried_commands
from attack.engines import engine_cases
from attack.foreign import foreign_cases
from attack.mutations import mutation_cases
from attack.signatures import working
from attack.states import state_cases
from attack.targets import TARGETS, untried
from attack.world import World, make_world

_MARK = "attack"
_MEMORY = 6 * 2**30  # bytes that the attack may take, so that a bomb fails and the machine does not


def main(
    only: Annotated[
        str, typer.Option(help="Only cases whose names contain this, or one of several with | between.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")] = 0,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the bad inputs that are tried.")] = 1.0,
    mutations: Annotated[int, typer.Option(min=0, help="Mutations of files that are tried.")] = 1200,
    out: Annotated[Path, typer.Option(help="Where the tables are written.")] = Path("out/attack"),
    page: Annotated[
        Path | None, typer.Option(help="A page whose table, between two marks, is written anew.")
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(help="Where the tables of another run are, whose other cases count too."),
    ] = None,
    show: Annotated[bool, typer.Option(help="Print every case that is not clear.")] = False,
) -> None:
    """Try bad inputs and mutated files, and print a table of the classes of faults."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    torch.set_num_threads(1)
    out, page, beside = out.resolve(), page and page.resolve(), beside and beside.resolve()
    with make_world(seed=seed) as world, contextlib.chdir(world.fresh("here").parent):
        judgements: list[Judgement] = []
        signal.signal(signal.SIGTERM, _end)
        with contextlib.suppress(_Ended):  # what is known by then is reported
            every = chain(_cases(world, only, share, seed), mutation_cases(world, mutations, seed, only))
            judgements.extend(map(judge, every))
    others = None if beside is None else pd.read_csv(beside / "cases.csv")
    if others is not None:  # what was tried again counts once
        others = others[[not _is_wanted(case, only) for case in others["case"]]]
    clear = _report(judgements, out, others, show=show)
    if page is not None:
        write_table(page, pd.read_csv(out / "attack.csv"))
    if not clear:
        raise typer.Exit(1)


class _Ended(BaseException):
    """The attack is to end."""


def _end(*_: object) -> None:
    raise _Ended


def _cases(world: World, only: str, share: float, seed: int) -> Iterator[Case]:
    chance = random.Random(seed)
    for name in (*untried(), *untried_commands()):
        print(f"untried: {name}")
    for case in (
        *_bad_arguments(world, only),
        *state_cases(world),
        *foreign_cases(world),
        *engine_cases(world),
        *command_cases(world),
    ):
        if _is_wanted(case.name, only) and chance.random() < share:
            yield case


def _bad_arguments(world: World, only: str) -> Iterator[Case]:
    for target in TARGETS:
        if any(
            part.partition("(")[0] in target.name or part in f"{target.name}(" for part in only.split("|")
        ):
            problem = working(target, world)
            if problem is None:
                yield from target.cases(world)
            else:
                print(problem)


def _is_wanted(name: str, only: str) -> bool:
    return any(part in name for part in only.split("|"))


def _report(judgements: list[Judgement], out: Path, others: pd.DataFrame | None, *, show: bool) -> bool:
    """Write and print the tables; says whether all cases are clear."""
    out.mkdir(parents=True, exist_ok=True)
    cases = pd.DataFrame(
        [(j.case.fault, j.case.name, j.verdict, j.words) for j in judgements],
        columns=["class", "case", "verdict", "words"],
    )
    if others is not None:
        cases = pd.concat([others, cases], ignore_index=True)
    cases.to_csv(out / "cases.csv", index=False)
    rows = []
    for fault, part in cases.groupby("class", sort=False):
        counts = Counter(part["verdict"])
        rows.append((fault, len(part), *(counts[verdict] for verdict in VERDICTS)))
    table = pd.DataFrame(rows, columns=["class", "cases", *VERDICTS])
    table.loc[len(table)] = ["all", *table.iloc[:, 1:].sum()]
    table.to_csv(out / "attack.csv", index=False)
    faults = cases[cases["verdict"] != "clear"]
    if show:
        for _, row in faults.iterrows():
            print(f"{row['verdict']:9} {row['case'][:200]}: {row['words']}")
    print(table.to_string(index=False))
    return faults.empty


def write_table(page: Path, table: pd.DataFrame) -> None:
    """Write the table between the two marks of a page."""
    rows = [(str(name), *map(int, counts)) for name, *counts in table.itertuples(index=False)]
    write_between(page, _MARK, "\n".join(table_lines([list(table.columns), *rows])))


if __name__ == "__main__":
    typer.run(main)
