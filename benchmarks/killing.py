"""Commands are killed at random moments, again and again, and gone on with: the bytes must be the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from campaign import Campaign, Process, campaign, differing, files
from marked import table_lines, write_between
from tallies import Tally

_IN_A_ROW = 4  # kills of one job, before it is let run to its end


def kill(
    setting: Campaign, name: str, draw: random.Random, in_a_row: int = _IN_A_ROW
) -> tuple[int, str | None]:
    """Kill a command some times in one folder and let it end; how many kills, and what went wrong."""
    expected, seconds = setting.alone(name)
    folder, kills = setting.folder(name), 0
    for _ in range(in_a_row):
        process = setting.start(name, folder)
        time.sleep(draw.uniform(0, seconds))
        os.kill(process.pid, signal.SIGKILL)
        code = process.wait()
        if code == -signal.SIGKILL:
            kills += 1
        elif code and not _is_told(setting, name, process, code):
            return kills, f"{name} ended with {code} after a kill:\n{process.log.read_text()[-3000:]}"
    process = setting.start(name, folder)
    if (code := process.wait()) and not _is_told(setting, name, process, code):
        return kills, f"{name} ended with {code} after {kills} kills:\n{process.log.read_text()[-3000:]}"
    wrong = differing(files(folder), expected)
    shutil.rmtree(folder)
    return kills, f"{name}, {kills} kills: {', '.join(wrong)} differ" if wrong else None


def _is_told(setting: Campaign, name: str, process: Process, code: int) -> bool:
    """Whether a command ends because it was done before."""
    told = setting.commands[name].told
    return code == 2 and told != "" and told in process.log.read_text()


def main(
    kills: Annotated[int, typer.Option(min=0, help="Kills in all, shared by the commands.")] = 200,
    command: Annotated[list[str] | None, typer.Option(help="Only these commands.")] = None,
    draws: Annotated[bool, typer.Option(help="Draw real figures, which takes far longer.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the moments of the kills.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the table is kept, of all runs.")] = Path("out/killing"),
    page: Annotated[
        Path | None, typer.Option(help="A page whose table, between two marks, is written anew.")
    ] = None,
) -> None:
    """Kill every command, 200 times in all, and print a table.

    The table in ``--out`` adds up runs of other commands and other seeds; ``--kills 0`` runs nothing.
    """
    draw, failures = random.Random(seed), []
    out, page = out.resolve(), page and page.resolve()
    tally = Tally(out / "killing.csv", ("command", "seed"))
    print(f"{'command':14} {'kills':>6} {'jobs':>6} {'identical':>9} {'seconds':>8}")
    with campaign(draws=draws) if kills else nullcontext() as setting:
        names = (command or list(setting.commands)) if setting else []
        for name in names:
            assert setting is not None
            done = jobs = wrong = 0
            begun = time.monotonic()
            while done < -(-kills // len(names)):
                more, failure = kill(setting, name, draw)
                done, jobs, wrong = done + more, jobs + 1, wrong + bool(failure)
                failures += [failure] if failure else []
            seconds = time.monotonic() - begun
            print(f"{name:14} {done:6} {jobs:6} {jobs - wrong:9} {seconds:8.1f}", flush=True)
            tally.put(
                command=name, seed=seed, kills=done, jobs=jobs, identical=jobs - wrong,
                seconds=round(seconds, 1),
            )  # fmt: skip
    if page is not None:
        rows = tally.summed(["command"], ["kills", "jobs", "identical"])
        write_between(page, "kills", "\n".join(table_lines(rows)))
    for failure in failures[:5]:
        print(failure)
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
