"""The table of results: its columns and rows, and CSV files with a JSON that describes them.

A table has one row per value. ``low`` and ``high`` bound its 95% interval, if it has one. The JSON next to a
table has its provenance and its hash.

Texts, such as tokens, are written as they are; `read_table` and ``pd.read_csv(path, dtype={"token": str},
keep_default_na=False)`` read them back. A plain ``pd.read_csv(path)`` reads the tokens ``""``, ``NA``,
``null`` and ``nan`` as missing, and a column of nothing but numbers such as ``007`` as numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from matlens.errors import InputError, check, checked, short
from matlens.io.artifact import command_line, software_versions
from matlens.io.files import CHECKSUM, checksummed, describe_file, read_json, verified, write_files
from matlens.metrics import Estimate

COLUMNS = (
    "experiment", "model", "corpus", "method", "layer", "target", "metric", "k", "value", "low", "high", "n",
)  # fmt: skip
TABLE = "table"
"""The key under which the JSON next to a table describes the CSV file."""


def result_row(
    experiment: str,
    *,
    model: str,
    corpus: str,
    method: str,
    layer: float | None,
    target: float | None,
    metric: str,
    k: float | None = None,
    estimate: Estimate,
    **more: Any,
) -> dict[str, Any]:
    """One row of a table of results; ``layer`` and ``target`` are None for all layers."""
    row = (experiment, model, corpus, method, layer, target, metric, pd.NA if k is None else k, *estimate)
    return dict(zip(COLUMNS, row, strict=True)) | more


def result_table(rows: Iterable[Mapping[str, Any]], *more: str) -> pd.DataFrame:
    """A table of rows of `result_row`, with the columns ``more`` after its own.

    Layers are integers also where some rows have none.
    """
    table = pd.DataFrame(list(rows), columns=[*COLUMNS, *more])
    unnamed = [column for column in ("layer", "target") if table[column].isna().any()]
    return table.astype(dict.fromkeys(unnamed, "Int64"))


@checked
def read_table(
    path: str | Path, columns: Mapping[str, str] | Sequence[str], *, what: str, made_by: str, **options: Any
) -> pd.DataFrame:
    """Read a CSV file that must have some columns.

    Their dtypes are str if only names are given. Errors say ``what`` the file must be, such as ``"a table of
    results"``, and end with ``made_by``, a sentence on how to create such a file. By default empty cells are
    empty texts.
    """
    types = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns, "str")
    try:
        check_described(Path(path))
        table = pd.read_csv(Path(path), dtype=types, **{"keep_default_na": False, **options})
    except InputError:
        raise
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(f"{path} cannot be read as {what}: {error}. {made_by}") from error
    missing = [column for column in types if column not in table]
    if missing:
        raise InputError(f"{path} must be {what}, but lacks the columns {', '.join(missing)}. {made_by}")
    return table


def csv_text(table: pd.DataFrame, **options: Any) -> str:
    """A table as CSV, with every digit; ``options`` are those of ``to_csv``.

    Missing values are ``nan``; other missing cells, such as intervals, are empty.
    """
    if "value" in table and table["value"].isna().any():
        value = table["value"].astype(object)
        table = table.assign(value=value.where(value.notna(), "nan"))
    texts = [*table, *table.select_dtypes(exclude="number").to_numpy().ravel()]
    # The csv module quotes a carriage return only if lines end with one.
    ends = "\r\n" if any(isinstance(text, str) and "\r" in text for text in texts) else "\n"
    return str(table.to_csv(index=False, **{"lineterminator": ends, **options}))


def check_columns(table: pd.DataFrame, columns: Iterable[str], *, what: str) -> None:
    """Raise InputError if a table lacks columns or rows."""
    check(table, pd.DataFrame, "table")
    names = list(table.columns)
    wrong = [column for column in columns if names.count(column) != 1]
    if wrong:
        raise InputError(f"The table must be {what}, but lacks or repeats the columns {', '.join(wrong)}.")
    if table.empty:
        raise InputError(f"The table must be {what}, got no rows.")


def check_one(*tables: pd.DataFrame, columns: Iterable[str] = ("model", "corpus")) -> None:
    """Raise InputError if tables that belong together are of several models or corpora."""
    for column in columns:
        values = [table[column].dropna().unique() for table in tables if column in table]
        found = list(dict.fromkeys(str(value) for of_table in values for value in of_table))
        if len(found) > 1:
            raise InputError(
                f"The table must be of one {column}, got {short(found)}. Select its rows, such as "
                f"table[table[{column!r}] == {found[0]!r}]."
            )


def write_results(folder: str | Path, name: str, table: pd.DataFrame, origin: Mapping[str, Any]) -> None:
    """Write a table as ``name.csv``, and as ``name.json`` what it was computed from.

    The JSON also holds the versions and the command of this run, unless ``origin`` has its own, and the hash
    of the table, which `read_table` verifies.
    """
    content = csv_text(table).encode()
    software = {"software": software_versions(), "command": command_line()}
    table_record = {
        "file": f"{name}.csv",
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
    }
    record = checksummed(software | dict(origin) | {TABLE: table_record})
    write_files({Path(folder) / f"{name}.csv": content, Path(folder) / f"{name}.json": record})


def check_described(path: Path) -> bool:
    """True if a JSON next to a table describes it; raises InputError if it describes another."""
    record = path.with_suffix(".json")
    if path.suffix != ".csv" or not record.is_file():
        return False
    described = read_json(record)
    if not isinstance(described, dict) or not (TABLE in described or CHECKSUM in described):
        return False  # somebody else's
    verified(described, record)
    if described.get(TABLE) != {"file": path.name, **describe_file(path)}:
        raise InputError(
            f"{path} is not the table that {record.name} describes: one of them was changed, or writing them "
            "was interrupted. Recompute both."
        )
    return True
