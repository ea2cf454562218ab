"""The table of results: its columns, its rows, and CSV files that are not what they should be."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from damage import harmed, outcome
from hypothesis import given
from hypothesis import strategies as st

from matlens.cli.printing import number_text
from matlens.errors import InputError
from matlens.io.tables import COLUMNS, read_table, result_row, result_table, write_results
from matlens.metrics import Estimate


def row(**changes: Any) -> dict[str, Any]:
    described: dict[str, Any] = {
        "model": "small", "corpus": "words", "method": "mat", "layer": 1, "target": 3, "metric": "precision",
        "k": 5, "estimate": Estimate(0.5, 0.25, 0.75, 8),
    }  # fmt: skip
    return result_row("quality", **{**described, **changes})


def test_a_row_has_the_columns_in_their_order() -> None:
    expected = ["quality", "small", "words", "mat", 1, 3, "precision", 5, 0.5, 0.25, 0.75, 8]
    assert list(row()) == list(COLUMNS)
    assert list(row().values()) == expected
    assert result_table([row(k=None), row()]).to_csv(index=False).splitlines()[1:] == [
        "quality,small,words,mat,1,3,precision,,0.5,0.25,0.75,8",
        "quality,small,words,mat,1,3,precision,5,0.5,0.25,0.75,8",
    ]


def test_a_table_has_further_columns_and_integer_layers() -> None:
    table = result_table([row(lam=0.5), row(layer=None, target=None, lam=math.nan)], "lam")
    assert list(table.columns) == [*COLUMNS, "lam"]
    assert table["layer"].dtype == table["target"].dtype == "Int64"
    assert table["layer"].tolist() == [1, pd.NA]
    assert result_table([row()])["layer"].dtype == "int64"
    assert result_table([row(layer=1.5)])["layer"].tolist() == [1.5]
    assert list(result_table([]).columns) == list(COLUMNS)


def test_a_table_is_read_back_with_its_types(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("name,count,note\nnan,3,\nNA,4,b\n")
    table = read_table(path, {"name": "str", "count": "int64"}, what="a table", made_by="Nobody writes it.")
    assert table["name"].tolist() == ["nan", "NA"]
    assert table["count"].tolist() == [3, 4]
    assert table["note"].tolist() == ["", "b"]
    texts = read_table(path, ["count"], what="a table", made_by="")
    assert texts["count"].tolist() == ["3", "4"]


@pytest.mark.parametrize("content", [None, "", "name,count\na,many\n", "other\n1\n", "name\na\n"])
def test_another_file_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    if content is not None:
        path.write_text(content)
    columns = {"name": "str", "count": "int64"}
    with pytest.raises(InputError, match=r"table\.csv .* a table of pears.* The orchard writes it\.$"):
        read_table(path, columns, what="a table of pears", made_by="The orchard writes it.")


def test_results_are_written_with_their_origin(tmp_path: Path) -> None:
    table, folder = result_table([row()]), tmp_path / "new" / "folder"
    write_results(folder, "quality", table, {"seed": 3})
    assert (folder / "quality.csv").read_text() == table.to_csv(index=False)
    described = json.loads((folder / "quality.json").read_text())
    assert described["seed"] == 3
    assert {"python", "torch", "matlens"} <= set(described["software"])
    assert described["command"]


@pytest.mark.parametrize("digits", [0, 3])
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_shown_to_its_digits(digits: int, number: float) -> None:
    text = number_text(number, digits)
    assert len(text) <= 9 + digits
    assert (float(text) == 0) == (number == 0)
    error = 0.51 * 10.0**-digits
    assert math.isclose(float(text), number, rel_tol=error, abs_tol=0 if "e" in text else error) or (
        abs(number) > 1e308
    )
    assert number_text(math.nan) == "nan"


def numbers(path: Path) -> list[float]:
    types = {"value": "float64"}
    table = read_table(path, types, what="a table", made_by="Nobody writes it.", keep_default_na=True)
    return table["value"].tolist()


def test_no_damage_to_a_table_or_to_its_origin_is_read_as_other_numbers(tmp_path: Path) -> None:
    write_results(tmp_path, "quality", result_table([row(), row(layer=2)]), {"seed": 3})
    path = tmp_path / "quality.csv"
    whole, n_refused = numbers(path), 0
    for file in (path, tmp_path / "quality.json"):
        for harm in harmed(file, 60):
            read, refusal = outcome(lambda: numbers(path))
            n_refused += refusal is not None
            assert read in (None, whole), harm
            assert refusal is None or "quality." in refusal
            assert refusal is not None or file != path, harm
    assert n_refused > 100
    path.write_text(path.read_text().replace("0.5,", "0.7,"))
    with pytest.raises(InputError, match=r"quality\.csv is not the table that quality\.json describes"):
        numbers(path)
    (tmp_path / "quality.json").unlink()  # a change that is meant
    assert numbers(path) == [0.7, 0.7]


@pytest.mark.parametrize("record", ['{"words": ["a"]}', "[1]"])
def test_a_foreign_json_next_to_a_table_is_ignored(record: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("value\n0.5\n")
    (tmp_path / "mine.json").write_text(record)
    assert numbers(tmp_path / "mine.csv") == [0.5]


def test_a_pipe_a_long_line_and_a_large_table_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(InputError, match=r"pipe\.csv must be a file"):
        numbers(tmp_path / "pipe.csv")
    (tmp_path / "long.csv").write_text("value\n" + "1" * (3 * 2**20))
    monkeypatch.setenv("MATLENS_MAX_LINE_MIB", "2")
    with pytest.raises(InputError, match=r"long\.csv has more than 2 MiB in one line.* MATLENS_MAX_LINE_MIB"):
        numbers(tmp_path / "long.csv")
    monkeypatch.setenv("MATLENS_MAX_TABLE_MIB", "1")
    with pytest.raises(InputError, match=r"long\.csv has more than 1 MiB in a table.* MATLENS_MAX_TABLE_MIB"):
        numbers(tmp_path / "long.csv")
