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
    assert list(row(lam=0.5).items())[-1] == ("lam", 0.5)


def test_a_row_without_k_has_an_empty_cell() -> None:
    assert row(k=None)["k"] is pd.NA
    assert result_table([row(k=None), row()]).to_csv(index=False).splitlines()[1:] == [
        "quality,small,words,mat,1,3,precision,,0.5,0.25,0.75,8",
        "quality,small,words,mat,1,3,precision,5,0.5,0.25,0.75,8",
    ]


def test_a_table_keeps_further_columns_and_whole_layers() -> None:
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"table\.csv cannot be read as a table of pears: .*No such file"),
        ("", r"table\.csv cannot be read as a table of pears: "),
        ("name,count\na,many\n", r"table\.csv cannot be read as a table of pears: .*many"),
        ("other\n1\n", r"table\.csv is not a table of pears: it lacks the columns name, count\."),
        ("name\na\n", r"table\.csv is not a table of pears: it lacks the columns count\."),
    ],
    ids=["absent", "empty", "wrong-type", "other-columns", "one-column-missing"],
)
def test_what_is_no_such_table_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    if content is not None:
        path.write_text(content)
    columns = {"name": "str", "count": "int64"}
    with pytest.raises(InputError, match=rf"{message}.* The orchard writes it\.$"):
        read_table(path, columns, what="a table of pears", made_by="The orchard writes it.")


def test_results_are_written_with_what_they_come_from(tmp_path: Path) -> None:
    table = result_table([row()])
    write_results(tmp_path / "new" / "folder", "quality", table, {"seed": 3})
    folder = tmp_path / "new" / "folder"
    assert (folder / "quality.csv").read_text() == table.to_csv(index=False)
    described = json.loads((folder / "quality.json").read_text())
    assert described["seed"] == 3
    assert {"python", "torch", "matlens"} <= set(described["software"])
    assert described["command"]
    assert {path.name for path in folder.iterdir()} == {"quality.csv", "quality.json"}


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


@pytest.mark.parametrize("beside", ['{"words": ["a"]}', "[1]", "3"])
def test_the_json_of_somebody_else_beside_a_table_is_not_looked_at(beside: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("value\n0.5\n")
    (tmp_path / "mine.json").write_text(beside)
    assert numbers(tmp_path / "mine.csv") == [0.5]


def test_a_pipe_a_long_line_and_a_large_table_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(InputError, match=r"pipe\.csv is a folder, a pipe or a device"):
        numbers(tmp_path / "pipe.csv")
    (tmp_path / "long.csv").write_text("value\n" + "1" * (3 * 2**20))
    monkeypatch.setenv("MATLENS_MAX_LINE_MIB", "2")
    with pytest.raises(InputError, match=r"long\.csv has more than 2 MiB in one line.* MATLENS_MAX_LINE_MIB"):
        numbers(tmp_path / "long.csv")
    monkeypatch.setenv("MATLENS_MAX_TABLE_MIB", "1")
    with pytest.raises(InputError, match=r"long\.csv has more than 1 MiB in a table.* MATLENS_MAX_TABLE_MIB"):
        numbers(tmp_path / "long.csv")
