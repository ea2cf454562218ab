"""Words as tokens and tokens as words: what a person types and reads, and what a model's vocabulary holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from matlens.errors import InputError, Tokenizer, check_int, checked

_SPACE, _PIECE = "␣", "▁"  # as people see a leading space here, and as SentencePiece writes it
_BROKEN = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a byte that is no character by itself
_PARTS, _LONGEST = 12, 60  # tokens and characters of a word that a message shows
_LARGEST = 2**31 - 1  # token ids are kept in as many bits by tokenizers


@checked
def token_texts(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[str]:
    r"""What each token stands for in a text, its leading space kept.

    A token that is a part of a character only is written by its bytes: ``\xe2\x80``. A token that the
    vocabulary does not hold, as rows of an unembedding can be, is written by its number: ``<50300>``.

    Raises
    ------
    InputError
        A token is no whole number from 0, or there is no tokenizer.
    """
    return [_text(tokenizer, check_int(_plain(token), "A token", min=0, max=_LARGEST)) for token in tokens]


def _plain(token: Any) -> Any:
    """The number in a tensor of one."""
    return token.item() if getattr(token, "ndim", None) == 0 else token


def _text(tokenizer: Any, token: int) -> str:
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:  # a row of the unembedding that the tokenizer has no use for
        return f"<{token}>"
    if byte := _BYTE.fullmatch(piece):
        value = int(byte[1], 16)
        return chr(value) if value < 0x80 else f"\\x{value:02x}"
    text = tokenizer.decode([token])
    if _BROKEN in text:
        return _bytes(piece)
    if piece.startswith(_PIECE) and not text.startswith(" "):  # some decoders drop a text's first space
        return f" {text}"
    return text


def _bytes(piece: str) -> str:
    values = [_byte_of().get(character) for character in piece]
    if None in values:
        return piece
    return "".join(f"\\x{value:02x}" for value in values)


@cache
def _byte_of() -> dict[str, int]:
    """Which byte a character of a byte-level vocabulary stands for: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@checked
def word_token(tokenizer: Tokenizer, word: str) -> int:
    """The one token that a word is, as it is typed: in many vocabularies ``" tea"`` and ``"tea"`` differ.

    A leading space may be written ``␣`` too, as tables show it.

    Raises
    ------
    InputError
        The word is several tokens, or unknown to the tokenizer. The message says which tokens and offers
        what can be had, such as the word with a space before it.
    """
    text = f" {word[1:]}" if word.startswith(_SPACE) else word
    tokens = _encoded(tokenizer, text)
    if len(tokens) > 1 and text.startswith(" "):  # where every text gets one, this is the second
        without = _encoded(tokenizer, text[1:])
        tokens = without if len(without) == 1 and _text(tokenizer, without[0]) == text else tokens
    if len(tokens) == 1 and _is_known(tokenizer, tokens[0], text):
        return tokens[0]
    if not tokens or tokenizer.unk_token_id in tokens:
        raise InputError(
            f"The word {_quoted(text)} is not in the model's vocabulary, not even in parts. Expected a word "
            "that the tokenizer knows."
        )
    parts = ", ".join(_quoted(part) for part in token_texts(tokenizer, tokens[:_PARTS]))
    parts += f" and {len(tokens) - _PARTS} more" if len(tokens) > _PARTS else ""
    bare = text.strip()
    others = dict.fromkeys((f" {bare}", bare, f" {bare.lower()}", bare.lower(), f" {bare.capitalize()}"))
    single = [other for other in others if other != text and _is_token(tokenizer, other)]
    choice = f"these are: {', '.join(map(_quoted, single))}" if single else "one of its parts is"
    raise InputError(
        f"The word {_quoted(text)} is {len(tokens)} tokens: {parts}. Expected a word that is one token; "
        f"{choice}."
    )


@checked
def word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """The token of each word, see `word_token`.

    Raises
    ------
    InputError
        There are no words, or one is not a single token.
    """
    if not words:
        raise InputError("words must have at least one word, such as ' tea'.")
    return list(dict.fromkeys(word_token(tokenizer, word) for word in words))


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _is_token(tokenizer: Any, text: str) -> bool:
    tokens = _encoded(tokenizer, text)
    return len(tokens) == 1 and _is_known(tokenizer, tokens[0], text)


def _is_known(tokenizer: Any, token: int, text: str) -> bool:
    """Whether a token stands for a text; that of unknown words, GPT-2's end of text, does for its name."""
    return token != tokenizer.unk_token_id or text == tokenizer.unk_token


def _quoted(text: str) -> str:
    return f"'{visible(text if len(text) <= _LONGEST else text[:_LONGEST] + '...')}'"


@checked
def visible(token: str) -> str:
    """Write a token so that its spaces and line breaks can be seen."""
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)
    return f"␣{visible[1:]}" if visible.startswith(" ") else visible
