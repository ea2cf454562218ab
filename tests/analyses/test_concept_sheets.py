"""Sheets of concepts show items and tokens and no more, and what is filled in is what is read."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from annotation.concept_sheets import (
    CLASSES,
    PATTERNS_FILE,
    TOKENS_FILE,
    read_concept_sheets,
    render_page,
    write_concept_sheets,
)
from annotation.concepts import SAMPLE_COLUMNS
from hypothesis import given, settings
from hypothesis import strategies as st
from injections import INJECTIONS

from matlens import InputError
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
    """What a browser finds: elements with the names of their attributes, and tokens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, list[str]]] = []
        self.tokens: list[str] = []
        self._in_token = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, [name for name, _ in attrs]))
        if ("class", "token") in attrs:
            self._in_token = True
            self.tokens.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_token = self._in_token and tag != "span"

    def handle_data(self, data: str) -> None:
        if self._in_token:
            self.tokens[-1] += data


def script(text: str) -> str:
    return text[text.index("<script>") : text.index("</script>")]


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.one_of(st.text(max_size=8), st.sampled_from(NASTY + INJECTIONS)), min_size=1, max_size=5),
        min_size=1,
    )
)
def test_every_token_comes_back_exactly_from_the_page(items):
    """Shown and never run: the page has the elements and the script of a page with plain tokens."""
    page, plain = (render_page(sample(each)) for each in (items, [["a"] * len(tokens) for tokens in items]))
    reader = Reader(page)
    assert reader.tokens == [visible(token) for tokens in items for token in tokens]
    assert reader.elements == Reader(plain).elements
    assert not {"src", "href", "action"} & {name for _, names in reader.elements for name in names}
    assert page.count("<script") == 1
    # No token is within the script, where escapes of HTML would not hold: it is the same for all sheets.
    assert script(page) == script(plain)


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
def test_what_is_filled_in_is_what_is_read(data, separator, tmp_path_factory):
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
def folder(tmp_path):
    """A filled sheet of `sized`, correct."""
    write_concept_sheets(sized(), tmp_path)
    fill(tmp_path, {(2, rank): [1] for rank in range(1, 5)}, [(2, 1, "drinks", "semantic")])
    return tmp_path


def change(path: Path, rows: list[int], column: str, value: str) -> None:
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table.loc[rows, column] = value
    table.to_csv(path, index=False)


@pytest.mark.parametrize(
    ("file", "rows", "column", "value", "message"),
    [
        (TOKENS_FILE, [3], "item", "4", "every item, rank and token once"),
        (TOKENS_FILE, [3], "rank", "1", "every item, rank and token once"),
        (TOKENS_FILE, [3], "patterns", "1,2", "item 1: patterns must be empty"),
        (TOKENS_FILE, [3, 4], "patterns", "1.0", "item 1: patterns must be empty"),
        (TOKENS_FILE, [3, 4], "patterns", "2", "item 1: pattern must be one with a class"),
        (TOKENS_FILE, [2, 4], "sheet", "s0", "item 1: sheet must be s"),
        (TOKENS_FILE, list(range(18)), "patterns", "", "must be filled in"),
        (PATTERNS_FILE, [0], "class", "semntic", "item 2: class must be one of semantic"),
        (PATTERNS_FILE, [0], "item", "9", "item 9: item must be one of the sample"),
        (PATTERNS_FILE, [1], "class", "names", None),
    ],
)  # fmt: skip
def test_what_is_not_valid_is_refused(file, rows, column, value, message, folder):
    change(folder / file, rows, column, value)
    if message is None:  # a pattern that no token has is valid
        assert len(read_concept_sheets(folder, sized()).patterns) == 2
        return
    with pytest.raises(InputError, match=message):
        read_concept_sheets(folder, sized())
