"""Sheets for annotators of concepts, for a browser or a spreadsheet.

A sheet is three files: ``sheet.html``, which is filled in with a browser and saves the other two,
``tokens.csv`` and ``patterns.csv``. They have the items' numbers and tokens, but not where an item is from.
"""

from __future__ import annotations

import hashlib
import textwrap
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from annotation.sheets import read_sheet, refuse_rows, sheet_text, write_sheets
from matlens import InputError

CLASSES = ("semantic", "syntactic", "names", "stopwords")
TOKENS_FILE, PATTERNS_FILE, PAGE_FILE = "tokens.csv", "patterns.csv", "sheet.html"
TOKENS_COLUMNS = ("sheet", "item", "rank", "token", "patterns")
PATTERNS_COLUMNS = ("sheet", "item", "pattern", "description", "class")
_OFFERED_PATTERNS = 3  # lines for patterns of an item
_LONGEST_MEANING = 120  # characters
_NUMBER = r"[1-9][0-9]{0,8}"


class Annotation(NamedTuple):
    """The answers of one annotator.

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


def sheet_code(sample: pd.DataFrame) -> str:
    """A hash of a sample's items and tokens, which identifies its sheets."""
    lines = "\n".join(f"{row.item} {row.rank} {row.token}" for row in _ordered(sample).itertuples())
    return "s" + hashlib.sha256(lines.encode()).hexdigest()[:8]


def write_concept_sheets(
    sample: pd.DataFrame, folder: Path, *, describe: Callable[[str], str] | None = None
) -> list[Path]:
    """Write the sheets of a sample of `draw_concept_sample` into a folder; return their paths.

    ``describe`` gives a text that is shown next to each token, such as `wordnet`.
    """
    meanings = {} if describe is None else {token: describe(token) for token in sample["token"].unique()}
    code = sheet_code(sample)
    tokens = _ordered(sample)[["item", "rank", "token"]]
    described = {"meaning": tokens["token"].map(meanings)} if meanings else {}
    # In marks, so that no spreadsheet reads a token as a number, a date or a formula.
    tokens = tokens.assign(sheet=code, token=_marked(tokens["token"]), patterns="")
    pattern_ids = range(1, _OFFERED_PATTERNS + 1)
    patterns = [
        (code, item, number, "", "") for item in sorted(sample["item"].unique()) for number in pattern_ids
    ]
    texts = {
        folder / PAGE_FILE: render_page(sample, meanings),
        folder / TOKENS_FILE: sheet_text(tokens[list(TOKENS_COLUMNS)].assign(**described)),
        folder / PATTERNS_FILE: sheet_text(pd.DataFrame(patterns, columns=list(PATTERNS_COLUMNS))),
    }
    write_sheets(texts)
    return list(texts)


def render_page(sample: pd.DataFrame, meanings: Mapping[str, str] | None = None) -> str:
    """The sheet as one standalone HTML page; ``meanings`` are shown next to tokens."""
    items = [(item, lines["token"].to_list()) for item, lines in _ordered(sample).groupby("item")]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(PAGE_FILE).render(
        code=sheet_code(sample), items=items, classes=CLASSES, n_patterns=_OFFERED_PATTERNS,
        meanings=meanings or {},
    )  # fmt: skip


def wordnet() -> Callable[[str], str]:
    """A function that gives the first definition of a word in WordNet (paper B, appendix A.2)."""
    try:
        from nltk.corpus import wordnet as words

        words.ensure_loaded()
    except (ImportError, LookupError) as error:
        raise InputError(
            "WordNet is not installed. Use: pip install nltk && python -m nltk.downloader wordnet"
        ) from error

    def describe(token: str) -> str:
        word = token.strip().removeprefix("␣")
        synsets = words.synsets(word) if len(word) > 1 and word.isalpha() else []
        definition = synsets[0].definition() if synsets else ""
        return textwrap.shorten(definition, _LONGEST_MEANING, placeholder="…")

    return describe


def read_concept_sheets(folder: str | Path, sample: pd.DataFrame) -> Annotation:
    """Read the filled ``tokens.csv`` and ``patterns.csv`` of one annotator.

    Raises InputError if they are of another sample, or if an entry is not valid.
    """
    folder = Path(folder)
    marks = _read_marks(folder / TOKENS_FILE, sample)
    patterns = _read_patterns(folder / PATTERNS_FILE, sample)
    keys, described = (pd.MultiIndex.from_frame(table[["item", "pattern"]]) for table in (marks, patterns))
    refuse_rows(
        folder / TOKENS_FILE, marks, pd.Series(~keys.isin(described)), "pattern",
        f"one with a class in {PATTERNS_FILE}",
    )  # fmt: skip
    return Annotation(folder.resolve().name, marks, patterns)


def _read_marks(path: Path, sample: pd.DataFrame) -> pd.DataFrame:
    sheet = _read_rows(path, TOKENS_COLUMNS, sample)
    expected = sample.assign(token=_marked(sample["token"]))
    if _keys(sheet) != _keys(expected):  # lost lines, or columns sorted separately
        raise InputError(
            f"{path} must have every item, rank and token once, as written. Fill in patterns only."
        )
    valid = sheet["patterns"].str.fullmatch(rf"\s*({_NUMBER}(\s+|$))*")
    refuse_rows(path, sheet, ~valid, "patterns", "empty, a number such as 1, or several such as 1 2")
    marks = sheet.assign(pattern=sheet["patterns"].str.split()).explode("pattern").dropna(subset="pattern")
    if marks.empty:
        raise InputError(f"{path} must be filled in, got no token with a pattern.")
    return marks[["item", "rank", "pattern"]].astype("int64").drop_duplicates(ignore_index=True)


def _keys(table: pd.DataFrame) -> list[tuple[str, str, str]]:
    tokens = table["token"].map(_normalised)
    return sorted(zip(table["item"].astype(str), table["rank"].astype(str), tokens, strict=True))


def _marked(tokens: pd.Series) -> pd.Series:
    return "‹" + tokens + "›"


def _normalised(token: str) -> str:
    """A token with normalized spaces and accents, which programs change."""
    return " ".join(unicodedata.normalize("NFC", token).split())


def _read_patterns(path: Path, sample: pd.DataFrame) -> pd.DataFrame:
    sheet = _read_rows(path, PATTERNS_COLUMNS, sample)
    sheet = sheet.assign(**{"class": sheet["class"].str.lower()})
    sheet = sheet[(sheet["class"] != "") | (sheet["description"] != "")]
    refuse_rows(path, sheet, ~sheet["item"].isin(sample["item"].astype(str)), "item", "one of the sample")
    refuse_rows(path, sheet, ~sheet["pattern"].str.fullmatch(_NUMBER), "pattern", "a number from 1 on")
    refuse_rows(path, sheet, ~sheet["class"].isin(CLASSES), "class", f"one of {', '.join(CLASSES)}")
    refuse_rows(path, sheet, sheet.duplicated(["item", "pattern"]), "pattern", "described once")
    return sheet.drop(columns="sheet").astype({"item": "int64", "pattern": "int64"}).reset_index(drop=True)


def _read_rows(path: Path, columns: tuple[str, ...], sample: pd.DataFrame) -> pd.DataFrame:
    sheet, code = read_sheet(path, columns).apply(lambda column: column.str.strip()), sheet_code(sample)
    refuse_rows(path, sheet, sheet["sheet"] != code, "sheet", f"{code}, that of this sample")
    return sheet


def _ordered(sample: pd.DataFrame) -> pd.DataFrame:
    return sample.sort_values(["item", "rank"])
