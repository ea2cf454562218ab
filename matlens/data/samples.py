"""Corpora that need no download: they come in wheels, whose code is never imported here.

In gensim's are a cut of the English Wikipedia (106 whole articles as wikitext) and the Lee collection of
short news stories. The wikitext is turned into plain sentences strictly: a sentence that lost something in
the cleaning (a formula, a conversion of units, an image) is excluded rather than given with a hole.

In Weblate's is one text in many languages: the messages of its user interface (gettext's ``.po``). Offered
are whole sentences that all of these languages have, without gaps for names or numbers and without markup,
in the same order in each: with one seed, corpora of two languages are split into the same messages, so that
what differs between them is the language alone.
"""

import bz2
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import mwparserfromhell
from mwparserfromhell.nodes import ExternalLink, Heading, HTMLEntity, Node, Tag, Template, Text, Wikilink
from mwparserfromhell.wikicode import Wikicode
from sentencex import segment

from matlens.errors import InputError
from matlens.parallel import Bar

_WIKIPEDIA_FILE = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_NEWS_FILES = ("lee_background.cor", "lee.cor")
_GENSIM = "'matlens[samples]'"

# Private-use characters mark where something visible was cut out (a hole: the sentence is not
# whole any more) and where a footnote stood (nothing is missing, but a space may be).
_HOLE, _FOOTNOTE = "\ue000", "\ue001"

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# Removed before parsing: italics left open in a footnote make the parser take it for text.
_REFERENCE = re.compile(r"<ref\b[^<>]*?/>|<ref\b[^<>]*>.*?</ref\s*>", re.DOTALL | re.IGNORECASE)

# What follows names no template, tag or section that these articles do not have.
_FOOTNOTE_TEMPLATE = re.compile(
    r"#tag:ref|better source|by whom|citation needed|clarify|dubious|efn|failed verification|full|page needed"
    r"|refn|rp|sfnp?|when|which|who"
)
_CHARACTER_TEMPLATES = {"nbsp": " ", "spaces": " ", "'s": "'s", "snd": " – ", "mdashb": "—"}
# Templates that show one of their positional parameters, and which.
_SHOWN_PARAMETER = {"lang": "2", "nowrap": "1", "nihongo": "1", "sc": "1"}

_INVISIBLE_LINK = re.compile(r"\s*(?:file|image|category|media)\s*:", re.IGNORECASE)
_TRANSPARENT_TAG = re.compile(r"b|blockquote|div|i|nowiki|small|sub")
_BACK_MATTER = re.compile(r"further reading|gallery|references")

_START = re.compile(r"[\"']?[^\W_]")
_END = re.compile(r"[.!?][\"'”’)\]]*$")
_MALFORMED = re.compile(r"</?\w")  # markup that the parser could not read
_RESIDUE = re.compile(  # of markup, and traces of a removal
    rf"[{_HOLE}{{}}<>|*^\\]|''|\[\s*\]|(?<!\.)\.\.(?!\.)|[a-z]{{2}}[.!?][A-Z]"
)
# The splitter takes the dot of "2. " in a running enumeration for a full stop.
_CUT_OFF = re.compile(r"(?:[:;]|\band) \(?\d\.$")
# It also keeps a quotation of many sentences in one piece; no single sentence here is this long.
_MAX_WORDS = 150


def wikipedia_sample() -> Iterator[str]:
    """Sentences of prose from 106 articles of the English Wikipedia (2016), article by article."""
    for text in Bar(_articles(), desc="wikipedia-sample", unit=" articles", leave=False):
        for paragraph in _paragraphs(_plain_article(text)):
            yield from _sentences(paragraph)


def news_sample() -> Iterator[str]:
    """Sentences from 349 short news stories (the Lee collection), story by story."""
    for name in _NEWS_FILES:
        path = _in_wheel("gensim", f"test/test_data/{name}", _GENSIM)
        # One pound sign tells that the stories are not UTF-8.
        for story in path.read_text(encoding="latin-1").split("\n"):
            yield from _sentences(_repair(story))


def _in_wheel(package: str, path: str, install: str) -> Path:
    """A file in an installed package."""
    # find_spec of a top-level package locates it without importing it.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        if (place := Path(folder, path)).exists():
            return place
    raise InputError(f"The sample is {path} of the package {package}. Install it with: pip install {install}")


def _articles() -> Iterator[str]:
    """Wikitext of the articles."""
    with bz2.open(_in_wheel("gensim", f"test/test_data/{_WIKIPEDIA_FILE}", _GENSIM)) as stream:
        for _, element in ElementTree.iterparse(stream):
            if element.tag.endswith("}text"):
                yield element.text or ""
                element.clear()  # the tree would otherwise grow to the size of the dump


def _plain_article(wikitext: str) -> str:
    """Text of the sections that hold prose; lines that are not prose keep their marker."""
    pieces: list[str] = []
    is_prose = True
    wikitext = _REFERENCE.sub(_FOOTNOTE, _COMMENT.sub("", wikitext))
    for node in mwparserfromhell.parse(wikitext).nodes:
        if isinstance(node, Heading):
            is_prose = not _BACK_MATTER.fullmatch(str(node.title.strip_code()).strip().lower())
            pieces.append("\n\n")
        elif is_prose:
            pieces.append(_plain(node))
    return "".join(pieces)


def _plain_code(code: Wikicode | None) -> str:
    return "".join(map(_plain, code.nodes)) if code else ""


def _plain(node: Node) -> str:
    """Convert a piece of wikitext to plain text, with a mark for other elements."""
    if isinstance(node, Text):
        return str(node.value)
    if isinstance(node, Wikilink):
        if _INVISIBLE_LINK.match(str(node.title)):
            return _FOOTNOTE
        if node.text is not None:
            return _plain_code(node.text)
        # Without a text of its own, a link to a section shows as "Page#Section": not prose.
        return _HOLE if "#" in str(node.title) else _plain_code(node.title)
    if isinstance(node, Template):
        return _plain_template(node)
    if isinstance(node, Tag):
        return _plain_tag(node)
    if isinstance(node, HTMLEntity):
        return str(node.normalize())
    if isinstance(node, ExternalLink):
        return _plain_code(node.title) or _HOLE
    return _HOLE


def _plain_template(node: Template) -> str:
    name = str(node.name).strip().lower()
    if _FOOTNOTE_TEMPLATE.fullmatch(name):
        return _FOOTNOTE
    if name in _CHARACTER_TEMPLATES:
        return _CHARACTER_TEMPLATES[name]
    shown = _SHOWN_PARAMETER.get(name)
    if shown and node.has(shown):
        return _plain_code(node.get(shown).value)
    return _HOLE


def _plain_tag(node: Tag) -> str:
    name = str(node.tag).strip().lower()
    if name in ("li", "dd", "dt") and node.wiki_markup:
        return str(node.wiki_markup)
    contents = _plain_code(node.contents)
    return contents if _TRANSPARENT_TAG.fullmatch(name) else _HOLE  # 10<sup>5</sup> is not 105


def _paragraphs(text: str) -> Iterator[str]:
    """Join lines of prose; a blank line or one that is not prose ends a paragraph."""
    lines: list[str] = []
    for line in [*text.split("\n"), ""]:
        # A leading space is wikitext for preformatted text.
        if line.strip(_HOLE + _FOOTNOTE + " ") and line[0] not in " *#:;|!=":
            lines.append(line)
        elif lines:
            paragraph = " ".join(lines)
            # Which part of it belongs to the broken markup cannot be told.
            if not _MALFORMED.search(paragraph):
                yield _repair(paragraph)
            lines = []


def _repair(text: str) -> str:
    """Close the gaps that removed templates and footnotes left, and those that the author left."""
    text = re.sub(rf"{_FOOTNOTE}+(?=[^\W\d_a-z])", " ", text).replace(_FOOTNOTE, "")
    text = re.sub(rf"\s*\([^()]*{_HOLE}[^()]*\)", "", text)  # (pronounced ...), (Greek ...)
    text = re.sub(r"(?:\s*[;,:])+\s*\)", ")", text)
    text = re.sub(r"\s+([,.;:!?])(?=\s|$)", r"\1", text)
    return " ".join(text.split())


def _sentences(paragraph: str) -> Iterator[str]:
    for piece in segment("en", paragraph):
        sentence = " ".join(piece.split())
        if _is_whole(sentence):
            yield sentence


def _is_whole(sentence: str) -> bool:
    """Whether the sentence begins and ends as one does, and no markup or gap is in it."""
    begins = _START.match(sentence)
    return (
        begins is not None
        and not begins[0][-1].islower()
        and _END.search(sentence) is not None
        and _RESIDUE.search(sentence) is None
        and _CUT_OFF.search(sentence) is None
        and len(sentence.split()) <= _MAX_WORDS
        and all(sentence.count(a) == sentence.count(b) for a, b in ("()", "[]", "“”"))
        and sentence.count('"') % 2 == 0
    )


CATALOGUES = {
    "bg": "bg", "cs": "cs", "de": "de", "es": "es", "fr": "fr", "ga": "ga", "he": "he", "hr": "hr",
    "id": "id", "it": "it", "nl": "nl", "pl": "pl", "pt": "pt_BR", "ru": "ru", "sk": "sk", "sq": "sq",
    "tr": "tr", "uk": "uk",
}  # fmt: skip
"""Folders of the catalogues, by the code of their language; the messages themselves are English, ``en``."""
LANGUAGES = ("en", *CATALOGUES)
_WEBLATE = "--no-deps weblate==5.14.3"
_MIN_WORDS = 5  # as corpora have it, so that no language loses a message that another keeps
# Gaps for names and numbers, markup, addresses, and what belongs to a program's text rather than to prose.
_NO_PROSE = re.compile(r"[%{}<>\\|`_\n]|https?:")
_ENTRY = re.compile(r'(msgctxt|msgid|msgid_plural|msgstr(?:\[\d+\])?) "(.*)"')
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}  # any other sign stands for itself


def messages(language: str) -> Iterator[str]:
    """Messages in a language, in the order that they have in all languages."""
    translated = {
        code: _translations(f"locale/{name}/LC_MESSAGES/django.po") for code, name in CATALOGUES.items()
    }
    seen = {code: set[str]() for code in LANGUAGES}
    for message in next(iter(translated.values())):
        texts = {"en": message} | {code: texts.get(message, "") for code, texts in translated.items()}
        if all(map(_is_prose, texts.values())) and all(texts[code] not in seen[code] for code in texts):
            for code, text in texts.items():
                seen[code].add(text)
            yield texts[language]


def _is_prose(text: str) -> bool:
    whole = len(text.split()) >= _MIN_WORDS and text[-1] in ".!?"
    return whole and _NO_PROSE.search(text) is None


def _translations(catalogue: str) -> dict[str, str]:
    """Translations by message, except messages with plurals or contexts."""
    lines = _in_wheel("weblate", catalogue, _WEBLATE).read_text(encoding="utf-8").splitlines()
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
