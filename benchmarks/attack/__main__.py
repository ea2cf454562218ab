"""Attack matlens: bad inputs in Python and at the command line, and mutations of its files."""

from __future__ import annotations

import random
import resource
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer
from attack.cases import VERDICTS, Case, Judgement, judge
from attack.signatures import working
from attack.targets import TARGETS, untried
from attack.world import World, make_world

_MEMORY = 6 * 2**30  # bytes that the attack may take, so that a bomb fails and the machine does not


def main(
    only: Annotated[str, typer.Option(help="Only cases whose names contain this.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    share: Annotated[float, typer.Option(help="Share of the cases that are tried.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Where the tables are written.")] = Path("out/attack"),
    show: Annotated[bool, typer.Option(help="Print every case that is not clear.")] = False,
) -> None:
    """Try bad inputs and mutated files, and print a table of the classes of faults."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    torch.set_num_threads(1)
    with make_world(seed=seed) as world:
        judgements = list(_judge(_cases(world, only, share, seed)))
    _report(judgements, out, show=show)


def _cases(world: World, only: str, share: float, seed: int) -> Iterator[Case]:
    chance = random.Random(seed)
    for name in untried():
        print(f"untried: {name}")
    for target in TARGETS:
        if only not in target.name:
            continue
        problem = working(target, world)
        if problem is not None:
            print(problem)
            continue
        for case in target.cases(world):
            if chance.random() < share:
                yield case


def _judge(cases: Iterable[Case]) -> Iterator[Judgement]:
    for case in cases:
        yield judge(case)


def _report(judgements: list[Judgement], out: Path, *, show: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    cases = pd.DataFrame(
        [(j.case.fault, j.case.name, j.verdict, j.words) for j in judgements],
        columns=["class", "case", "verdict", "words"],
    )
    cases.to_csv(out / "cases.csv", index=False)
    rows = []
    for fault, part in cases.groupby("class", sort=False):
        counts = Counter(part["verdict"])
        rows.append((fault, len(part), *(counts[verdict] for verdict in VERDICTS)))
    table = pd.DataFrame(rows, columns=["class", "cases", *VERDICTS])
    table.loc[len(table)] = ["all", *table.iloc[:, 1:].sum()]
    table.to_csv(out / "attack.csv", index=False)
    if show:
        for _, row in cases[cases["verdict"] != "clear"].iterrows():
            print(f"{row['verdict']:9} {row['case']}: {row['words']}")
    print(table.to_string(index=False))


if __name__ == "__main__":
    typer.run(main)
