"""Sheets that people fill in with a spreadsheet: written, never written over, and read back with complaints.

A sheet is a CSV file with a heading. All cells are texts. Whoever reads a filled sheet checks its cells with
`refuse_lines`, so that the first line with a mistake is named as a spreadsheet numbers it.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from matlens.errors import InputError, checked, short
from matlens.io.bounds import TABLE
from matlens.io.cells import original_table
from matlens.io.files import open_regular, read_bounded, write_files
from matlens.io.tables import check_columns, csv_text


@checked
def write_sheet(path: str | Path, table: pd.DataFrame) -> None:
    """Write a table as a sheet to be filled in.

    Parameters
    ----------
    path
        The CSV file.
    table
        Its lines; columns to be filled in are empty.

    Raises
    ------
    InputError
        There is another sheet, or this one filled in: it is not written over.
    """
    write_sheets({Path(path): table})


def write_sheets(tables: Mapping[Path, pd.DataFrame], pages: Mapping[Path, str] | None = None) -> None:
    """Write several sheets, and pages that belong to them, all or none of them.

    Parameters
    ----------
    tables
        The lines of each sheet.
    pages
        Texts of other files. Nobody fills them in, so they are written over.

    Raises
    ------
    InputError
        There is another sheet, or one of these filled in: it is not written over.
    """
    for path, table in tables.items():
        check_columns(table, (), what=f"lines to be filled in, for {path.name}")
    sheets = {path: _spreadsheet(table) for path, table in tables.items()}
    for path, content in sheets.items():
        if os.path.lexists(path) and not _holds(path, content):
            raise InputError(
                f"{path} is there already and holds something else: another sheet, or this one filled in. "
                "Move it, or write elsewhere."
            )
    write_files({**sheets, **(pages or {})})


def _holds(path: Path, content: bytes) -> bool:
    """Whether a file holds just this; what is no plain file is refused."""
    with open_regular(path) as file:
        return file.read(len(content) + 1) == content


def _spreadsheet(table: pd.DataFrame) -> bytes:
    """A CSV file as spreadsheets like it; the mark at its beginning tells them that it is UTF-8."""
    return csv_text(table, quoting=csv.QUOTE_ALL, lineterminator="\r\n").encode("utf-8-sig")


def read_sheet(path: str | Path, columns: Sequence[str], *, unchanged: Sequence[str] = ()) -> pd.DataFrame:
    """Read a filled sheet, as it was written or as a spreadsheet has saved it.

    The separator can be a semicolon or a tab. Lines that are empty are left out, and so are spaces around
    cells. The index of the table is the number of each line in the file, the heading being line 1.

    Parameters
    ----------
    path
        The CSV file.
    columns
        Columns that the sheet must have; others are left out.
    unchanged
        Columns whose cells keep the spaces around them.

    Raises
    ------
    InputError
        The file cannot be read, or columns are missing.
    """
    expected = (
        f"Expected the sheet as it was written, with the columns {', '.join(columns)}, filled in and saved "
        "as CSV in UTF-8."
    )
    heading, rows = _cells(Path(path), expected)
    missing = [column for column in columns if column not in heading]
    if missing:
        names = ", ".join(missing)
        raise InputError(f"{path} is not a filled sheet: it lacks the columns {names}. {expected}")
    repeated = [column for column in columns if heading.count(column) > 1]
    if repeated:
        raise InputError(f"{path} is not a filled sheet: it has the column {repeated[0]} twice. {expected}")
    width = len(heading)
    for line, row in enumerate(rows, 2):
        if any(cell.strip() for cell in row[width:]):
            raise InputError(
                f"{path}, line {line} has {len(row)} cells, and the heading {width}. {expected} Is a text "
                "with a comma or a quote in it without quotes around it?"
            )
    # Some programs leave out the empty cells at the end of a line.
    filled_up = [[*row[:width], *[""] * (width - len(row))] for row in rows]
    table = pd.DataFrame(filled_up, columns=pd.Index(heading), dtype="str")
    sheet = original_table(table.loc[:, ~table.columns.duplicated()][list(columns)])
    sheet.index += 2
    stripped = sheet.apply(lambda column: column.str.strip())
    filled = (stripped != "").any(axis=1)
    return stripped.assign(**{column: sheet[column] for column in unchanged})[filled]


def _cells(path: Path, expected: str) -> tuple[list[str], list[list[str]]]:
    """The heading of a CSV file and its lines, blank ones included."""
    try:
        content = read_bounded(path, TABLE)
        if content.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
            raise ValueError("it is a workbook of a spreadsheet program, not CSV")
        if b"\0" in content:
            raise ValueError("it has a NUL byte, so it is in UTF-16 or no text")
        text = content.decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text), strict=True))
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read as a filled sheet: {error}. {expected}") from error
    if not rows:
        raise InputError(f"{path} cannot be read as a filled sheet: it is empty. {expected}")
    return [name.strip() for name in rows[0]], rows[1:]


def _separator(text: str) -> str:
    """The one that spreadsheets have put most of into the heading."""
    heading = text.partition("\n")[0]
    return max(",;\t", key=heading.count)


def refuse_lines(path: str | Path, sheet: pd.DataFrame, wrong: pd.Series, column: str, expected: str) -> None:
    """Refuse a filled sheet if cells of it are wrong, and name the first of their lines.

    Parameters
    ----------
    path
        The file that the sheet is from.
    sheet
        The sheet as `read_sheet` gives it, with a column ``item``, or some of its lines.
    wrong
        Which lines are wrong.
    column
        The column that makes them wrong.
    expected
        What is expected in that column.

    Raises
    ------
    InputError
        There is a wrong line.
    """
    if not wrong.any():
        return
    line, first = sheet.index[wrong][0], sheet[wrong].iloc[0]
    item = "" if column == "item" else f" (item {first['item']})"
    raise InputError(
        f"{path}, line {line}{item}: {column} is {short(first[column])}, and {int(wrong.sum()) - 1} more "
        f"lines are wrong like it. Expected {expected}."
    )
