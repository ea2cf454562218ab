"""The one table of results: its columns, how a row is built, and how tables are read and written.

A table has one row a number: ``experiment, model, corpus, method, layer, target, metric, k, value, low,
high, n``. ``low`` and ``high`` bound the 95% interval where there is one; next to the table lies a JSON that
says what it was made from and by what.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from matlens.errors import InputError, check, checked
from matlens.io import bounds
from matlens.io.artifact import command_line, software_versions
from matlens.io.cells import guarded_table, original_table
from matlens.io.files import (
    SEAL,
    check_seal,
    read_bounded,
    read_json,
    sealed,
    system_errors,
    to_json,
    write_together,
)
from matlens.metrics import Estimate

COLUMNS = (
    "experiment", "model", "corpus", "method", "layer", "target", "metric", "k", "value", "low", "high", "n",
)  # fmt: skip


TABLE = "table"
"""The key under which the JSON next to a table says which table it is about."""


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
    """One row of a table of results.

    Parameters
    ----------
    experiment
        Which computation the number comes from.
    model, corpus
        Names of the model and of the corpus.
    method
        What is measured, such as ``mat`` or ``id``.
    layer, target
        Layers that the number is about; None where it is about all of them.
    metric, k
        What the number is, and its parameter if it has one.
    estimate
        The number with its interval and how many examples it is a mean of.
    more
        Further columns of this table.
    """
    return {
        "experiment": experiment,
        "model": model,
        "corpus": corpus,
        "method": method,
        "layer": layer,
        "target": target,
        "metric": metric,
        "k": pd.NA if k is None else k,
        **estimate._asdict(),
        **more,
    }


def result_table(rows: Iterable[Mapping[str, Any]], *more: str) -> pd.DataFrame:
    """Make a table of rows of `result_row`, with the columns in their order and ``more`` after them.

    Layers are whole numbers also where some rows are about all layers.
    """
    table = pd.DataFrame(list(rows), columns=[*COLUMNS, *more])
    unnamed = [column for column in ("layer", "target") if table[column].isna().any()]
    return table.astype(dict.fromkeys(unnamed, "Int64"))


@checked
def read_table(
    path: str | Path, columns: Mapping[str, str] | Sequence[str], *, what: str, made_by: str, **options: Any
) -> pd.DataFrame:
    """Read a CSV file that must have some columns.

    Parameters
    ----------
    path
        The file.
    columns
        Columns that must be there, with their types; a list of names is of texts.
    what
        What the file should be, such as ``"a table of results"``.
    made_by
        A sentence that says where such a file comes from.
    options
        Further options of `pandas.read_csv`. Empty cells are texts unless told otherwise.

    Raises
    ------
    InputError
        The file cannot be read, columns are missing, or the JSON next to it is about another table.
    """
    types = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns, "str")
    try:
        content = read_bounded(path, bounds.TABLE)
        bounds.LINE.check(max(map(len, content.splitlines()), default=0), str(path))
        check_described(Path(path), content)
        table = pd.read_csv(io.BytesIO(content), dtype=types, **{"keep_default_na": False, **options})
    except InputError:
        raise
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise InputError(f"{path} cannot be read as {what}: {error}. {made_by}") from error
    missing = [column for column in types if column not in table]
    if missing:
        raise InputError(f"{path} is not {what}: it lacks the columns {', '.join(missing)}. {made_by}")
    return original_table(table)


def csv_text(table: pd.DataFrame, **options: Any) -> str:
    """Spell out a table as CSV: what is written as CSV anywhere is written here.

    Every digit of every number stands there, and ``nan`` where a value is no number; other cells that hold
    nothing, such as intervals that there are none of, are empty. No cell is run by a spreadsheet: an
    apostrophe stands before what would be a formula, which `read_table` takes away again.

    Parameters
    ----------
    table
        The table, without its index.
    options
        Further options of `pandas.DataFrame.to_csv`.
    """
    if "value" in table and table["value"].isna().any():
        value = table["value"].astype(object)
        table = table.assign(value=value.where(value.notna(), "nan"))
    return str(guarded_table(table).to_csv(index=False, **options))


def check_columns(table: pd.DataFrame, columns: Iterable[str], *, what: str) -> None:
    """Refuse a table in memory that lacks columns, or rows.

    Parameters
    ----------
    table
        The table.
    columns
        Columns that must be there.
    what
        What the table should be, such as ``"the table of lens.exit_sweep"``.

    Raises
    ------
    InputError
        It has no rows, or columns are missing.
    """
    check(table, pd.DataFrame, "table")
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise InputError(f"The table lacks the columns {', '.join(missing)}. Expected {what}.")
    repeated = [column for column in columns if list(table.columns).count(column) > 1]
    if repeated:
        raise InputError(f"The table has the column {repeated[0]} twice. Expected {what}.")
    if table.empty:
        raise InputError(f"The table has no rows. Expected {what}.")


def write_results(folder: str | Path, name: str, table: pd.DataFrame, origin: Mapping[str, Any]) -> None:
    """Write a table as ``name.csv``, and as ``name.json`` what it was made from and by what.

    The JSON holds the hash of the table, by which `read_table` sees that it is still this one. The versions
    and the command are those of this run, unless the origin has its own: a table made from another keeps
    its.
    """
    content = csv_text(table).encode()
    made = {"software": software_versions(), "command": command_line()}
    described = made | dict(origin) | {TABLE: _describe(f"{name}.csv", content)}
    with system_errors(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_together(
            {
                Path(folder) / f"{name}.csv": content,
                Path(folder) / f"{name}.json": to_json(sealed(described)).encode(),
            }
        )


def check_described(path: Path, content: bytes | None = None) -> bool:
    """Refuse a table that is not the one which the JSON next to it describes; whether there is such a JSON.

    Parameters
    ----------
    path
        The table.
    content
        Its bytes, if they have been read already.

    Raises
    ------
    InputError
        The table or the JSON is not what was written.
    """
    beside = path.with_suffix(".json")
    if path.suffix != ".csv" or not beside.is_file():
        return False
    described = read_json(beside)
    if not isinstance(described, dict) or not (TABLE in described or SEAL in described):
        return False  # somebody else's
    check_seal(described, beside)
    if content is None:
        content = read_bounded(path, bounds.TABLE)
    if described.get(TABLE) != _describe(path.name, content):
        raise InputError(
            f"{path} is not the table that {beside.name} describes: one of them has been changed, or writing "
            "them was interrupted. Make both again."
        )
    return True


def _describe(name: str, content: bytes) -> dict[str, Any]:
    return {"file": name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
