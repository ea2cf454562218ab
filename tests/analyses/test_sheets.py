"""Sheets are written once, come back as they were filled in, and the first wrong line is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from annotation.sheets import read_sheet, refuse_lines, write_sheet, write_sheets
from hypothesis import given, settings
from hypothesis import strategies as st

from matlens import InputError

COLUMNS = ("item", "text", "mark")
TABLE = pd.DataFrame({"item": ["1", "2", "3"], "text": ["a, b", 'said "no"', "日本 ␣"], "mark": ""})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "sheet.csv"


def test_a_sheet_is_a_file_that_spreadsheets_open_as_text(path: Path) -> None:
    write_sheet(path, TABLE)
    lines = ['"item","text","mark"', '"1","a, b",""', '"2","said ""no""",""', '"3","日本 ␣",""', ""]
    assert path.read_bytes() == ("\ufeff" + "\r\n".join(lines)).encode()
    pd.testing.assert_frame_equal(read_sheet(path, COLUMNS).reset_index(drop=True), TABLE)


def test_a_sheet_that_somebody_has_filled_in_is_not_written_over(path: Path) -> None:
    write_sheet(path, TABLE)
    write_sheet(path, TABLE)
    path.write_bytes(path.read_bytes().replace(b'""\r', b'"x"\r', 1))
    filled = path.read_bytes()
    with pytest.raises(InputError, match=r"sheet\.csv is there already and holds something else: another"):
        write_sheet(path, TABLE)
    assert path.read_bytes() == filled


def test_several_sheets_are_written_together_or_none_of_them(tmp_path: Path) -> None:
    tables = {tmp_path / "first.csv": TABLE, tmp_path / "second.csv": TABLE}
    pages = {tmp_path / "page.html": "<p>é</p>"}
    (tmp_path / "second.csv").write_text("filled in")
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(InputError, match=r"second\.csv is there already"):
        write_sheets(tables, pages)
    assert not (tmp_path / "first.csv").exists()
    assert (tmp_path / "page.html").read_text() == "old"
    (tmp_path / "second.csv").unlink()
    write_sheets(tables, pages)
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "<p>é</p>"
    assert (tmp_path / "first.csv").read_bytes() == (tmp_path / "second.csv").read_bytes()


def test_a_sheet_cannot_be_written_where_a_file_is_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_sheet(tmp_path / "file" / "sheet.csv", TABLE)


def saved(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding=encoding, newline="")
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", [",", ";"])
def test_a_sheet_is_read_as_spreadsheets_save_it(separator: str, end: str, encoding: str, path: Path) -> None:
    lines = ["more;item;text;mark", "x;1;' a ; b'; 1 ", ";2;nan;NA", ""]
    text = end.join(lines).replace(";", separator).replace("'", '"')
    sheet = read_sheet(saved(path, text, encoding), COLUMNS, unchanged=["text"])
    assert list(sheet.columns) == list(COLUMNS)
    assert sheet.to_numpy().tolist() == [["1", f" a {separator} b", "1"], ["2", "nan", "NA"]]
    assert sheet.index.tolist() == [2, 3]
    assert read_sheet(path, COLUMNS)["text"].tolist() == [f"a {separator} b", "nan"]


def test_empty_lines_are_left_out_and_counted(path: Path) -> None:
    sheet = read_sheet(saved(path, "item,text,mark\n1,a,x\n\n,,\n , ,\n2,b,\n,,\n"), COLUMNS)
    assert sheet.to_numpy().tolist() == [["1", "a", "x"], ["2", "b", ""]]
    assert sheet.index.tolist() == [2, 6]


@settings(max_examples=50)
@given(
    marks=st.lists(
        st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=5), min_size=1, max_size=4
    )
)
def test_what_is_filled_in_is_what_is_read(
    marks: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("sheets") / "sheet.csv"
    table = pd.DataFrame({"item": [str(i) for i in range(len(marks))], "text": marks, "mark": marks})
    write_sheet(path, table)
    sheet = read_sheet(path, COLUMNS, unchanged=["text"])
    assert sheet["text"].tolist() == marks
    assert sheet["mark"].tolist() == [mark.strip() for mark in marks]


@pytest.mark.parametrize(("missing", "named"), [(["mark"], "mark"), (["item", "text"], "item, text")])
def test_missing_columns_are_named(missing: list[str], named: str, path: Path) -> None:
    write_sheet(path, TABLE.drop(columns=missing))
    message = (
        rf"sheet\.csv is not a filled sheet: it lacks the columns {named}\. Expected .* item, text, mark, fil"
    )
    with pytest.raises(InputError, match=message):
        read_sheet(path, COLUMNS)


@pytest.mark.parametrize(
    "content", [None, b"", b'a,b\n"', b"\xff\xfe\x00 no text", b"item,text,mark\n1,2,3,4\n1,\xff"]
)
def test_what_is_no_sheet_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "sheet.csv").write_bytes(content)
    with pytest.raises(InputError, match=r"sheet\.csv (cannot be read as|is not) a filled sheet"):
        read_sheet(tmp_path / "sheet.csv", COLUMNS)


def test_the_first_wrong_line_is_named_as_a_spreadsheet_counts_them(path: Path) -> None:
    sheet = read_sheet(saved(path, "item,text,mark\n1,a,x\n\n2,b,y\n3,c,\n"), COLUMNS)
    refuse_lines(path, sheet, sheet["mark"] == "z", "mark", "anything but z")
    with pytest.raises(InputError) as error:
        refuse_lines(path, sheet, sheet["mark"] != "x", "mark", "x")
    assert str(error.value) == (
        f"{path}, line 4 (item 2): mark is 'y', and 1 more lines are wrong like it. Expected x."
    )
    with pytest.raises(InputError, match=r"sheet\.csv, line 5: item is '3', and 0 more"):
        refuse_lines(path, sheet[1:], sheet["item"][1:] == "3", "item", "another")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("item,text,mark\n1,a,x\n".encode("utf-16"), "it is in UTF-16 or no text"),
        ("item,text,mark\n1,a,x\n".encode("utf-16-le"), "it is in UTF-16 or no text"),
        ("item,text,mark\n1,é,x\n".encode("latin-1"), "'utf-8' codec can't decode"),
        (b"PK\x03\x04workbook", "a workbook of a spreadsheet program, not CSV"),
        (b"item,text,mark\n1,a\0b,x\n", "it has a NUL byte"),
        (b"item,text,item\n1,a,x\n", "lacks the columns mark"),
        (b"item,text,mark,item\n1,a,x,2\n", "it has the column item twice"),
        (b"item,text,mark\n1,a,x\n\n2,a,b,c\n", "line 4 has 4 cells, and the heading 3"),
        (b'item,text,mark\n1,"a"b,x\n', "cannot be read as a filled sheet"),
        (b"", "it is empty"),
    ],
)
def test_sheets_edited_by_other_means_are_told(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "sheet.csv").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_sheet(tmp_path / "sheet.csv", COLUMNS)


def test_tabs_and_empty_cells_that_a_program_has_left_out_are_read(path: Path) -> None:
    sheet = read_sheet(saved(path, "item\ttext\tmark\n1\ta\n2\tb\tx\t\t\n"), COLUMNS)
    assert sheet.to_numpy().tolist() == [["1", "a", ""], ["2", "b", "x"]]


@pytest.mark.parametrize("text", ["=1+1", "-5", "@SUM(A1)", "\t=1", " +1", "'=1", "＝1"])
def test_cells_that_a_spreadsheet_would_run_are_guarded_and_read_as_they_were(text: str, path: Path) -> None:
    write_sheet(path, pd.DataFrame({"item": ["1"], "text": [text], "mark": [""]}))
    cell = path.read_bytes().decode("utf-8-sig").split("\r\n")[1].removeprefix('"1","').removesuffix('",""')
    assert cell.startswith("'")
    assert read_sheet(path, COLUMNS, unchanged=["text"])["text"].tolist() == [text]


@pytest.mark.parametrize("kind", ["pipe", "loop", "folder"])
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "sheet.csv"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.mkdir()
    with pytest.raises(InputError):
        read_sheet(path, COLUMNS)
    with pytest.raises((InputError, OSError)):
        write_sheet(path, TABLE)


@pytest.mark.parametrize("table", [TABLE[:0], pd.DataFrame(), None])
def test_a_sheet_has_lines(table: Any, path: Path) -> None:
    with pytest.raises(InputError):
        write_sheet(path, table)


def test_a_sheet_has_a_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sheet(path, TABLE.assign(text="x" * 2**19))
    monkeypatch.setenv("MATLENS_MAX_TABLE_MIB", "1")
    with pytest.raises(InputError, match="MATLENS_MAX_TABLE_MIB"):
        read_sheet(path, COLUMNS)
