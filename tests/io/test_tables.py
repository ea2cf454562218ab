"""The table of results: its columns, its rows, and CSV files that are not what they should be."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from damage import harmed, outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from matlens.errors import InputError
from matlens.io.tables import (
    csv_text,
    read_table,
    result_row,
    result_table,
    write_results,
)
from matlens.metrics import Estimate


def row(**changes: Any) -> dict[str, Any]:
    described: dict[str, Any] = {
        "model": "small", "corpus": "words", "method": "mat", "layer": 1, "target": 3, "metric": "precision",
        "k": 5, "estimate": Estimate(0.5, 0.25, 0.75, 8),
    }  # fmt: skip
    return result_row("quality", **{**described, **changes})


def numbers(path: Path) -> list[float]:
    types = {"value": "float64"}
    table = read_table(path, types, what="a table", made_by="Nobody writes it.", keep_default_na=True)
    return table["value"].tolist()


def test_no_damage_to_a_table_or_to_its_origin_is_read_as_other_numbers(tmp_path):
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


# Texts

TEXTS = [
    "=", "-", "@x", "+1", "'=1+1", "\r", "a\rb", "\n", "\r\n", "a,b", '"', '""', "'", "NA", "null", "nan", "",
    "None", "007", "1e5", "True", " tea", "tea ", "\t", "\\", "\0", "a\0b", "#", "\ufeff", "\u2028", "\x1c",
    "\x85",
]  # fmt: skip
FLOATS = [i / 8 for i in range(40)]


def check_read_back(path: Path, texts: list[str], numbers: list[float]) -> None:
    plain = pd.read_csv(path, dtype={"token": str}, keep_default_na=False)
    for read in (plain, read_table(path, ["token"], what="a table", made_by="")):
        assert read["token"].tolist() == texts
        assert read["score"].tolist() == numbers
    rows = list(csv.reader(io.StringIO(path.read_bytes().decode(), newline="")))
    assert [row[0] for row in rows] == ["token", *texts]


def test_a_csv_file_has_the_texts_and_numbers_of_its_table(tmp_path):
    for texts in (TEXTS, [text for text in TEXTS if "\r" not in text], *([text] for text in TEXTS)):
        numbers = (FLOATS * 2)[: len(texts)]
        write_results(tmp_path, "t", pd.DataFrame({"token": texts, "score": numbers}), {})
        check_read_back(tmp_path / "t.csv", texts, numbers)


@settings(max_examples=50)
@given(texts=st.lists(st.text(max_size=12), min_size=1, max_size=4))
def test_a_table_comes_back_with_its_texts(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    write_results(folder, "t", pd.DataFrame({"token": texts, "score": [-0.5] * len(texts)}), {})
    check_read_back(folder / "t.csv", texts, [-0.5] * len(texts))


def test_a_column_of_another_type_and_missing_cells_stay_what_they_are():
    table = pd.DataFrame(
        {"a": [-0.5, 1.0], "b": [-1, 2], "c": [True, False], "d": ["-0.5", "x"], "-e": [None, -3]}
    )
    assert csv_text(table) == "a,b,c,d,-e\n-0.5,-1,True,-0.5,\n1.0,2,False,x,-3.0\n"
    assert csv_text(pd.DataFrame(columns=["=a"])) == "=a\n"
    assert csv_text(pd.DataFrame({"a\rb": [1]})) == '"a\rb"\r\n1\r\n'


def test_columns_that_are_not_named_have_the_types_pandas_finds(tmp_path):
    (tmp_path / "t.csv").write_text(csv_text(pd.DataFrame({"token": ["007", "NA"], "n": ["007", "8"]})))
    read = read_table(tmp_path / "t.csv", ["token"], what="a table", made_by="")
    assert read["token"].tolist() == ["007", "NA"]
    assert read["n"].tolist() == [7, 8]
