"""No cell of a table is a formula to a spreadsheet, and every text comes back as it was."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from matlens.io.tables import csv_text, escape_formula, original_cell, read_table, write_results

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
def test_a_formula_is_escaped_and_comes_back(text: str) -> None:
    written = escape_formula(text)
    assert original_cell(written) == text
    assert not begins_a_formula(written)
    assert written[:1] not in ("\t", "\r", "\n")


@pytest.mark.parametrize("text", ["", "plain", "'", "a-b", "1 = 1", "x@y", "‹=1›", "␣-", ", =, -"])
def test_other_text_is_unchanged(text: str) -> None:
    assert escape_formula(text) == text


def test_long_texts_take_no_time() -> None:
    for text in ("\t" * 200_000, "'" * 200_000 + "=", ";" * 200_000 + "x"):
        assert original_cell(escape_formula(text)) == text  # by a pattern that backtracks, this takes hours


def test_numbers_are_unchanged() -> None:
    table = pd.DataFrame(
        {"a": [-0.5, 1.0], "b": [-1, 2], "c": [True, False], "d": ["-0.5", "x"], "-e": [None, -3]}
    )
    assert csv_text(table).splitlines() == [
        "a,b,c,d,'-e", "-0.5,-1,True,'-0.5,", "1.0,2,False,x,-3.0"
    ]  # fmt: skip
    assert csv_text(pd.DataFrame(columns=["=a"])) == "'=a\n"


@settings(max_examples=50)
@given(texts=st.lists(TEXTS.map(lambda text: text.replace("\r", "")), min_size=1, max_size=4))
def test_a_table_comes_back_with_its_texts(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    table = pd.DataFrame({"token": texts, "score": [-0.5] * len(texts)})
    write_results(folder, "t", table, {})
    written = (folder / "t.csv").read_bytes().decode()
    rows = list(csv.reader(io.StringIO(written, newline="")))
    assert not any(begins_a_formula(cell) for cell, _ in rows)
    read = read_table(Path(folder / "t.csv"), ["token"], what="a table", made_by="")
    assert read["token"].tolist() == texts
