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
from contextlib import contextmanager
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

_FOOTNOTE_TEMPLATE = re.compile(
    r"#tag:ref|according to whom|anchor|better source|by whom|citation needed|clarify|cn|dead link|dubious"
    r"|efn|fact|failed verification|full|page needed|refn|rp|sfn|sfnm|sfnp|vague|when|which|who|why"
)
_CHARACTER_TEMPLATES = {"nbsp": " ", "spaces": " ", "thinsp": " ", "'s": "'s", "snd": " – ", "mdashb": "—"}
# Templates that show one of their positional parameters, and which.
_SHOWN_PARAMETER = {"lang": "2", "nowrap": "1", "nihongo": "1", "smaller": "1", "sc": "1"}

_INVISIBLE_LINK = re.compile(r"\s*(?:file|image|category|media)\s*:", re.IGNORECASE)
_TRANSPARENT_TAG = re.compile(r"b|big|blockquote|center|div|em|i|nowiki|p|small|span|strong|sub|u")
_BACK_MATTER = re.compile(
    r"(?:selected )?bibliography|citations|external links|footnotes|further reading|gallery|notes"
    r"|notes and references|publications|references|see also|sources|works(?: cited)?"
)

_START = re.compile(r"[\"'“‘]?[^\W_]")
_END = re.compile(r"[.!?][\"'”’)\]]*$")
# Markup that the parser could not read because it was malformed, and traces of a removal.
_MALFORMED = re.compile(r"\{[{|]|[}|]\}|</?\w")
_RESIDUE = re.compile(
    rf"[{_HOLE}{{}}<>|*^\\]|\[\[|\]\]|''|==|__|://|www\.|\d\s?px\b|&#?\w+;"
    r"|\(\s*[\),;:.]|\[\s*\]|[,;]\s*[\),;.](?!\.)|(?<!\.)\.\.(?!\.)|[a-z]{2}[.!?][A-Z]"
)
# The splitter takes the dot of "2. " in a running enumeration for a full stop.
_CUT_OFF = re.compile(r"(?:[:;]|\band|\bor) \(?\d\.$")
# It also keeps a quotation of many sentences in one piece; no single sentence here is this long.
_MOST_WORDS = 150


def wikipedia_sample() -> Iterator[str]:
    """Sentences of prose from 106 articles of the English Wikipedia (2016), article by article.

    Yields
    ------
    str
        One plain-text sentence; the wikitext, its tables, lists, footnotes and formulas are gone.

    Raises
    ------
    InputError
        The package that carries the articles is not installed.
    """
    for text in Bar(_articles(), desc="wikipedia-sample", unit=" articles", leave=False):
        for paragraph in _paragraphs(_plain_article(text)):
            yield from _sentences(paragraph)


def news_sample() -> Iterator[str]:
    """Sentences from 349 short news stories (the Lee collection), story by story.

    Yields
    ------
    str
        One plain-text sentence.

    Raises
    ------
    InputError
        The package that carries the stories is not installed.
    """
    for name in _NEWS_FILES:
        with _in_wheel("gensim", f"test/test_data/{name}", _GENSIM) as path:
            # One pound sign tells that the stories are not UTF-8.
            stories = path.read_text(encoding="latin-1").split("\n")
        for story in stories:
            yield from _sentences(_repair(story))


@contextmanager
def _in_wheel(package: str, path: str, install: str) -> Iterator[Path]:
    """A file or folder in an installed package; errors of reading it say how to install it."""
    # find_spec of a top-level package locates it without importing it.
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    found = [Path(folder, path) for folder in folders if Path(folder, path).exists()]
    if not found:
        raise InputError(
            f"The sample is {path} of the package {package}. Install it with: pip install {install}"
        )
    try:
        yield found[0]
    except (OSError, EOFError, ValueError, ElementTree.ParseError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{found[0]} cannot be read ({type(error).__name__}): the package {package} is damaged. Install "
            f"it again: pip install --force-reinstall {install}"
        ) from error


def _articles() -> Iterator[str]:
    """Wikitext of the pages in the article namespace that are not redirects."""
    path = f"test/test_data/{_WIKIPEDIA_FILE}"
    with _in_wheel("gensim", path, _GENSIM) as place, bz2.open(place) as stream:
        for _, element in ElementTree.iterparse(stream):
            namespace, _, tag = element.tag.rpartition("}")
            if tag != "page":
                continue
            prefix = namespace + "}"
            if element.findtext(f"{prefix}ns") == "0" and element.find(f"{prefix}redirect") is None:
                yield element.findtext(f"{prefix}revision/{prefix}text") or ""
            element.clear()  # the tree would otherwise grow to the size of the dump


def _plain_article(wikitext: str) -> str:
    """Text of the sections that hold prose; lines that are not prose keep their marker."""
    pieces: list[str] = []
    skipped_level = 0  # level of the heading whose section is being left out, 0 for none
    wikitext = _REFERENCE.sub(_FOOTNOTE, _COMMENT.sub("", wikitext))
    for node in mwparserfromhell.parse(wikitext).nodes:
        if isinstance(node, Heading):
            if not skipped_level or node.level <= skipped_level:
                title = str(node.title.strip_code()).strip().lower()
                skipped_level = node.level if _BACK_MATTER.fullmatch(title) else 0
            pieces.append("\n\n")
        elif not skipped_level:
            pieces.append(_plain(node))
    return "".join(pieces)


def _plain_code(code: Wikicode | None) -> str:
    return "".join(map(_plain, code.nodes)) if code else ""


def _plain(node: Node) -> str:
    """Write one piece of wikitext as a reader sees it, or a mark for what has no plain form."""
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
    # 10<sup>5</sup> is not 105, but 4<sup>th</sup> is 4th.
    if _TRANSPARENT_TAG.fullmatch(name) or (name == "sup" and contents in ("st", "nd", "rd", "th")):
        return contents
    return _HOLE


def _paragraphs(text: str) -> Iterator[str]:
    """Join lines of prose; a blank line or one that is not prose ends a paragraph."""
    lines: list[str] = []
    for line in [*text.split("\n"), ""]:
        # A leading space is wikitext for preformatted text.
        if line.strip(_HOLE + _FOOTNOTE + " ") and line[0] not in " \t*#:;|!{=":
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
    text = re.sub(r"\(\s*(?:[;,:]\s*)+", "(", text)
    text = re.sub(r"(?:\s*[;,:])+\s*\)", ")", text)
    text = re.sub(r"\s*\(\s*\)", "", text)
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
        and len(sentence.split()) <= _MOST_WORDS
        and all(sentence.count(a) == sentence.count(b) for a, b in ("()", "[]", "“”"))
        and sentence.count('"') % 2 == 0
    )


# Messages in many languages

CATALOGUES = {
    "bg": "bg", "cs": "cs", "de": "de", "es": "es", "fr": "fr", "ga": "ga", "he": "he", "hr": "hr",
    "id": "id", "it": "it", "nl": "nl", "pl": "pl", "pt": "pt_BR", "ru": "ru", "sk": "sk", "sq": "sq",
    "tr": "tr", "uk": "uk",
}  # fmt: skip
"""Folders of the catalogues, by the code of their language; the messages themselves are English, ``en``."""
LANGUAGES = ("en", *CATALOGUES)
_WEBLATE = "--no-deps weblate==5.14.3"
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
    whole = len(text.split()) >= _FEWEST_WORDS and text[-1] in ".!?"
    return whole and _NO_PROSE.search(text) is None


def _translations(catalogue: str) -> dict[str, str]:
    """What a catalogue has for each message; those that depend on a number or on a context are excluded."""
    with _in_wheel("weblate", catalogue, _WEBLATE) as path:
        lines = path.read_text(encoding="utf-8").splitlines()
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
