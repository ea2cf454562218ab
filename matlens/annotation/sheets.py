"""Sheets on which people annotate concepts, to fill in in a browser or a spreadsheet, and filled ones read.

A sheet is three files: ``sheet.html``, which is filled in in a browser and saves the other two, and these,
``tokens.csv`` and ``patterns.csv``, to be filled in by hand instead. It knows the items' numbers and tokens
and nothing else, so it cannot say where an item is from.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

import pandas as pd

from matlens.errors import InputError
from matlens.storage.folders import system_errors, write_together
from matlens.storage.tables import read_table

CLASSES = ("semantic", "syntactic", "names", "stopwords")
TOKENS, PATTERNS, PAGE = "tokens.csv", "patterns.csv", "sheet.html"
COLUMNS = {
    TOKENS: ("sheet", "item", "rank", "token", "patterns"),
    PATTERNS: ("sheet", "item", "pattern", "description", "class"),
}
_OFFERED = 3  # patterns of an item that there are lines for; more can be added
_NUMBER = re.compile(r"[1-9][0-9]*")


@dataclass(frozen=True, eq=False)
class Annotation:
    """What one annotator has filled in.

    Attributes
    ----------
    name
        Of the annotator: the folder's.
    marks
        Columns ``item, rank, pattern``: a row for each token and pattern that it belongs to.
    patterns
        Columns ``item, pattern, description, class``: a row for each pattern.
    """

    name: str
    marks: pd.DataFrame
    patterns: pd.DataFrame


def code(sample: pd.DataFrame) -> str:
    """What tells a sheet from those of other samples: it depends on the items and their tokens alone."""
    told = "\n".join(f"{row.item} {row.rank} {row.token}" for row in _ordered(sample).itertuples())
    return "s" + hashlib.sha256(told.encode()).hexdigest()[:8]


def write_sheets(sample: pd.DataFrame, folder: str | Path) -> list[Path]:
    """Write the sheet of a sample into a folder of its own; returns its files.

    Raises
    ------
    InputError
        There are other sheets in the folder, or these filled in: they are not written over.
    """
    contents = {PAGE: page(sample).encode()}
    for name, table in ((TOKENS, _token_lines(sample)), (PATTERNS, _pattern_lines(sample))):
        # The mark at the beginning tells spreadsheets that this is UTF-8.
        contents[name] = table.to_csv(index=False, quoting=csv.QUOTE_ALL, lineterminator="\r\n").encode(
            "utf-8-sig"
        )
    paths = {Path(folder) / name: content for name, content in contents.items()}
    with system_errors(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, content in paths.items():
            if path.name != PAGE and path.exists() and path.read_bytes() != content:
                raise InputError(
                    f"{path} is there already and holds something else: another sheet, or this one "
                    "filled in. Move it, or write elsewhere."
                )
        write_together(paths)
    return list(paths)


def page(sample: pd.DataFrame) -> str:
    """The sheet as one HTML page, which needs nothing from elsewhere."""
    items = [_section(str(item), own["token"].to_list()) for item, own in _ordered(sample).groupby("item")]
    template = Template((files("matlens.annotation") / "sheet.html").read_text(encoding="utf-8"))
    return template.substitute(sheet=code(sample), n=len(items), items="\n".join(items))


def _section(item: str, tokens: Sequence[str]) -> str:
    field = '<input inputmode="numeric" autocomplete="off" aria-label="patterns of token {}">'
    lines = [
        f'<li><span class="token">{html.escape(token)}</span> {field.format(rank)}</li>'
        for rank, token in enumerate(tokens, start=1)
    ]
    choice = "".join(f"<option>{name}</option>" for name in ("", *CLASSES))
    rows = [
        f'<tr><td>{i}</td><td><input autocomplete="off" aria-label="description"></td>'
        f'<td><select aria-label="class">{choice}</select></td></tr>'
        for i in range(1, _OFFERED + 1)
    ]
    parts = (
        f'<section class="item" data-item="{item}"><h2>Item {item}</h2>', '<ol class="tokens">', *lines,
        "</ol>", '<table class="patterns"><tbody>', *rows, "</tbody></table>",
        '<button type="button">One more pattern</button></section>',
    )  # fmt: skip
    return "\n".join(parts)


def _token_lines(sample: pd.DataFrame) -> pd.DataFrame:
    table = _ordered(sample)[["item", "rank", "token"]]
    # Between marks, so that no program takes a token for a number, a date or a formula.
    table = table.assign(token="‹" + table["token"] + "›", patterns="")
    table.insert(0, "sheet", code(sample))
    return table


def _pattern_lines(sample: pd.DataFrame) -> pd.DataFrame:
    items = sorted(sample["item"].unique())
    own = code(sample)
    rows = [(own, item, i, "", "") for item in items for i in range(1, _OFFERED + 1)]
    return pd.DataFrame(rows, columns=list(COLUMNS[PATTERNS]))


def _ordered(sample: pd.DataFrame) -> pd.DataFrame:
    return sample.sort_values(["item", "rank"])


def read_sheets(folder: str | Path, sample: pd.DataFrame) -> Annotation:
    """Read a filled sheet: the folder with its ``tokens.csv`` and ``patterns.csv``.

    Raises
    ------
    InputError
        Something is missing or cannot be meant; the message names the first such line of the file.
    """
    folder = Path(folder)
    marks = _read_tokens(folder / TOKENS, sample)
    patterns = _read_patterns(folder / PATTERNS, sample)
    known = pd.MultiIndex.from_frame(patterns[["item", "pattern"]])
    lost = marks[~pd.MultiIndex.from_frame(marks[["item", "pattern"]]).isin(known)]
    if len(lost):
        first = lost.iloc[0]
        raise InputError(
            f"{folder / TOKENS}, item {first['item']}, rank {first['rank']}: pattern {first['pattern']} has "
            f"no class. Expected a line for it in {PATTERNS}, with one of {', '.join(CLASSES)}."
        )
    return Annotation(folder.resolve().name, marks, patterns)


def _read_tokens(path: Path, sample: pd.DataFrame) -> pd.DataFrame:
    table = _read(path, sample)
    ranks = set(sample["rank"].astype(str))
    _refuse(path, table, ~table["rank"].isin(ranks), "rank", f"a rank from 1 to {len(ranks)}")
    _refuse(path, table, table.duplicated(["item", "rank"]), "rank", "each rank of an item once")
    if len(table) < len(sample):
        expected = pd.MultiIndex.from_frame(_ordered(sample)[["item", "rank"]].astype(str))
        absent = expected[~expected.isin(pd.MultiIndex.from_frame(table[["item", "rank"]]))]
        raise InputError(
            f"{path} lacks {len(absent)} of {len(sample)} lines, the first is that of item {absent[0][0]}, "
            f"rank {absent[0][1]}. Expected all of the sheet; tokens of no pattern stay empty."
        )
    numbers = table["patterns"].str.split()
    wrong = ~numbers.map(lambda own: all(map(_NUMBER.fullmatch, own)))
    _refuse(
        path, table, wrong, "patterns", "nothing, a number such as 1, or several with spaces between (1 2)"
    )
    marks = table.assign(pattern=numbers.map(lambda own: list(dict.fromkeys(own)))).explode("pattern")
    marks = marks.dropna(subset="pattern")[["item", "rank", "pattern"]]
    if marks.empty:
        raise InputError(
            f"{path} is empty: no token belongs to a pattern. Expected the numbers of patterns in the column "
            "'patterns'."
        )
    return marks.astype("int64").reset_index(drop=True)


def _read_patterns(path: Path, sample: pd.DataFrame) -> pd.DataFrame:
    table = _read(path, sample)
    table = table.assign(**{"class": table["class"].str.lower(), "description": table["description"]})
    table = table[(table["class"] != "") | (table["description"] != "")]
    wrong = ~table["pattern"].map(lambda text: bool(_NUMBER.fullmatch(text))).astype(bool)
    _refuse(path, table, wrong, "pattern", "a number from 1 on")
    unknown = table[~table["class"].isin(CLASSES)]
    if len(unknown):
        near = difflib.get_close_matches(unknown.iloc[0]["class"], CLASSES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        _refuse(path, table, ~table["class"].isin(CLASSES), "class", f"one of {', '.join(CLASSES)}{hint}")
    _refuse(path, table, table.duplicated(["item", "pattern"]), "pattern", "each pattern of an item once")
    columns = list(COLUMNS[PATTERNS][1:])
    return table[columns].astype({"item": "int64", "pattern": "int64"}).reset_index(drop=True)


def _read(path: Path, sample: pd.DataFrame) -> pd.DataFrame:
    """The lines of a file, as it was written or a spreadsheet has saved it, with sheet and items checked."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            head = file.readline()
        separator = ";" if head.count(";") > head.count(",") else ","
    except (OSError, ValueError):
        separator = ","  # what is wrong is said when all of it is read
    table = read_table(
        path, COLUMNS[path.name], what="a filled sheet",
        made_by="Expected the file as it was written, filled in and saved as CSV in UTF-8.",
        encoding="utf-8-sig", sep=separator,
    )  # fmt: skip
    table = table[list(COLUMNS[path.name])].apply(lambda column: column.str.strip())
    table = table[(table != "").any(axis=1)]  # lines that a spreadsheet has left at the end
    own = code(sample)
    _refuse(path, table, table["sheet"] != own, "sheet", f"{own}: it is a sheet of another sample")
    items = set(sample["item"].astype(str))
    _refuse(path, table, ~table["item"].isin(items), "item", f"an item of this sample, 1 to {len(items)}")
    return table


def _refuse(path: Path, table: pd.DataFrame, wrong: pd.Series, column: str, expected: str) -> None:
    """Name the first wrong line, the heading being line 1, if there is one."""
    if not wrong.any():
        return
    first = table[wrong].iloc[0]
    line = int(table.index[wrong][0]) + 2
    of = "" if column == "item" else f" (item {first['item']})"
    raise InputError(
        f"{path}, line {line}{of}: {column} is {first[column]!r}, and {int(wrong.sum()) - 1} more lines are "
        f"wrong like it. Expected {expected}."
    )
