"""Sheets on which people annotate concepts, to be filled in with a browser or a spreadsheet.

A sheet is three files: ``sheet.html``, which is filled in with a browser and saves the other two, and these,
``tokens.csv`` and ``patterns.csv``, to be filled in by hand instead. They hold the items' numbers and tokens
and nothing else, so they do not tell where an item is from.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from annotation.sheets import read_sheet, refuse_lines, write_sheets
from matlens.errors import InputError, checked
from matlens.io.tables import check_columns

CLASSES = ("semantic", "syntactic", "names", "stopwords")
TOKENS_FILE, PATTERNS_FILE, PAGE_FILE = "tokens.csv", "patterns.csv", "sheet.html"
TOKENS_COLUMNS = ("sheet", "item", "rank", "token", "patterns")
PATTERNS_COLUMNS = ("sheet", "item", "pattern", "description", "class")
_OFFERED_PATTERNS = 3  # patterns of an item that there are lines for; more can be added
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@checked
@dataclass(frozen=True, eq=False)
class Annotation:
    """What one annotator has filled in.

    Attributes
    ----------
    name
        Name of the annotator, which is that of the folder.
    marks
        Columns ``item, rank, pattern``: a row for each token and each pattern that it belongs to.
    patterns
        Columns ``item, pattern, description, class``: a row for each pattern.
    """

    name: str
    marks: pd.DataFrame
    patterns: pd.DataFrame


@checked
def sheet_code(sample: pd.DataFrame) -> str:
    """The code that tells a sheet from those of other samples: it depends on the items and tokens alone."""
    lines = "\n".join(f"{row.item} {row.rank} {row.token}" for row in _ordered(sample).itertuples())
    return "s" + hashlib.sha256(lines.encode()).hexdigest()[:8]


@checked
def write_concept_sheets(
    sample: pd.DataFrame, folder: str | Path, *, describe: Callable[[str], str] | None = None
) -> list[Path]:
    """Write the sheets of a sample into a folder.

    Parameters
    ----------
    sample
        The sample of `draw_concept_sample`.
    folder
        The folder, which should hold nothing else.
    describe
        What each token means, shown next to it, such as ``WordNet().describe``; by default nothing. It has no
        part in the code of the sheet, and is not read back.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    InputError
        There are other sheets in the folder, or these filled in: they are not written over.
    """
    folder = Path(folder)
    _refuse_others(folder)
    meanings = {} if describe is None else {token: describe(token) for token in sample["token"].unique()}
    pages = {folder / PAGE_FILE: render_page(sample, meanings)}
    sheets = {
        folder / TOKENS_FILE: _token_lines(sample, meanings),
        folder / PATTERNS_FILE: _pattern_lines(sample),
    }
    write_sheets(sheets, pages)
    return [*pages, *sheets]


def render_page(sample: pd.DataFrame, meanings: Mapping[str, str] | None = None) -> str:
    """The sheet as one HTML page, which needs nothing from elsewhere; ``meanings`` stand next to tokens."""
    environment = Environment(
        loader=PackageLoader("annotation", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    items = [(item, lines["token"].to_list()) for item, lines in _ordered(sample).groupby("item")]
    return environment.get_template(PAGE_FILE).render(
        code=sheet_code(sample), items=items, classes=CLASSES, n_patterns=_OFFERED_PATTERNS,
        meanings=meanings or {},
    )  # fmt: skip


def check_sample(sample: pd.DataFrame) -> None:
    """Refuse what is no sample of `draw_concept_sample`.

    Raises
    ------
    InputError
        It is no table with the columns, or lists a rank of an item twice.
    """
    made_by = "Expected a sample, as annotation.draw_concept_sample gives it."
    check_columns(
        sample,
        ("item", "rank", "token", "kind", "layer"),
        what="a sample, as annotation.draw_concept_sample gives it",
    )
    numbers = all(pd.api.types.is_integer_dtype(sample[column].dtype) for column in ("item", "rank"))
    if not numbers or not sample["token"].map(lambda token: isinstance(token, str)).all():
        raise InputError(
            f"sample has items or ranks that are no whole numbers, or no texts as tokens. {made_by}"
        )
    if sample.duplicated(["item", "rank"]).any():
        raise InputError(f"sample has a rank of an item twice. {made_by}")


def _refuse_others(folder: Path) -> None:
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    ours = (TOKENS_FILE, PATTERNS_FILE, PAGE_FILE)
    others = [name for name in names if name not in ours and not name.startswith(".")]
    if others:
        raise InputError(
            f"The folder {folder} holds other files, such as {others[0]}. Expected one for the sheets alone, "
            "which annotators are given."
        )


def _token_lines(sample: pd.DataFrame, meanings: Mapping[str, str]) -> pd.DataFrame:
    lines = _ordered(sample)[["item", "rank", "token"]]
    described = {"meaning": lines["token"].map(meanings)} if meanings else {}
    # Between marks, so that no program takes a token for a number, a date or a formula.
    lines = lines.assign(sheet=sheet_code(sample), token="‹" + lines["token"] + "›", patterns="")
    return lines[list(TOKENS_COLUMNS)].assign(**described)


def _pattern_lines(sample: pd.DataFrame) -> pd.DataFrame:
    code = sheet_code(sample)
    items = sorted(sample["item"].unique())
    rows = [(code, item, number, "", "") for item in items for number in range(1, _OFFERED_PATTERNS + 1)]
    return pd.DataFrame(rows, columns=list(PATTERNS_COLUMNS))


def _ordered(sample: pd.DataFrame) -> pd.DataFrame:
    check_sample(sample)
    return sample.sort_values(["item", "rank"])


@checked
def read_concept_sheets(folder: str | Path, sample: pd.DataFrame) -> Annotation:
    """Read filled sheets: the folder with ``tokens.csv`` and ``patterns.csv`` of one annotator.

    Parameters
    ----------
    folder
        The folder.
    sample
        The sample that the sheets were written of.

    Raises
    ------
    InputError
        Something is missing or cannot be meant; the message names the first such line of the file.
    """
    folder = Path(folder)
    marks = _read_marks(folder / TOKENS_FILE, sample)
    patterns = _read_patterns(folder / PATTERNS_FILE, sample)
    described = pd.MultiIndex.from_frame(patterns[["item", "pattern"]])
    undescribed = marks[~pd.MultiIndex.from_frame(marks[["item", "pattern"]]).isin(described)]
    if len(undescribed):
        first = undescribed.iloc[0]
        raise InputError(
            f"{folder / TOKENS_FILE}, item {first['item']}, rank {first['rank']}: pattern {first['pattern']} "
            f"has no class. Expected a line for it in {PATTERNS_FILE}, with one of {', '.join(CLASSES)}."
        )
    return Annotation(folder.resolve().name, marks, patterns)


def _read_marks(path: Path, sample: pd.DataFrame) -> pd.DataFrame:
    sheet = _read_lines(path, TOKENS_COLUMNS, sample)
    ranks = set(sample["rank"].astype(str))
    refuse_lines(path, sheet, ~sheet["rank"].isin(ranks), "rank", f"a rank from 1 to {len(ranks)}")
    refuse_lines(path, sheet, sheet.duplicated(["item", "rank"]), "rank", "each rank of an item once")
    if len(sheet) < len(sample):
        expected = pd.MultiIndex.from_frame(_ordered(sample)[["item", "rank"]].astype(str))
        absent = expected[~expected.isin(pd.MultiIndex.from_frame(sheet[["item", "rank"]]))]
        raise InputError(
            f"{path} lacks {len(absent)} of {len(sample)} lines, the first is that of item {absent[0][0]}, "
            f"rank {absent[0][1]}. Expected all of the sheet; tokens of no pattern stay empty."
        )
    _check_tokens(path, sheet, sample)
    numbers = sheet["patterns"].str.split()
    wrong = ~numbers.map(lambda texts: all(map(_NUMBER.fullmatch, texts)))
    refuse_lines(
        path, sheet, wrong, "patterns", "nothing, a number such as 1, or several with spaces between (1 2)"
    )
    marks = sheet.assign(pattern=numbers.map(lambda texts: list(dict.fromkeys(texts)))).explode("pattern")
    marks = marks.dropna(subset="pattern")[["item", "rank", "pattern"]]
    if marks.empty:
        raise InputError(
            f"{path} is empty: no token belongs to a pattern. Expected the numbers of patterns in the column "
            "'patterns'."
        )
    return marks.astype("int64").reset_index(drop=True)


def _check_tokens(path: Path, sheet: pd.DataFrame, sample: pd.DataFrame) -> None:
    """Refuse a sheet whose tokens are not those of its ranks, as where some columns of it were sorted."""
    written = {(str(row.item), str(row.rank)): _plain(f"‹{row.token}›") for row in sample.itertuples()}
    places = list(zip(sheet["item"], sheet["rank"], strict=True))
    tokens = [written[place] for place in places]
    other = sheet["token"].map(_plain) != pd.Series(tokens, index=sheet.index, dtype="str")
    if other.any():
        first = tokens[int(other.to_numpy().argmax())]
        refuse_lines(path, sheet, other, "token", f"{first}, as it was written: only patterns are filled in")


def _plain(token: str) -> str:
    """A token without what programs change: spaces, and how letters with marks are put together."""
    return " ".join(unicodedata.normalize("NFC", token).split())


def _read_patterns(path: Path, sample: pd.DataFrame) -> pd.DataFrame:
    sheet = _read_lines(path, PATTERNS_COLUMNS, sample)
    sheet = sheet.assign(**{"class": sheet["class"].str.lower()})
    sheet = sheet[(sheet["class"] != "") | (sheet["description"] != "")]
    wrong = ~sheet["pattern"].map(lambda text: bool(_NUMBER.fullmatch(text))).astype(bool)
    refuse_lines(path, sheet, wrong, "pattern", "a number from 1 on")
    unknown = ~sheet["class"].isin(CLASSES)
    first = sheet["class"][unknown].head(1)
    similar = [name for text in first for name in difflib.get_close_matches(text, CLASSES, n=1)]
    hint = f" (did you mean {similar[0]}?)" if similar else ""
    refuse_lines(path, sheet, unknown, "class", f"one of {', '.join(CLASSES)}{hint}")
    repeated = sheet.duplicated(["item", "pattern"])
    refuse_lines(path, sheet, repeated, "pattern", "each pattern of an item once")
    patterns = sheet[[column for column in PATTERNS_COLUMNS if column != "sheet"]]
    return patterns.astype({"item": "int64", "pattern": "int64"}).reset_index(drop=True)


def _read_lines(path: Path, columns: tuple[str, ...], sample: pd.DataFrame) -> pd.DataFrame:
    """The lines of a file, which belong to this sample and to items of it."""
    sheet = read_sheet(path, columns)
    code, items = sheet_code(sample), set(sample["item"].astype(str))
    refuse_lines(path, sheet, sheet["sheet"] != code, "sheet", f"{code}: it is a sheet of another sample")
    unknown = ~sheet["item"].isin(items)
    refuse_lines(path, sheet, unknown, "item", f"an item of this sample, 1 to {len(items)}")
    return sheet
