"""Collect the tables and figures that pages quote: ``python results/gather.py out/results``.

Tables are stored as CSV with six digits, without constant columns, which go to the JSON next to it; the
JSON has no local paths and no lists of hooks. Figures are stored as PNG with a reduced palette. Tables
and figures that are not in the folder remain as they are.
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
DIGITS, COLORS = 6, 256
# Keys of an origin that are not stored: hundreds of lines, and fingerprints in other precisions.
UNKEPT = ("hooks", "rounded")
MADE_IN = "out/results"  # the folder of 'make results', relative to the project


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
    """A table rounded to six digits, without its constant columns, and these."""
    numbers = table.select_dtypes("float").map(lambda value: float(f"{value:.{DIGITS}g}"))
    table = table.assign(**numbers)
    named = {"experiment", "model", "corpus"} if len(table) == 1 else {*table} - {"value"}
    # As JSON has them: null for missing cells, and no NumPy scalars.
    alike = {
        str(column): None if cells.isna().all() else cells.tolist()[0]
        for column, cells in table.items()
        if column in named and cells.nunique(dropna=False) == 1
    }
    return table.drop(columns=list(alike)), alike


def portable(origin: Any, folder: str) -> Any:
    """An origin with paths relative to the project.

    The collected folder, and any ``.../out/results``, becomes ``out/results``; ``--out`` is removed from
    commands, and the keys of `UNKEPT` are dropped.
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
    """Write a reduced table and its JSON into the folder of results."""
    whole = read_table(
        path, [], what="a table of results", made_by="Run its analysis again.", na_values=["", "nan"]
    )
    folder = str(path.parent.resolve())
    words = whole.select_dtypes(exclude="number").map(lambda cell: portable(cell, folder))
    table, alike = reduced(whole.assign(**words))
    size = len(csv_text(table))
    if size > LARGEST:
        raise InputError(
            f"{path} must have at most {LARGEST:,} bytes when reduced, got {size:,}. Let the analysis write "
            "a smaller table for the pages."
        )
    origin = portable(json.loads(path.with_suffix(".json").read_text()), folder)
    write_results(results, path.stem, table, origin | {"all_rows": origin.get("all_rows", {}) | alike})


def keep_figure(path: Path, images: Path) -> None:
    """Write a figure with a reduced palette, at a third of the size."""
    figure = (
        Image.open(path)
        .convert("RGB")
        .quantize(COLORS, method=Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    )  # so that color scales stay smooth
    figure.save(images / path.name, optimize=True)


def main(out: Path, *, results: Path = RESULTS, images: Path = IMAGES) -> None:
    """Collect all tables and figures that exist."""
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
