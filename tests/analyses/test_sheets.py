"""Sheets are never overwritten, and come back as they were filled in, however a spreadsheet saves them."""

from __future__ import annotations

import pandas as pd
import pytest
from annotation.sheets import read_sheet, sheet_text, write_sheets
from hypothesis import given, settings
from hypothesis import strategies as st

from matlens import InputError

COLUMNS = ("item", "text", "mark")
TABLE = pd.DataFrame({"item": ["1", "2", "3"], "text": ["a, b", 'said "no"', "日本 ␣"], "mark": ""})


def test_a_filled_sheet_is_not_overwritten(tmp_path):
    texts = {tmp_path / "new" / "page.html": "é", tmp_path / "new" / "sheet.csv": sheet_text(TABLE)}
    write_sheets(texts)
    write_sheets(texts)
    path = tmp_path / "new" / "sheet.csv"
    assert path.read_bytes().startswith(b'\xef\xbb\xbf"item","text","mark"\r\n"1","a, b",""\r\n')
    path.write_bytes(path.read_bytes().replace(b'""\r', b'"x"\r', 1))
    with pytest.raises(InputError):
        write_sheets({tmp_path / "new" / "page.html": "other", path: sheet_text(TABLE)})
    assert read_sheet(path, COLUMNS)["mark"].tolist() == ["x", "", ""]


@settings(max_examples=60)
@given(
    marks=st.lists(
        st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=5)
        | st.sampled_from(["=1+1", "-5", "@SUM(A1)", "'=1", "a;=cmd|' /C calc'!A0", "＝1", "nan", '"', ","]),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_every_text_comes_back(marks, tmp_path_factory):
    path = tmp_path_factory.mktemp("sheets") / "sheet.csv"
    table = pd.DataFrame({"item": [str(i) for i in range(len(marks))], "text": marks, "mark": marks})
    write_sheets({path: sheet_text(table)})
    pd.testing.assert_frame_equal(read_sheet(path, COLUMNS), table, check_dtype=False)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_sheet_is_read_as_spreadsheets_save_it(separator, encoding, tmp_path):
    lines = ["more|item|text|mark", "x|1|' a | b'|1", "", "|||", "|2|nan|"]
    text = "\r\n".join(lines).replace("|", separator).replace("'", '"')
    path = tmp_path / "sheet.csv"
    path.write_text(text, encoding=encoding, newline="")
    assert read_sheet(path, COLUMNS).to_numpy().tolist() == [
        ["1", f" a {separator} b", "1"],
        ["2", "nan", ""],
    ]
