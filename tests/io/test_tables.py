"""The table of results: its columns, its rows, and CSV files that are not what they should be."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from damage import harmed, outcome
from hypothesis import example, given, settings
from hypothesis import strategies as st

from matlens.errors import InputError
from matlens.io.tables import (
    csv_text,
    escape_formula,
    original_cell,
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


# Formulas of spreadsheets

SIGNS = "=+-@\uff1d\uff0b\uff0d\uff20"
TEXTS = st.text(alphabet=SIGNS + " \t\r\n'\"`;|,ab1\ufeff\u200b\u00a0", max_size=12) | st.text(max_size=12)


def begins_a_formula(text: str) -> bool:
    """Whether a spreadsheet that skips what cannot be seen, and double quotes, finds a formula."""
    return text.lstrip(' \t\r\n"`\ufeff\u200b\u00a0')[:1] in {*SIGNS}


@settings(max_examples=500)
@given(TEXTS)
@example("'=1+1")
@example("\t\t=")
@example("';'=")
@example("'\tx")
def test_a_formula_is_escaped_and_comes_back(text):
    written = escape_formula(text)
    assert original_cell(written) == text
    assert not begins_a_formula(written)
    assert written[:1] not in ("\t", "\r", "\n")


def test_numbers_are_unchanged():
    table = pd.DataFrame(
        {"a": [-0.5, 1.0], "b": [-1, 2], "c": [True, False], "d": ["-0.5", "x"], "-e": [None, -3]}
    )
    assert csv_text(table).splitlines() == [
        "a,b,c,d,'-e", "-0.5,-1,True,'-0.5,", "1.0,2,False,x,-3.0"
    ]  # fmt: skip
    assert csv_text(pd.DataFrame(columns=["=a"])) == "'=a\n"


@settings(max_examples=50)
@given(texts=st.lists(TEXTS.map(lambda text: text.replace("\r", "")), min_size=1, max_size=4))
def test_a_table_comes_back_with_its_texts(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    table = pd.DataFrame({"token": texts, "score": [-0.5] * len(texts)})
    write_results(folder, "t", table, {})
    written = (folder / "t.csv").read_bytes().decode()
    rows = list(csv.reader(io.StringIO(written, newline="")))
    assert not any(begins_a_formula(cell) for cell, _ in rows)
    read = read_table(Path(folder / "t.csv"), ["token"], what="a table", made_by="")
    assert read["token"].tolist() == texts
