"""Samples are whole sentences without markup; messages are the same ones in every language."""

import hashlib
import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from matlens.data.samples import CATALOGUES, LANGUAGES, messages, news_sample, wikipedia_sample

# The whole samples


@pytest.mark.parametrize(
    ("sample", "digest"), [(wikipedia_sample, "565e76fd256cf935"), (news_sample, "1a435dfe07f6fb91")]
)
def test_the_sentences_are_those_of_the_published_tables(sample, digest):
    text = "\n".join(sample())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


# Messages in many languages

WHOLE = [
    "The file was not found here.",
    "Please sign in before you go on.",
    "This is the third whole message.",
]
HEAD = 'msgid ""\nmsgstr ""\n"Language: xx\\n"\n'


def entry(message: str, text: str, *, flags: str = "", more: str = "") -> str:
    return f'{flags}{more}msgid "{message}"\nmsgstr "{text}"\n'


def word_for_word(message: str, code: str) -> str:
    return " ".join(f"{word.strip('.')}-{code}" for word in message.split()) + "."


@pytest.fixture
def catalogues(tmp_path, monkeypatch):
    """Catalogues of three messages that all languages have."""
    for code, folder in CATALOGUES.items():
        path = tmp_path / "locale" / folder / "LC_MESSAGES" / "django.po"
        path.parent.mkdir(parents=True)
        entries = [entry(message, word_for_word(message, code)) for message in WHOLE]
        path.write_text("\n".join([HEAD, *entries]))
    spec = ModuleSpec("weblate", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "weblate" else None)
    return tmp_path / "locale"


def add(catalogues: Path, text: str, code: str = "") -> None:
    """Add an entry to the catalogue of one language, or of all."""
    for name in [CATALOGUES[code]] if code else CATALOGUES.values():
        path = catalogues / name / "LC_MESSAGES" / "django.po"
        path.write_text(path.read_text() + "\n" + text)


def test_all_languages_have_the_same_messages_in_one_order(catalogues):
    assert list(messages("en")) == WHOLE
    for code in CATALOGUES:
        assert list(messages(code)) == [word_for_word(message, code) for message in WHOLE]


@pytest.mark.parametrize(
    ("message", "text", "flags"),
    [
        ("Deleted %(n)s of all the files.", "Es sind %(n)s Dateien weg.", ""),
        ("Read the <b>manual</b> of this program.", "Ein Handbuch gibt es hier auch.", ""),
        ("Only four words here.", "Hier stehen mehr als vier Worte.", ""),
        ("This one has more than four words.", "Nur vier Worte hier.", ""),
        ("This message has not been translated.", "", ""),
        ("This message has been guessed at.", "Das hier ist nur so geraten.", "#, fuzzy, python-format\n"),
        ("This message stands for several texts.", "Das hier ist je nachdem anders.", 'msgctxt "menu"\n'),
        (WHOLE[0] + " Twice.", word_for_word(WHOLE[0], "de"), ""),
    ],
)  # fmt: skip
def test_what_one_language_lacks_or_is_no_prose_is_left_out_of_all(catalogues, message, text, flags):
    for code in CATALOGUES:
        theirs = text if code == "de" else f"Das hier ist die vierte Meldung auf {code}."
        add(catalogues, entry(message, theirs, flags=flags if code == "de" else ""), code)
    assert [len(list(messages(code))) for code in LANGUAGES] == [3] * len(LANGUAGES)


def test_messages_of_several_lines_are_joined_and_numbers_are_left_out(catalogues):
    add(catalogues, 'msgid "One file was deleted by you."\nmsgid_plural "%d files were deleted by you."\n'
        'msgstr[0] "Eine Datei ist von dir weg."\nmsgstr[1] "%d Dateien sind von dir weg."\n')  # fmt: skip
    add(catalogues, '# a note\n#: file.py:3\nmsgid ""\n"He said \\"yes\\" "\n"and then he left."\n'
        'msgstr ""\n"Er hat \\"ja\\" gesagt, "\n"und dann ging er."\n')  # fmt: skip
    assert list(messages("en"))[3:] == ['He said "yes" and then he left.']
    assert list(messages("de"))[3:] == ['Er hat "ja" gesagt, und dann ging er.']


# Without the wheel
