"""The one table of results: its columns, how a row is built, and how tables are read and written.

A table has one row a number: ``experiment, model, corpus, method, layer, target, metric, k, value, low,
high, n``. ``low`` and ``high`` bound the 95% interval where there is one; beside the table lies a JSON that
says what it was made from and by what.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from matlens.errors import InputError
from matlens.metrics import Estimate
from matlens.signatures import checked
from matlens.storage.folders import command_line, software_versions, system_errors, to_json, write_together

COLUMNS = (
    "experiment", "model", "corpus", "method", "layer", "target", "metric", "k", "value", "low", "high", "n",
)  # fmt: skip


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
        The file cannot be read, or columns are missing.
    """
    types = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns, "str")
    try:
        table = pd.read_csv(path, dtype=types, **{"keep_default_na": False, **options})
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as {what}: {error}. {made_by}") from error
    missing = [column for column in types if column not in table]
    if missing:
        raise InputError(f"{path} is not {what}: it lacks the columns {', '.join(missing)}. {made_by}")
    return table


def require_columns(table: pd.DataFrame, columns: Iterable[str], *, what: str) -> None:
    """Refuse a table in memory that lacks columns, or rows.

    Parameters
    ----------
    table
        The table.
    columns
        Columns that must be there.
    what
        What the table should be, such as ``"the table of lens.top_predictions"``.

    Raises
    ------
    InputError
        It has no rows, or columns are missing.
    """
    missing = [column for column in columns if column not in table]
    if missing:
        raise InputError(f"The table lacks the columns {', '.join(missing)}. Expected {what}.")
    if table.empty:
        raise InputError(f"The table has no rows. Expected {what}.")


def write_results(folder: str | Path, name: str, table: pd.DataFrame, origin: Mapping[str, Any]) -> None:
    """Write a table as ``name.csv``, and as ``name.json`` what it was made from and by what."""
    described = {**origin, "software": software_versions(), "command": command_line()}
    with system_errors(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_together(
            {
                Path(folder) / f"{name}.csv": table.to_csv(index=False).encode(),
                Path(folder) / f"{name}.json": to_json(described).encode(),
            }
        )
