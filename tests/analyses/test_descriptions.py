"""Descriptions are the first definition of a WordNet, whichever is installed, and one that is not is told."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from annotation.concept_sheets import (
    PATTERNS_FILE,
    TOKENS_FILE,
    read_concept_sheets,
    render_page,
    sheet_code,
    write_concept_sheets,
)
from annotation.concepts import SAMPLE_COLUMNS
from annotation.descriptions import LONGEST, WordNet

from matlens import InputError

ENTRIES = {
    "tea": ["a hot\n drink", "a late meal"], "leading": ["thin strip of <metal>"], "long": ["x" * 500],
    "March": ["a month"], "in": ["a unit of length"],
}  # fmt: skip


class Synset:
    def __init__(self, text: str) -> None:
        self.text = text

    def definition(self) -> str:
        return self.text


def synsets(word: str) -> list[Synset]:
    return [Synset(text) for text in ENTRIES.get(word.removesuffix("s"), [])]


def install(patch: pytest.MonkeyPatch, name: str | None, *, empty: bool = False) -> None:
    """Let a package be the only one that is installed, as far as it is used, with or without its data."""
    for each in ("nltk", "nltk.corpus", "wn", "wn.morphy"):
        patch.setitem(sys.modules, each, None)
    modules: dict[str, Any] = {each: ModuleType(each) for each in ("nltk", "nltk.corpus", "wn", "wn.morphy")}

    def refuse(**_: Any) -> None:
        if empty:
            raise LookupError("\n*****\n  Resource wordnet not found.\n more\n*****")

    class Lexicon:
        def __init__(self, *, lang: str, lemmatizer: Any = None) -> None:
            if empty:
                raise modules["wn"].Error("no lexicon found with lang='en'")
            assert lang == "en"
            self.synsets = synsets if lemmatizer == "bases" else None

    modules["nltk.corpus"].wordnet = ModuleType("wordnet")
    modules["nltk.corpus"].wordnet.__dict__.update(synsets=synsets, ensure_loaded=refuse)
    modules["wn"].__dict__.update(Error=type("Error", (Exception,), {}), Wordnet=Lexicon)
    modules["wn.morphy"].Morphy = lambda plain: "bases"
    for each, module in modules.items():
        if name is not None and each.partition(".")[0] == name:
            patch.setitem(sys.modules, each, module)


@pytest.mark.parametrize("name", ["nltk", "wn"])
def test_a_token_is_described_by_its_first_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, name)
    wordnet = WordNet()
    assert wordnet.source == name
    tokens = ["␣tea", " teas", "Tea", "␣March", "leading", "in", "zzz", "1/2", "␣", "x", ""]
    assert [wordnet.describe(token) for token in tokens] == [
        "a hot drink", "a hot drink", "a hot drink", "a month", "thin strip of <metal>", "a unit of length",
        "", "", "", "", "",
    ]  # fmt: skip
    assert wordnet.describe("long") == "x" * (LONGEST - 1) + "…"


@pytest.mark.parametrize("name", [None, "nltk", "wn"])
def test_without_a_wordnet_the_way_to_one_is_told(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, name, empty=True)
    reason = {"nltk": "nltk: Resource wordnet not found.;", "wn": "no lexicon found", None: "nltk"}[name]
    with pytest.raises(InputError, match=f"No WordNet is installed .*{reason}.*pip install nltk"):
        WordNet()


def test_sheets_show_descriptions_and_are_read_as_without(tmp_path: Any) -> None:
    tokens = ["␣tea", "leading", "zzz", "=1"]
    rows = [(1, "m", "none", "values", 0, "L0D0", rank, 7, each) for rank, each in enumerate(tokens, 1)]
    sample = pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))
    meanings = {"␣tea": "a hot drink", "leading": "thin strip of <metal>"}
    code = sheet_code(sample)
    write_concept_sheets(sample, tmp_path, describe=lambda token: meanings.get(token, ""))
    page = (tmp_path / "sheet.html").read_text()
    assert "<small>a hot drink</small>" in page
    assert "<small>thin strip of &lt;metal&gt;</small>" in page
    assert page.count("<small>") == 2
    assert "<small>" not in render_page(sample)
    sheet = pd.read_csv(tmp_path / TOKENS_FILE, keep_default_na=False, dtype=str)
    assert sheet["meaning"].tolist() == ["a hot drink", "thin strip of <metal>", "", ""]
    assert set(sheet["sheet"]) == {code}
    sheet["patterns"] = ["1", "1", "1", "1"]
    sheet.to_csv(tmp_path / TOKENS_FILE, index=False)
    patterns = pd.read_csv(tmp_path / PATTERNS_FILE, keep_default_na=False, dtype=str)
    patterns.loc[0, "class"] = "semantic"
    patterns.to_csv(tmp_path / PATTERNS_FILE, index=False)
    assert len(read_concept_sheets(tmp_path, sample).marks) == 4
