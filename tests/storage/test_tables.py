"""The table of results: its columns, its rows, and CSV files that are not what they should be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from matlens.errors import InputError
from matlens.metrics import Estimate
from matlens.storage.tables import COLUMNS, read_table, result_row, result_table, write_results


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
