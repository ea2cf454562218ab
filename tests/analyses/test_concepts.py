"""Samples are drawn as they should be, and filled sheets are read and counted as by hand."""

from __future__ import annotations

import itertools
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from annotation import concept_sheets, concepts, sheets
from annotation.concept_sheets import PATTERNS_FILE, TOKENS_FILE, Annotation
from annotation.concepts import KINDS, MEASURES, SAMPLE_COLUMNS
from conftest import N_LAYERS, make_sentences
from hypothesis import given, settings
from hypothesis import strategies as st
from injections import INJECTIONS
from scipy import stats
from sklearn.metrics import cohen_kappa_score

import matlens
from matlens import InputError, ffn, metrics
from matlens.models.tokens import token_texts, visible

K, PER_LAYER = 5, 2


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma3"])
def test_items_have_the_top_tokens_of_what_the_key_says_they_are(name, small_model):
    model = small_model(name)
    examples = matlens.make_examples(model, make_sentences(), sample_special=False)
    table = concepts.draw_concept_sample(model, examples, per_layer=PER_LAYER, k=K, seed=3)
    assert list(table.columns) == list(SAMPLE_COLUMNS)
    assert table["item"].tolist() == np.repeat(np.arange(1, 3 * N_LAYERS * PER_LAYER + 1), K).tolist()
    values, projection = ffn.ValueVectors(model), ffn.Projection.from_model(model)
    updates = ffn.Updates.run(model, examples.head(N_LAYERS * PER_LAYER), progress=False)
    seen = set()
    for _, lines in table.groupby("item"):
        kind, layer, vector = next(lines[["kind", "layer", "vector"]].itertuples(index=False, name=None))
        number = int(vector.split()[1].rstrip(",")) if kind != "values" else -1
        expected = {
            "values": lambda vector=vector: values.vectors([vector])[0],
            "random": lambda layer=layer, i=number: values.random(layer, PER_LAYER, seed=3)[i % PER_LAYER],
            "updates": lambda layer=layer, i=number: updates.outputs(layer)[i],
        }[kind]()
        scores = projection.unembedding @ expected
        ids = torch.tensor(lines["token_id"].to_list())
        torch.testing.assert_close(scores[ids], scores.topk(K).values)
        assert lines["token"].tolist() == list(map(visible, token_texts(model.tokenizer, ids.tolist())))
        assert lines["rank"].tolist() == list(range(1, K + 1))
        assert (lines["corpus"] == ("words" if kind == "updates" else "none")).all()
        assert kind != "values" or values.resolve(vector).layer == layer
        assert number < 0 or number // PER_LAYER == layer
        seen.add((kind, layer, vector))
    counted = pd.DataFrame(sorted(seen)).groupby([0, 1]).size()
    assert counted.to_dict() == dict.fromkeys(itertools.product(KINDS, range(N_LAYERS)), PER_LAYER)


# Tallies: items of ten tokens, two layers; which is what, and its patterns by the ranks they have

ITEMS = {1: ("values", 0), 2: ("values", 0), 3: ("values", 1), 4: ("random", 0), 5: ("random", 1),
         6: ("updates", 0), 7: ("updates", 1)}  # fmt: skip
Filled = dict[tuple[int, int], tuple[str, list[int]]]
ANNA: Filled = {
    (1, 1): ("semantic", [1, 2, 3, 4]), (1, 2): ("syntactic", [4, 5, 6, 7]),  # rank 4 is in both
    (2, 1): ("names", [1, 2, 3]),  # too small
    (3, 1): ("semantic", [1, 2, 3, 4, 5]), (3, 2): ("semantic", [4, 5, 6, 7]),
    (3, 9): ("stopwords", [7, 8, 9, 10]),
    (6, 1): ("stopwords", [1, 2, 3, 4, 5, 6]), (7, 1): ("names", [7, 8, 9, 10]),
}  # fmt: skip
#                covered, without, semantic, syntactic, names, stopwords, concepts, small
COUNTED = {
    1: (0.7, 0.7, 0.35, 0.35, 0, 0, 2, 0),
    2: (0, 0, 0, 0, 0, 0, 0, 1),
    3: (1, 0.7, 0.65, 0, 0, 0.35, 2, 0),
    4: (0, 0, 0, 0, 0, 0, 0, 0),
    5: (0, 0, 0, 0, 0, 0, 0, 0),
    6: (0.6, 0, 0, 0, 0, 0.6, 0, 0),
    7: (0.4, 0.4, 0, 0, 0.4, 0, 1, 0),
}
BEN: Filled = {
    (1, 3): ("semantic", [1, 2, 3, 4, 5]),
    (4, 1): ("names", [2, 4, 6, 8]),
    (6, 1): ("stopwords", [1, 2]),
}


def table() -> pd.DataFrame:
    rows = [
        (item, "m", "words" if kind == "updates" else "none", kind, layer, "v", rank, 0, f"t{rank}")
        for item, (kind, layer) in ITEMS.items()
        for rank in range(1, 11)
    ]
    return pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS)).sample(frac=1, random_state=0)


def annotation(name: str, filled: Filled) -> Annotation:
    marks = [(item, rank, number) for (item, number), (_, ranks) in filled.items() for rank in ranks]
    patterns = [(item, number, "", kind) for (item, number), (kind, _) in filled.items()]
    return Annotation(
        name,
        pd.DataFrame(marks, columns=["item", "rank", "pattern"]),
        pd.DataFrame(patterns, columns=["item", "pattern", "description", "class"]),
    )


def test_an_item_is_counted_as_by_hand():
    tally = concepts.tally_items(table(), annotation("anna", ANNA))
    assert tally[["kind", "layer"]].apply(tuple, axis=1).to_dict() == ITEMS
    for item, expected in COUNTED.items():
        assert tuple(tally.loc[item, list(MEASURES)]) == pytest.approx(expected), item


def test_shares_are_means_over_annotators_and_items():
    sample, both = table(), [annotation("anna", ANNA), annotation("ben", BEN)]
    for some in (both[:1], both):
        shares = concepts.tally_concepts(sample, some)
        tallies = [concepts.tally_items(sample, filled) for filled in some]
        for kind, layer, name in itertools.product(KINDS, (None, 0, 1), MEASURES):
            numbers = [item for item, key in ITEMS.items() if key[0] == kind and layer in (None, key[1])]
            each = [np.mean([tally.loc[item, name] for tally in tallies]) for item in numbers]
            same = shares["layer"].isna() if layer is None else shares["layer"] == layer
            (row,) = shares[same & (shares["method"] == kind) & (shares["metric"] == name)].itertuples()
            assert (row.n, row.k, row.model) == (len(numbers), 10, "m")
            assert row.corpus == ("words" if kind == "updates" else "none")
            assert row.value == pytest.approx(np.mean(each))
            if name not in ("concepts", "small_patterns"):
                interval = metrics.share(torch.tensor(each, dtype=torch.float64), n_entries=10 * len(each))
                assert (row.low, row.high) == pytest.approx((interval.low, interval.high))
            elif len(each) > 1 and np.std(each) > 0:
                low, high = stats.t.interval(0.95, len(each) - 1, np.mean(each), stats.sem(each))
                assert (row.low, row.high) == pytest.approx((low, high))


def test_agreement_is_that_of_scikit_learn():
    sample, anna, ben = table(), annotation("anna", ANNA), annotation("ben", BEN)
    agreement = concepts.annotator_agreement(sample, [anna, ben]).set_index(["method", "metric"])
    assert set(agreement["one"]) == {"anna"}
    assert set(agreement["other"]) == {"ben"}
    for kind in ("all", *KINDS):
        items = [item for item, key in ITEMS.items() if kind in ("all", key[0])]
        flags, counts = [], []
        for filled in (ANNA, BEN):
            large = {key: pattern for key, pattern in filled.items() if len(pattern[1]) >= 4}
            inside = {(item, rank) for (item, _), (_, ranks) in large.items() for rank in ranks}
            flags.append([(item, rank) in inside for item in items for rank in range(1, 11)])
            content = [item for (item, _), (name, _) in large.items() if name != "stopwords"]
            counts.append([content.count(item) for item in items])
        assert agreement.loc[(kind, "kappa_covered"), ["value", "n"]].tolist() == [
            pytest.approx(cohen_kappa_score(*flags)), len(flags[0]),
        ]  # fmt: skip
        assert agreement.loc[(kind, "kappa_concepts"), ["value", "n"]].tolist() == [
            pytest.approx(cohen_kappa_score(*counts, weights="quadratic")), len(items),
        ]  # fmt: skip
        assert agreement.loc[(kind, "same_concepts"), "value"] == pytest.approx(np.mean(np.equal(*counts)))


# Sheets

NASTY = (
    "</script>", "<!--", '"', "'", "a,b", "&lt;", "&amp;", "]]>", "=1+1", "007", "1/2", "nan", "$sheet", "‹",
    "␣tea", "日本", "x  y ", "</span>", ";", "-->",
)  # fmt: skip


def sample(items: list[list[str]]) -> pd.DataFrame:
    rows = [
        (item, "m", "none", "values", 0, "L0D0", rank, 7, visible(token))
        for item, tokens in enumerate(items, start=1)
        for rank, token in enumerate(tokens, start=1)
    ]
    return pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))


class Reader(HTMLParser):
    """What a browser finds: elements with the names of their attributes, and texts of tokens."""

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


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.one_of(st.text(max_size=8), st.sampled_from(NASTY + INJECTIONS)), min_size=1, max_size=5),
        min_size=1,
    )
)
def test_every_token_comes_back_exactly_from_the_page(items):
    """Shown and never run: the page has the elements and the script of a page with plain tokens."""
    others = [["a"] * len(tokens) for tokens in items]
    page, plain = (concept_sheets.render_page(sample(each)) for each in (items, others))
    reader = Reader(page)
    assert reader.tokens == [visible(token) for tokens in items for token in tokens]
    assert reader.elements == Reader(plain).elements
    assert not {"src", "href", "action"} & {name for _, names in reader.elements for name in names}
    assert page.count("<script") == 1
    # No token is within the script, where escapes of HTML would not hold: it is the same for all sheets.
    one, other = (each.split("<script>")[1].split("</script>")[0] for each in (page, plain))
    assert one == other


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
            st.tuples(
                st.sampled_from(["", "hot drinks", 'a, "b"; c']), st.sampled_from(concept_sheets.CLASSES)
            ),
            min_size=1,
        )
    )
    marks: Marks = {}
    for item, number in kinds:
        for rank in data.draw(st.sets(st.integers(1, 8), min_size=1)):
            marks.setdefault((item, rank), []).append(number)
    concept_sheets.write_concept_sheets(table, folder)
    fill(folder, marks, [(*key, *value) for key, value in kinds.items()], separator)
    annotation = concept_sheets.read_concept_sheets(folder, table)
    assert annotation.name == folder.name
    triples = [(item, rank, number) for (item, rank), numbers in marks.items() for number in numbers]
    assert sorted(annotation.marks.itertuples(index=False, name=None)) == sorted(triples)
    assert {row[:2]: row[2:] for row in annotation.patterns.itertuples(index=False, name=None)} == kinds


@pytest.mark.parametrize(
    ("file", "rows", "column", "value", "message"),
    [
        (TOKENS_FILE, [3], "item", "4", "every item, rank and token once"),
        (TOKENS_FILE, [3], "rank", "1", "every item, rank and token once"),
        (TOKENS_FILE, [3, 4], "patterns", "1.0", "item 1: patterns must be empty"),
        (TOKENS_FILE, [3, 4], "patterns", "2", "item 1: pattern must be one with a class"),
        (TOKENS_FILE, [2, 4], "sheet", "s0", "item 1: sheet must be s"),
        (TOKENS_FILE, list(range(18)), "patterns", "", "must be filled in"),
        (PATTERNS_FILE, [0], "class", "semntic", "item 2: class must be one of semantic"),
        (PATTERNS_FILE, [0], "item", "9", "item 9: item must be one of the sample"),
        (PATTERNS_FILE, [1], "class", "names", None),
    ],
)  # fmt: skip
def test_what_is_not_valid_is_refused(file, rows, column, value, message, tmp_path):
    table = sample([[f"t{item}{rank}" for rank in range(6)] for item in range(3)])
    concept_sheets.write_concept_sheets(table, tmp_path)
    fill(tmp_path, {(2, rank): [1] for rank in range(1, 5)}, [(2, 1, "drinks", "semantic")])
    changed = pd.read_csv(tmp_path / file, dtype=str, keep_default_na=False)
    changed.loc[rows, column] = value
    changed.to_csv(tmp_path / file, index=False)
    if message is None:  # a pattern that no token has is valid
        assert len(concept_sheets.read_concept_sheets(tmp_path, table).patterns) == 2
        return
    with pytest.raises(InputError, match=message):
        concept_sheets.read_concept_sheets(tmp_path, table)


def test_a_filled_sheet_is_not_overwritten(tmp_path):
    table = pd.DataFrame({"item": ["1", "2"], "text": ["a, b", "=日本 ␣"], "mark": ""})
    path, page = tmp_path / "new" / "sheet.csv", tmp_path / "new" / "page.html"
    for _ in range(2):
        sheets.write_sheets({page: "é", path: sheets.sheet_text(table)})
    assert path.read_bytes().startswith(b'\xef\xbb\xbf"item","text","mark"\r\n"1","a, b",""\r\n')
    path.write_bytes(path.read_bytes().replace(b'""\r', b'"x"\r', 1))
    with pytest.raises(InputError):
        sheets.write_sheets({page: "other", path: sheets.sheet_text(table)})
    assert page.read_text("utf-8") == "é"
    read = sheets.read_sheet(path, tuple(table))
    pd.testing.assert_frame_equal(read, table.assign(mark=["x", ""]), check_dtype=False)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_sheet_is_read_as_spreadsheets_save_it(separator, encoding, tmp_path):
    lines = ["more|item|text|mark", "x|1|' a | b'|1", "", "|||", "|2|nan|"]
    text = "\r\n".join(lines).replace("|", separator).replace("'", '"')
    path = tmp_path / "sheet.csv"
    path.write_text(text, encoding=encoding, newline="")
    assert sheets.read_sheet(path, ("item", "text", "mark")).to_numpy().tolist() == [
        ["1", f" a {separator} b", "1"],
        ["2", "nan", ""],
    ]
