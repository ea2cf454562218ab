"""Keep of what analyses have written what the pages quote: ``python results/gather.py out/results``.

Of each table that a section quotes, the CSV with numbers of six digits, without the columns that say the same
in every row (the JSON beside it does) and, in that JSON, no path of this machine and no list of the hooks at
which sites are read; of each figure that a page shows, the PNG with as many colours as it needs. Where the
folder does not have a table or a figure, the old one stays.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from matlens import InputError
from matlens.io import csv_text, read_table, write_results

RESULTS = Path(__file__).resolve().parent
IMAGES = RESULTS.parent / "docs" / "images"
LARGEST = 120_000  # bytes of a table
DIGITS, COLOURS = 6, 256
UNKEPT = (
    "hooks",
    "rounded",
)  # of an origin: hundreds of lines, and what a model would be in other precisions
MADE_IN = "out/results"  # the folder of 'make results', from the project's


def quoted_tables(folder: Path) -> list[str]:
    """Names of the tables that sections quote."""
    text = "\n".join(path.read_text() for path in sorted(folder.rglob("*.md")))
    return sorted(set(re.findall(r"\b(?:table|value|origin|script)\(\s*\"(\w+)\"", text)))


def shown_figures(folder: Path) -> set[str]:
    """Names of the files of figures that sections show."""
    return {
        name for path in folder.rglob("*.md") for name in re.findall(r"images/(\w+\.png)", path.read_text())
    }


def reduced(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A table with numbers of six digits, and apart from it the cells that are the same in every row."""
    numbers = table.select_dtypes("float").map(lambda value: float(f"{value:.{DIGITS}g}"))
    table = table.assign(**numbers)
    named = {"experiment", "model", "corpus"} if len(table) == 1 else {*table} - {"value"}
    # JSON has no cell that is missing but null, and no number of NumPy's.
    alike = {
        str(column): None if cells.isna().all() else cells.tolist()[0]
        for column, cells in table.items()
        if column in named and cells.nunique(dropna=False) == 1
    }
    return table.drop(columns=list(alike)), alike


def portable(origin: Any, folder: str) -> Any:
    """What a table was made from, as it is given in the project's folder wherever that is.

    The folder that is gathered, like any ``.../out/results``, is ``out/results``; a command says nothing of
    where it wrote, and what is in `UNKEPT` is left out.
    """
    if isinstance(origin, dict):
        parts = {key: portable(part, folder) for key, part in origin.items() if key not in UNKEPT}
        command = parts.get("command")
        return parts | ({"command": without_out(command)} if isinstance(command, str) else {})
    if isinstance(origin, list):
        return [portable(part, folder) for part in origin]
    if isinstance(origin, str):
        origin = re.sub(rf"{re.escape(folder)}(?![^/\s'\"])", MADE_IN, origin)
        return re.sub(rf"(?<![^\s'\"=])/[^\s'\"]*/{MADE_IN}(?![^/\s'\"])", MADE_IN, origin)
    return origin


def without_out(command: str) -> str:
    """A command without its ``--out FOLDER``."""
    words = shlex.split(command)
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if "--out" not in (before, word) and not word.startswith("--out=")
    ]
    return shlex.join(kept)


def keep_table(path: Path, results: Path) -> None:
    """Write a table, reduced, into the folder of results, with its JSON."""
    whole = read_table(path, [], what="a table of results", made_by="Make it anew.", na_values=["", "nan"])
    folder = str(path.parent.resolve())
    words = whole.select_dtypes(exclude="number").map(lambda cell: portable(cell, folder))
    table, alike = reduced(whole.assign(**words))
    size = len(csv_text(table))
    if size > LARGEST:
        raise InputError(
            f"{path} has {size:,} bytes when reduced, more than the {LARGEST:,} of a table that pages quote. "
            "Let the analysis write the numbers that are quoted into a table of their own."
        )
    origin = portable(json.loads(path.with_suffix(".json").read_text()), folder)
    write_results(results, path.stem, table, origin | {"all_rows": origin.get("all_rows", {}) | alike})


def keep_figure(path: Path, images: Path) -> None:
    """Write a figure with a palette of few colours, which looks the same and is a third of the size."""
    figure = (
        Image.open(path)
        .convert("RGB")
        .quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    )  # no colour of a scale is far from its own
    figure.save(images / path.name, optimize=True)


def main(out: Path, *, results: Path = RESULTS, images: Path = IMAGES) -> None:
    """Keep all tables and figures that are there."""
    for name in quoted_tables(results / "pages"):
        if (out / f"{name}.csv").is_file():
            keep_table(out / f"{name}.csv", results)
            print(results / f"{name}.csv")
    for name in sorted({path.name for path in images.glob("*.png")} | shown_figures(results / "pages")):
        if (out / name).is_file():
            keep_figure(out / name, images)
            print(images / name)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except InputError as error:
        sys.exit(str(error))
