"""Dictionaries as fairseq writes them, and text taken apart as WikiText is."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import word_dictionary

from matlens import InputError
from matlens.data import Corpus
from matlens.models.families.wikilm.dictionary import SPECIAL, WordDictionary, words_of

TEXTS = {
    "The well-known 1,000 men didn't go, at 3.5 km.":
        "The well @-@ known 1 @,@ 000 men didn 't go , at 3 @.@ 5 km .",
    "It's 'old' (sic)": "It 's ' old ' ( sic )",
    "a well @-@ known <unk> , it 's 1 @,@ 000": "a well @-@ known <unk> , it 's 1 @,@ 000",
    "Straße — 日本": "Straße — 日本",
}  # fmt: skip


def made_of(counts: dict[str, int]) -> WordDictionary:
    own = {word: count for word, count in counts.items() if word not in SPECIAL}
    return WordDictionary((*SPECIAL, *own), (*(0,) * len(SPECIAL), *own.values()))


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_taken_apart_as_in_wikitext(text: str) -> None:
    words = TEXTS[text].split()
    assert words_of([text]) == [words]
    numbered = made_of(dict.fromkeys(words, 1))
    ids = numbered.tokenizer()(text)["input_ids"]
    assert [numbered.words[i] for i in ids] == ["</s>", *words]
    assert numbered.tokenizer().decode(ids[1:]) == " ".join(words)


def test_words_of_the_dictionary_stay_whole_between_spaces() -> None:
    """WikiText's own words have signs in them; a sentence's last word is no such word, though it was seen."""
    seen = {"U.S.": 900, "H.": 40, "H": 30, "...": 5, ".": 9000, "(_": 1, "in": 80, "the": 80, "album.": 3,
            "album": 400, "No": 9, "No.": 9, "a^b|c": 2, "@-@": 7, "\"": 8, "based": 2}  # fmt: skip
    dictionary = made_of(seen)
    tokenizer = dictionary.tokenizer()
    apart = 'the U.S. @-@ based H. album . No. ... a^b|c "'
    for text, words in {
        apart: apart.split(),
        "in the U.S. No... album.": ["in", "the", "U.S.", "No", ".", ".", ".", "album", "."],
        '"the U.S."': ['"', "the", "<unk>", ".", "<unk>", ".", '"'],
        "a^bc 5.5": ["<unk>", "<unk>", "<unk>", "<unk>", ".", "<unk>"],  # no @.@ where there is none
    }.items():
        assert [dictionary.words[i] for i in tokenizer(text).input_ids[1:]] == words, text


def test_words_are_numbered_by_frequency_and_filled_up() -> None:
    text = " ".join(3 * ["b", "a"] + 9 * ["c"] + ["rare"] + 50 * ["<unk>"])
    made = word_dictionary(Corpus("c", (text,), 1, 0, 0, 0), n_words=7)
    assert made.words == (*SPECIAL, "c", "a", "b", "madeupword0000")
    assert made.counts == (0, 0, 0, 0, 9, 3, 3, 0)
    tokenizer = made.tokenizer(longest=12)
    assert tokenizer("a rare c").input_ids == [2, 5, 3, 4]
    assert tokenizer.model_max_length == 12
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 3)


def test_a_file_is_read_as_fairseq_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_text("the 10\nof a 3\na 2\nthe 4 #fairseq:overwrite\n")
    dictionary = WordDictionary.read(path)
    assert dictionary.words == (*SPECIAL, "<overwritten 4>", "of a", "a", "the")
    assert dictionary.counts[4:] == (10, 3, 2, 4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"word\n", "Line 1"),
        (b"a 1\na 2\n", "second time"),
        (b"a " + b"9" * 40 + b"\n", "Line 1"),
    ],
)
def test_files_that_are_no_dictionary_are_refused(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        WordDictionary.read(path)
