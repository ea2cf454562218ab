"""Two and four processes run the same command in one folder: no work may be lost, no byte may differ."""

from __future__ import annotations

import random
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from campaign import Campaign, campaign, differing, files
from marked import table_lines, write_between
from tallies import Tally


def race(setting: Campaign, name: str, n: int, draw: random.Random) -> str | None:
    """Let so many processes run a command, each begun at a random moment of the first; what went wrong."""
    expected, seconds = setting.alone(name)
    folder = setting.folder(name)
    racing = [setting.start(name, folder, draw.uniform(0, 0.8 * seconds) if i else 0.0) for i in range(n)]
    codes = [process.wait() for process in racing]
    told = setting.commands[name].told
    for process, code in zip(racing, codes, strict=True):
        if code and not (code == 2 and told and told in process.log.read_text() and 0 in codes):
            return f"{name}, {n} processes: one ended with {code}:\n{process.log.read_text()[-3000:]}"
    wrong = differing(files(folder), expected)
    for process in racing:
        process.log.unlink()
    shutil.rmtree(folder)
    return f"{name}, {n} processes: {', '.join(wrong)} differ from those of a lone one" if wrong else None


def main(
    repeats: Annotated[int, typer.Option(min=0, help="Races of each command and number of processes.")] = 50,
    command: Annotated[list[str] | None, typer.Option(help="Only these commands.")] = None,
    processes: Annotated[list[int] | None, typer.Option(min=2, help="How many at once.")] = None,
    draws: Annotated[bool, typer.Option(help="Draw real figures, which takes far longer.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the moments at which processes begin.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the table is kept, of all runs.")] = Path("out/racing"),
    page: Annotated[
        Path | None, typer.Option(help="A page whose table, between two marks, is written anew.")
    ] = None,
) -> None:
    """Race every command, 50 times with two processes and 50 times with four, and print a table.

    The table in ``--out`` adds up runs of other commands and other seeds; ``--repeats 0`` runs nothing.
    """
    draw, failures = random.Random(seed), []
    out, page = out.resolve(), page and page.resolve()
    tally = Tally(out / "racing.csv", ("command", "processes", "seed"))
    print(f"{'command':14} {'processes':>9} {'races':>6} {'identical':>9} {'seconds':>8}")
    with campaign(draws=draws) if repeats else nullcontext() as setting:
        for name in (command or list(setting.commands)) if setting else ():
            assert setting is not None
            for n in processes or (2, 4):
                begun = time.monotonic()
                wrong = [failure for _ in range(repeats) if (failure := race(setting, name, n, draw))]
                seconds, identical = time.monotonic() - begun, repeats - len(wrong)
                print(f"{name:14} {n:9} {repeats:6} {identical:9} {seconds:8.1f}", flush=True)
                tally.put(
                    command=name, processes=n, seed=seed, races=repeats, identical=identical,
                    seconds=round(seconds, 1),
                )  # fmt: skip
                failures += wrong
    if page is not None:
        rows = tally.summed(["command", "processes"], ["races", "identical"])
        write_between(page, "races", "\n".join(table_lines(rows)))
    for failure in failures[:5]:
        print(failure)
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
