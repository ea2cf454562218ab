"""No cell of a table is a formula to a spreadsheet, and every text comes back as it was."""

from __future__ import annotations

import ast
import csv
import io
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import matlens
from matlens.io.cells import escape_formula, guarded_table, original_cell
from matlens.io.tables import csv_text, read_table, write_results

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
def test_what_would_run_is_guarded_and_comes_back(text: str) -> None:
    written = escape_formula(text)
    assert original_cell(written) == text
    assert not begins_a_formula(written)
    assert written[:1] not in ("\t", "\r", "\n")
    # Nor do the cells that a spreadsheet with another separator makes of it.
    assert not any(begins_a_formula(part) for part in written.replace("|", ";").split(";"))


@pytest.mark.parametrize("text", ["", "plain", "'", "a-b", "1 = 1", "x@y", "‹=1›", "␣-", ", =, -"])
def test_what_would_not_run_stays(text: str) -> None:
    assert escape_formula(text) == text


@pytest.mark.parametrize("text", ["\t" * 200_000, "'" * 200_000 + "=", ";" * 200_000 + "x", "=" * 200_000])
def test_long_texts_are_guarded_and_read_back(text: str) -> None:
    assert original_cell(escape_formula(text)) == text  # by a pattern that backtracks, this would take hours


def test_numbers_stay_numbers() -> None:
    table = pd.DataFrame(
        {"a": [-0.5, 1.0], "b": [-1, 2], "c": [True, False], "d": ["-0.5", "x"], "-e": [None, -3]}
    )
    assert csv_text(table).splitlines() == [
        "a,b,c,d,'-e", "-0.5,-1,True,'-0.5,", "1.0,2,False,x,-3.0"
    ]  # fmt: skip
    assert list(guarded_table(pd.DataFrame(columns=["=a"])).columns) == ["'=a"]


@settings(max_examples=100)
@given(texts=st.lists(TEXTS.map(lambda text: text.replace("\r", "")), min_size=1, max_size=4))
def test_a_table_comes_back_with_its_texts(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    table = pd.DataFrame({"token": texts, "score": [-0.5] * len(texts)})
    write_results(folder, "t", table, {})
    written = (folder / "t.csv").read_bytes().decode()
    assert not any(begins_a_formula(row[0]) for row in csv.reader(io.StringIO(written)) if row)
    back = read_table(folder / "t.csv", {"token": "str", "score": "float64"}, what="a table", made_by="")
    assert back["token"].tolist() == [text.replace("\0", "") for text in texts] or "\0" in "".join(texts)
    assert back["score"].tolist() == table["score"].tolist()


def test_tables_are_written_and_read_in_one_place() -> None:
    """So that no cell goes another way: what writes CSV is `csv_text`, what reads it `read_table`."""
    root = Path(matlens.__file__).parent
    analyses = root.parent / "analyses"
    callers = {
        path.relative_to(root.parent).as_posix()
        for path in [*root.rglob("*.py"), *analyses.glob("*.py")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("to_csv", "to_excel", "read_csv")
    }
    assert callers == {"matlens/io/tables.py"}
