"""Sheets of concepts show items and tokens and no more, and what is filled in is what is read."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from annotation.concept_sheets import (
    CLASSES,
    PAGE_FILE,
    PATTERNS_FILE,
    TOKENS_FILE,
    read_concept_sheets,
    render_page,
    sheet_code,
    write_concept_sheets,
)
from annotation.concepts import SAMPLE_COLUMNS
from hypothesis import given, settings
from hypothesis import strategies as st

from matlens import InputError
from matlens.io.cells import escape_formula
from matlens.models.tokens import visible

NASTY = (
    "</script>", "<!--", '"', "'", "a,b", "&lt;", "&amp;", "]]>", "=1+1", "007", "1/2", "nan", "$sheet", "‹",
    "␣tea", "日本", "x  y ", "</span>", ";", "-->",
)  # fmt: skip


def sample(items: list[list[str]], kinds: list[str] | None = None) -> pd.DataFrame:
    rows = [
        (item, "m", "none", (kinds or ["values"] * len(items))[item - 1], 0, "L0D0", rank, 7, visible(token))
        for item, tokens in enumerate(items, start=1)
        for rank, token in enumerate(tokens, start=1)
    ]
    return pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))[list(SAMPLE_COLUMNS)]


def sized(n: int = 3, k: int = 6) -> pd.DataFrame:
    return sample([[f"t{item}{rank}" for rank in range(k)] for item in range(n)])


class Reader(HTMLParser):
    """What a browser finds: tokens by item, scripts, and whatever would be loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.items: list[list[str]] = []
        self.tags: list[str] = []
        self.attributes: list[list[str]] = []
        self.linked: list[str] = []
        self._inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.attributes.append(list(given))
        self.linked += [name for name in given if name in ("src", "href", "action")]
        if "data-item" in given:
            self.items.append([])
        if given.get("class") == "token":
            self._inside = True
            self.items[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "span"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.items[-1][-1] += data


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.one_of(st.text(max_size=8), st.sampled_from(NASTY)), min_size=1, max_size=5), min_size=1
    )
)
def test_every_token_comes_back_exactly_from_the_page(items: list[list[str]]) -> None:
    reader = Reader(render_page(sample(items)))
    assert reader.items == [[visible(token) for token in tokens] for tokens in items]
    assert reader.tags.count("script") == 1
    assert reader.linked == []
    fields = reader.tags.count("input"), reader.tags.count("select")
    assert fields == (sum(map(len, items)) + 3 * len(items), 3 * len(items))


ATTACKS = (
    "<script>document.title = 1</script>", "</script><script>x()</script>", "<img src=x onerror=x()>",
    "\" onfocus=\"x()", "' onmouseover='x()", "</span></li></ol></section>", "{{ code }}", "{% for a in b %}",
    "javascript:x()", "<!--", "]]>", "&lt;b&gt;", "<svg/onload=x()>", "${x()}", "`+x()+`", "\u2028",
)  # fmt: skip


def script(text: str) -> str:
    return text[text.index("<script>") : text.index("</script>")]


def test_tokens_are_shown_and_never_run() -> None:
    """Whatever tokens hold, the page has the elements and the script of a page with plain tokens."""
    attacked, plain = (render_page(sample([list(tokens)] * 2)) for tokens in (ATTACKS, ["a"] * len(ATTACKS)))
    page, harmless = Reader(attacked), Reader(plain)
    assert page.items == [[visible(token) for token in ATTACKS]] * 2
    assert page.tags == harmless.tags
    assert page.attributes == harmless.attributes
    assert attacked.count("<script") == attacked.count("</script") == 1
    code, other = sheet_code(sample([list(ATTACKS)] * 2)), sheet_code(sample([["a"] * len(ATTACKS)] * 2))
    assert f'data-sheet="{code}"' in attacked
    # No token is within the script, where escapes of HTML would not hold: it is the same for all sheets.
    assert script(attacked) == script(plain)
    assert not [token for token in (code, other, *ATTACKS[:9]) if token in script(attacked)]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = render_page(sized())
    assert not re.search(r"https?:|@import|url\(|\{[{%]|[%}]\}", text)
    for name in CLASSES:
        assert f"<option>{name}</option>" in text
    assert "at least four" in text


def test_a_sheet_gives_away_nothing_but_items_and_tokens(tmp_path: Path) -> None:
    """Whatever the key says, the files are the same to the byte."""
    items = [["a", "b"], ["c", "d"], ["e", "f"]]
    key = sample(items, ["values", "random", "updates"])
    other_key = sample(items, ["updates", "updates", "random"]).assign(
        layer=29, vector="L29D1", model="x", corpus="y", token_id=3
    )
    folders = [tmp_path / name for name in ("one", "other")]
    for table, folder in zip((key, other_key), folders, strict=True):
        write_concept_sheets(table.sample(frac=1, random_state=len(folder.name)), folder)
    for name in (TOKENS_FILE, PATTERNS_FILE, PAGE_FILE):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    changed = [["a", "b"], ["d", "c"], ["e", "f"]]
    assert sheet_code(sample(changed)) != sheet_code(key)


def test_tokens_look_like_text_to_a_spreadsheet(tmp_path: Path) -> None:
    write_concept_sheets(sample([list(NASTY)]), tmp_path)
    table = pd.read_csv(tmp_path / TOKENS_FILE, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    assert table["token"].tolist() == [f"‹{token}›" for token in NASTY]
    assert (tmp_path / TOKENS_FILE).read_bytes().startswith(b"\xef\xbb\xbf")


def test_what_an_annotator_has_filled_in_is_not_written_over(tmp_path: Path) -> None:
    table = sized()
    paths = write_concept_sheets(table, tmp_path)
    write_concept_sheets(table, tmp_path)
    filled = (tmp_path / TOKENS_FILE).read_text().replace('""', '"1"', 1)
    (tmp_path / TOKENS_FILE).write_text(filled)
    before = [path.read_bytes() for path in paths]
    with pytest.raises(InputError, match=r"tokens\.csv is there already and holds something else"):
        write_concept_sheets(table, tmp_path)
    assert [path.read_bytes() for path in paths] == before


# Filled ones

Marks = dict[tuple[int, int], list[int]]


def fill(folder: Path, marks: Marks, patterns: list[tuple[int, int, str, str]], separator: str = ",") -> None:
    """Fill in written sheets as a person does with a spreadsheet."""
    table = pd.read_csv(folder / TOKENS_FILE, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    keys = zip(table["item"].astype(int), table["rank"].astype(int), strict=True)
    table["patterns"] = [" ".join(map(str, marks.get(key, []))) for key in keys]
    table.to_csv(folder / TOKENS_FILE, index=False, sep=separator)
    offered = pd.read_csv(folder / PATTERNS_FILE, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    sheet = offered["sheet"].iloc[0]
    rows = [
        (sheet, str(item), str(number), description, name) for item, number, description, name in patterns
    ]
    lines = pd.concat([pd.DataFrame(rows, columns=offered.columns), offered])
    lines.drop_duplicates(["item", "pattern"]).to_csv(folder / PATTERNS_FILE, index=False, sep=separator)


@settings(max_examples=40)
@given(data=st.data(), separator=st.sampled_from(",;"))
def test_what_is_filled_in_is_what_is_read(
    data: st.DataObject, separator: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, table = tmp_path_factory.mktemp("sheets"), sample([list(NASTY[:8]), list(NASTY[8:16])])
    kinds = data.draw(
        st.dictionaries(
            st.tuples(st.integers(1, 2), st.integers(1, 5)),
            st.tuples(st.sampled_from(["", "hot drinks", 'a, "b"; c']), st.sampled_from(CLASSES)),
            min_size=1,
        )
    )
    marks: Marks = {}
    for item, number in kinds:
        for rank in data.draw(st.sets(st.integers(1, 8), min_size=1)):
            marks.setdefault((item, rank), []).append(number)
    write_concept_sheets(table, folder)
    fill(folder, marks, [(*key, *value) for key, value in kinds.items()], separator)
    annotation = read_concept_sheets(folder, table)
    assert annotation.name == folder.name
    triples = [(item, rank, number) for (item, rank), numbers in marks.items() for number in numbers]
    assert sorted(annotation.marks.itertuples(index=False, name=None)) == sorted(triples)
    described = {
        (row[0], row[1]): (row[2], row[3]) for row in annotation.patterns.itertuples(index=False, name=None)
    }
    assert described == kinds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A filled sheet of `sized`, correct."""
    write_concept_sheets(sized(), tmp_path)
    fill(tmp_path, {(2, rank): [1] for rank in range(1, 5)}, [(2, 1, "drinks", "semantic")])
    return tmp_path


def change(path: Path, rows: list[int], column: str, value: str) -> None:
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table.loc[rows, column] = value
    table.to_csv(path, index=False)


def refused(folder: Path) -> str:
    with pytest.raises(InputError) as error:
        read_concept_sheets(folder, sized())
    return str(error.value)


def test_spaces_capitals_and_empty_lines_are_no_mistakes(folder: Path) -> None:
    change(folder / PATTERNS_FILE, [0], "class", " Semantic ")
    change(folder / TOKENS_FILE, [6], "patterns", " 1  1 ")
    with (folder / TOKENS_FILE).open("a") as file:
        file.write(",,,,\n")
    annotation = read_concept_sheets(folder, sized())
    assert len(annotation.marks) == 4
    assert annotation.patterns["class"].tolist() == ["semantic"]


@pytest.mark.parametrize(("file", "column"), [
    *((TOKENS_FILE, column) for column in ("sheet", "item", "rank", "token", "patterns")),
    *((PATTERNS_FILE, column) for column in ("sheet", "item", "pattern", "description", "class")),
])  # fmt: skip
def test_a_missing_column_is_named(file: str, column: str, folder: Path) -> None:
    table = pd.read_csv(folder / file, dtype=str, keep_default_na=False).drop(columns=column)
    table.to_csv(folder / file, index=False)
    assert f"{file} is not a filled sheet: it lacks the columns {column}. Expected" in refused(folder)


@pytest.mark.parametrize(
    ("file", "rows", "column", "value", "message"),
    [
        (TOKENS_FILE, [3, 5], "item", "4", r"tokens.csv, line 5: item is '4', and 1 more"),
        (TOKENS_FILE, [3], "item", "one", "line 5: item is 'one', and 0 more"),
        (TOKENS_FILE, [3], "rank", "7", "line 5 (item 1): rank is '7'"),
        (TOKENS_FILE, [3], "rank", "1", "line 5 (item 1): rank is '1', and 0 more lines are wrong like it."),
        (TOKENS_FILE, [3], "patterns", "1,2", "line 5 (item 1): patterns is '1,2'"),
        (TOKENS_FILE, [3], "patterns", "0", "line 5 (item 1): patterns is '0'"),
        (TOKENS_FILE, [3, 4], "patterns", "1.0", "line 5 (item 1): patterns is '1.0', and 1 more"),
        (TOKENS_FILE, [3, 4], "patterns", "2", "item 1, rank 4: pattern 2 has no class. Expected a line"),
        (TOKENS_FILE, [2, 4], "sheet", "s0", "line 4 (item 1): sheet is 's0', and 1 more lines are wrong"),
        (TOKENS_FILE, list(range(18)), "patterns", "", "tokens.csv is empty: no token belongs to a pattern"),
        (PATTERNS_FILE, [0], "class", "semntic", "line 2 (item 2): class is 'semntic', and 0 more lines"),
        (PATTERNS_FILE, [0], "class", "semntic", "(did you mean semantic?)"),
        (PATTERNS_FILE, [0], "class", "", "line 2 (item 2): class is ''"),
        (PATTERNS_FILE, [0], "pattern", "x", "line 2 (item 2): pattern is 'x'"),
        (PATTERNS_FILE, [0], "item", "9", "line 2: item is '9'"),
        (PATTERNS_FILE, [0], "item", "1", "item 2, rank 1: pattern 1 has no class"),
        (PATTERNS_FILE, [1], "class", "names", None),
        (PATTERNS_FILE, [4], "sheet", "s0", "patterns.csv, line 6 (item 2): sheet is 's0'"),
    ],
)  # fmt: skip
def test_each_mistake_is_named_with_its_first_line(
    file: str, rows: list[int], column: str, value: str, message: str | None, folder: Path
) -> None:
    change(folder / file, rows, column, value)
    if message is None:  # a pattern that no token has is no mistake
        assert len(read_concept_sheets(folder, sized()).patterns) == 2
    else:
        assert message in refused(folder)


def test_a_pattern_that_is_described_twice_is_refused(folder: Path) -> None:
    table = pd.read_csv(folder / PATTERNS_FILE, dtype=str, keep_default_na=False)
    pd.concat([table, table.iloc[[0]]]).to_csv(folder / PATTERNS_FILE, index=False)
    assert "line 11 (item 2): pattern is '1', and 0 more lines are wrong like it. Expected each" in refused(
        folder
    )


def test_lines_that_were_lost_are_named(folder: Path) -> None:
    table = pd.read_csv(folder / TOKENS_FILE, dtype=str, keep_default_na=False)
    table.drop(index=[4, 16]).to_csv(folder / TOKENS_FILE, index=False)
    assert "lacks 2 of 18 lines, the first is that of item 1, rank 5" in refused(folder)


def test_a_sheet_of_another_sample_is_refused_even_if_it_has_as_many_items(folder: Path) -> None:
    other = sample([[f"u{item}{rank}" for rank in range(6)] for item in range(3)])
    with pytest.raises(
        InputError, match=r"tokens\.csv, line 2 \(item 1\): sheet .* a sheet of another sample"
    ):
        read_concept_sheets(folder, other)


@pytest.mark.parametrize("content", [None, b"", b'a,b\n"', b"sheet,item\n\xff\xfe"])
@pytest.mark.parametrize("file", [TOKENS_FILE, PATTERNS_FILE])
def test_what_is_no_sheet_is_refused(file: str, content: bytes | None, folder: Path) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    assert re.search(rf"{file} (cannot be read as|is not) a filled sheet", refused(folder))


def test_a_sheet_of_which_some_columns_were_sorted_is_refused(tmp_path: Path) -> None:
    drawn = sized()
    write_concept_sheets(drawn, tmp_path)
    table = pd.read_csv(tmp_path / TOKENS_FILE, dtype="str", keep_default_na=False)
    table.loc[[1, 2], "token"] = table.loc[[2, 1], "token"].to_numpy()
    table.to_csv(tmp_path / TOKENS_FILE, index=False)
    with pytest.raises(
        InputError, match=r"line 3 \(item 1\): token is '‹t02›', and 1 more .*‹t01›, as it was"
    ):
        read_concept_sheets(tmp_path, drawn)


@pytest.mark.parametrize(
    "table",
    [
        sized()[:0], sized().drop(columns="token"), pd.concat([sized(), sized()]), sized().assign(token=1.0),
        sized().assign(item="x"), pd.DataFrame(), None,
    ],
)  # fmt: skip
def test_what_is_no_sample_is_told(table: Any, tmp_path: Path) -> None:
    for work in (sheet_code, lambda table: write_concept_sheets(table, tmp_path)):
        with pytest.raises(InputError):
            work(table)


def test_sheets_have_a_folder_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "key.csv").write_text("")
    with pytest.raises(InputError, match=r"holds other files, such as key\.csv"):
        write_concept_sheets(sized(), tmp_path)


def test_the_page_guards_cells_as_the_tables_do() -> None:
    """By the page's own expression, which means the same to Python as it does to a browser."""
    line = next(line for line in render_page(sized()).splitlines() if "const formula" in line)
    formula = re.fullmatch(r"\s*const formula = /(.*)/gu;", line)
    assert formula is not None
    assert not re.search(r"\(\?[^:<=!]|\\[^sxutrn-]|[+*}]\+", formula[1])  # nothing that either alone knows
    draw = random.Random(0)
    texts = [
        "".join(draw.choices("=+-@＝ \t'\"`;|,ab1\ufeff\u200b−", k=draw.randint(0, 9))) for _ in range(2000)
    ]
    assert [re.sub(formula[1], "'", text) for text in texts] == [escape_formula(text) for text in texts]
