"""The command line; the cache commands are here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from matlens import __version__
from matlens.cli import ffn, lens, pages, parts, study
from matlens.cli.printing import print_line, print_table
from matlens.cli.starting import start

if TYPE_CHECKING:
    from matlens.io.cache import Cache

_GIB, _MIB = 2**30, 2**20

app = typer.Typer(
    help="What is linear inside a transformer, and what its feed-forward layers write.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache = typer.Typer(
    help="Results stored between commands, so that repeated commands are fast.", no_args_is_help=True
)
for commands in (study.app, ffn.app, pages.app, parts.app):
    app.add_typer(commands)
app.add_typer(ffn.values, name="values")
app.add_typer(cache, name="cache")
app.add_typer(lens.app, name="lens")


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@cache.command()
def show() -> None:
    """Show the folder of the cache, its entries, and when they were last used."""
    from matlens.io.cache import LIMIT_VARIABLE, VARIABLE

    cache = _existing_cache()
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
        f"GiB ({LIMIT_VARIABLE}, 20 where it is not set). {VARIABLE} moves it or, as 'off', switches it off."
    )


@cache.command()
def clear() -> None:
    """Remove all cache entries that no other process is writing."""
    cache = _existing_cache()
    freed = cache.clear()
    print_line(f"{freed / _MIB:,.1f} MiB freed in {cache.root}.")


def _existing_cache() -> Cache:
    from matlens.io.cache import VARIABLE, default_cache

    cache = default_cache()
    if cache is None:
        print_line(f"The cache is switched off by the environment variable {VARIABLE}.")
        raise typer.Exit
    return cache


def main() -> None:
    """Run the command line, distributed if `torchrun` started it."""
    start(app, dividing=("run", "collect", "fit", "part", "lens fit", "linearity"))


if __name__ == "__main__":
    main()
