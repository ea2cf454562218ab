"""Commands about the cache: what is kept in it, and how it is emptied."""

from __future__ import annotations

import time

import typer

from matlens.cli.printing import print_line, print_table
from matlens.io.files import system_errors

app = typer.Typer(help="What is kept between commands, so that they answer at once.", no_args_is_help=True)
_GIB, _MIB = 2**30, 2**20


@app.command()
def show() -> None:
    """Show where the cache is, what is in it, and when it was last used."""
    from matlens.io.entries import DEFAULT_GIB, SIZE_VARIABLE, VARIABLE, default_cache

    cache = default_cache()
    if cache is None:
        print_line(f"The cache is switched off by the environment variable {VARIABLE}.")
        return
    entries = cache.entries()
    rows = [
        (
            entry.about.get("what", entry.kind), f"{entry.n_bytes / _MIB:,.1f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)), entry.about.get("of", ""),
        )
        for entry in entries
    ]  # fmt: skip
    if rows:
        print_table("Last used first", ("what", "MiB", "used", "of"), rows)
    total = sum(entry.n_bytes for entry in entries)
    print_line(
        f"{len(entries)} entries of {total / _GIB:.2f} GiB in {cache.root}; at most {cache.limit / _GIB:g} "
        f"GiB ({SIZE_VARIABLE}, {DEFAULT_GIB:g} where it is not set). {VARIABLE} moves it or, as 'off', "
        "switches it off."
    )


@app.command()
def clear() -> None:
    """Remove everything from the cache that no other process is at work on."""
    from matlens.io.entries import VARIABLE, default_cache

    cache = default_cache()
    if cache is None:
        print_line(f"The cache is switched off by the environment variable {VARIABLE}.")
        return
    with system_errors(cache.root):
        freed = cache.clear()
    print_line(f"{freed / _MIB:,.1f} MiB freed in {cache.root}.")
