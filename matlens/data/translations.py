"""One text in many languages: messages of a user interface, from the catalogues of their translations.

The wheel of Weblate, whose code is never imported here, carries a catalogue of its messages for each language
(gettext's ``.po``). What is offered are whole sentences that all of these languages have, without gaps for
names or numbers and without markup, in the same order in each: with one seed, corpora of two languages are
split into the same messages, so that what differs between them is the language alone.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from matlens.errors import InputError

CATALOGUES = {
    "bg": "bg", "cs": "cs", "de": "de", "es": "es", "fr": "fr", "ga": "ga", "he": "he", "hr": "hr",
    "id": "id", "it": "it", "nl": "nl", "pl": "pl", "pt": "pt_BR", "ru": "ru", "sk": "sk", "sq": "sq",
    "tr": "tr", "uk": "uk",
}  # fmt: skip
"""Folders of the catalogues, by the code of their language; the messages themselves are English, ``en``."""
LANGUAGES = ("en", *CATALOGUES)
_FEWEST_WORDS = 5  # as corpora have it, so that no language loses a message that another keeps
# Gaps for names and numbers, markup, addresses, and what belongs to a program's text rather than to prose.
_NO_PROSE = re.compile(r"[%{}<>\\|`_\n]|https?:")
_ENTRY = re.compile(r'(msgctxt|msgid|msgid_plural|msgstr(?:\[\d+\])?) "(.*)"')
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}  # any other sign stands for itself


def messages(language: str) -> Iterator[str]:
    """Messages in a language, in the order that they have in all languages.

    Yields
    ------
    str
        A message: a sentence, or a few.

    Raises
    ------
    InputError
        The package that carries the catalogues is not installed, or a catalogue cannot be read.
    """
    folder = _catalogues()
    translated = {
        code: _translations(folder / name / "LC_MESSAGES" / "django.po") for code, name in CATALOGUES.items()
    }
    seen = {code: set[str]() for code in LANGUAGES}
    for message in next(iter(translated.values())):
        texts = {"en": message} | {code: texts.get(message, "") for code, texts in translated.items()}
        if all(map(_is_prose, texts.values())) and all(texts[code] not in seen[code] for code in texts):
            for code, text in texts.items():
                seen[code].add(text)
            yield texts[language]


def _is_prose(text: str) -> bool:
    whole = len(text.split()) >= _FEWEST_WORDS and text[-1] in ".!?"
    return whole and _NO_PROSE.search(text) is None


def _catalogues() -> Path:
    # find_spec of a top-level package locates it without importing it.
    spec = importlib.util.find_spec("weblate")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "locale"
        if path.is_dir():
            return path
    raise InputError(
        "Messages in other languages come with the package weblate, which is not installed or lacks its "
        "catalogues. Install it with: pip install --no-deps weblate==5.14.3"
    )


def _translations(path: Path) -> dict[str, str]:
    """What a catalogue has for each message; those that depend on a number or on a context are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(
            f"The catalogue {path} cannot be read ({type(error).__name__}): the package weblate is damaged. "
            "Install it anew: pip install --force-reinstall --no-deps weblate==5.14.3"
        ) from error
    translated: dict[str, str] = {}
    entry: dict[str, str] = {}
    key = ""
    for line in [*lines, ""]:
        if (read := _ENTRY.fullmatch(line)) is not None:
            key = read[1]
            entry[key] = _unescaped(read[2])
        elif line.startswith('"') and line.endswith('"') and key:
            entry[key] += _unescaped(line[1:-1])
        elif line.startswith("#,") and "fuzzy" in line:  # a guess that nobody has looked at
            entry["fuzzy"] = line
        elif not line:
            if entry.keys() == {"msgid", "msgstr"} and entry["msgid"] and entry["msgstr"]:
                translated[entry["msgid"]] = entry["msgstr"]
            entry, key = {}, ""
    return translated


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda sign: _ESCAPES.get(sign[1], sign[1]), text)
