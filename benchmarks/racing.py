"""Two and four processes run the same command in one folder: no work may be lost, no byte may differ."""

from __future__ import annotations

import random
import shutil
import time
from typing import Annotated

import typer
from campaign import Campaign, campaign, differing, files


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
    repeats: Annotated[int, typer.Option(help="Races of each command and number of processes.")] = 50,
    command: Annotated[list[str] | None, typer.Option(help="Only these commands.")] = None,
    draws: Annotated[bool, typer.Option(help="Draw real figures, which takes far longer.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the moments at which processes begin.")] = 0,
) -> None:
    """Race every command, 50 times with two processes and 50 times with four, and print a table."""
    draw, failures = random.Random(seed), []
    print(f"{'command':14} {'processes':>9} {'races':>6} {'identical':>9} {'seconds':>8}")
    with campaign(draws=draws) as setting:
        for name in command or list(setting.commands):
            for n in (2, 4):
                begun = time.monotonic()
                wrong = [failure for _ in range(repeats) if (failure := race(setting, name, n, draw))]
                seconds = time.monotonic() - begun
                print(f"{name:14} {n:9} {repeats:6} {repeats - len(wrong):9} {seconds:8.1f}", flush=True)
                failures += wrong
    for failure in failures[:5]:
        print(failure)
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
