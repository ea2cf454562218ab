"""Tokenization of a model, texts of its tokens, and words of one token."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from weakref import WeakKeyDictionary

from matlens.errors import Between, InputError, NonNegativeInt, PositiveInt, Tokenizer, checked, short, warn

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PLACEHOLDER = "<|endoftext|>"  # added by a bridge to vocabularies without an end-of-text token
_SAMPLED = 64  # pieces that tell whether a vocabulary is the one that was read before
_PROBES = (
    "The capital of France is Paris.",
    "don't they'll WE'VE  two   spaces\ttab\nline\r\n",
    " leading and trailing ",
    "3.14159 1,000,000 2024-02-29 0x1F",
    "naïve café Straße ﬁn Ǆ e\u0301",
    "Привет, мир! Γειά σου κόσμε",
    "日本語の文章です。中文句子。한국어",
    "שלום עולם مرحبا",
    "🙂👩‍👩‍👧 → ∑ \u200b \ufeff",
    "def f(x):\n    return x**2  # code",
    "antidisestablishmentarianism xkqzjw",
    "a",
)
_SPACE, _PIECE = "␣", "▁"  # as people see a leading space here, and as SentencePiece writes it
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # as SentencePiece writes a byte
_MAX_PARTS, _MAX_CHARACTERS = 12, 60  # of a word that a message shows
TokenId = Annotated[int, Between(0, 2**31 - 1)]


class TextTokens(NamedTuple):
    """Token ids of a text, and which of them are special, such as a BOS."""

    ids: list[int]
    added: list[bool]


class TokenPolicy(NamedTuple):
    """A digest of how text becomes tokens, None without a tokenizer, and what is added to a text."""

    digest: str | None
    words: str


def warn_of_unknown(model: TransformerBridge, texts: Sequence[str], encoded: Sequence[TextTokens]) -> None:
    """Warn of texts that are only unknown tokens, such as another script's."""
    tokenizer = check_tokenizer(model)
    unknown = tokenizer.unk_token_id
    # By name: a BOS that the vocabulary lacks has the number of the unknown token.
    if unknown is None or tokenizer.unk_token in (tokenizer.bos_token, tokenizer.eos_token):
        return
    special = {*tokenizer.all_special_ids} - {unknown}
    nothing = [text for text, (ids, _) in zip(texts, encoded, strict=True) if {*ids} - special == {unknown}]
    if nothing:
        warn(
            f"{len(nothing):,} of {len(texts):,} texts, such as {short(nothing[0])}, are only unknown "
            "tokens. Use a model for their language."
        )


@checked
def encode_text(model: TransformerBridge, text: str, *, longest: NonNegativeInt | None = None) -> TextTokens:
    """Tokens of a text, at most ``longest``, with special tokens and the BOS of tokenizer and bridge."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError(f"{short(text)} must be valid Unicode, got half of a surrogate pair.")
    tokenizer, config = check_tokenizer(model), model.cfg
    prepend, by_tokenizer = bool(config.default_prepend_bos), bool(config.tokenizer_prepends_bos)
    bos = tokenizer.bos_token
    by_bridge = prepend and not by_tokenizer and bos is not None and len(_encoded(tokenizer, bos)) == 1
    cut: dict[str, Any] = {} if longest is None else {"truncation": True, "max_length": longest}
    # Not verbose: callers check the length of the context.
    encoded = tokenizer(
        f"{bos}{text}" if by_bridge else text, return_special_tokens_mask=True, verbose=False, **cut
    )
    ids, added = list(encoded["input_ids"]), [bool(flag) for flag in encoded["special_tokens_mask"]]
    if by_bridge and added:
        added[0] = True
    if config.tokenizer_appends_eos and tokenizer.eos_token_id is not None:
        while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
            ids, added = ids[:-1], added[:-1]
    if by_tokenizer and not prepend and tokenizer.bos_token_id is not None:
        ids, added = ids[1:], added[1:]
    if ids and max(ids) >= config.d_vocab:
        piece = tokenizer.convert_ids_to_tokens(max(ids))
        raise InputError(
            f"The text {short(text)} becomes the token {max(ids)} ({piece!r}), and the model has "
            f"{config.d_vocab} tokens. Expected the tokenizer that the model was published with."
        )
    return TextTokens(ids, added)


def check_tokenizer(model: TransformerBridge) -> Any:
    """The model's tokenizer; raises InputError if it has none."""
    if model.tokenizer is None:
        raise InputError(
            f"The model {model.cfg.model_name!r} has no tokenizer, so no text can be turned into its tokens. "
            "Boot the bridge with tokenizer=..., or give token ids instead of text."
        )
    return model.tokenizer


@checked
def token_policy(model: TransformerBridge) -> TokenPolicy:
    """The current tokenization policy of a model."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return TokenPolicy(None, "no tokenizer")
    probes = [_outcome(model, text) for text in _PROBES]
    unknown = tokenizer.unk_token_id
    parts = [[ids for ids, _ in probes], [tokenizer.mask_token_id, unknown], _vocabulary_digest(tokenizer)]
    known = [token for ids, _ in probes if isinstance(ids, list) for token in ids]
    if unknown is not None and 2 * known.count(unknown) > len(known):  # a vocabulary of few words
        parts.append([_outcome(model, text)[0] for text in _own_texts(tokenizer)])
    digest = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]
    ids, added = next(((ids, added) for ids, added in probes if isinstance(ids, list)), ([], []))
    first = next((i for i, flag in enumerate(added) if not flag), 0)
    last = next((i for i, flag in enumerate(reversed(added)) if not flag), 0)
    ends = {"in front": ids[:first], "at the end": ids[len(ids) - last :]}
    words = [
        f"{' '.join(map(repr, tokenizer.convert_ids_to_tokens(tokens)))} {place}"
        for place, tokens in ends.items()
        if tokens
    ]
    return TokenPolicy(digest, " and ".join(words) or "nothing added")


def _outcome(model: TransformerBridge, text: str) -> tuple[list[int] | str, list[bool]]:
    try:
        return encode_text(model, text)
    except Exception as error:  # some tokenizers refuse characters, which is a way to treat them
        return type(error).__name__, []


def _own_texts(tokenizer: Any) -> Iterator[str]:
    """Texts of the vocabulary's own pieces, also in capitals, which normalizers change."""
    vocabulary = _vocabulary(tokenizer)
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    sampled = [pieces[i * len(pieces) // _SAMPLED] for i in range(_SAMPLED)] if pieces else []
    for piece, following in pairwise(dict.fromkeys(sampled)):
        yield from (piece, piece.upper(), f"{piece} {following}", f"{piece}{following}")


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """All pieces and their ids, without what a bridge adds."""
    vocabulary = dict(tokenizer.get_vocab())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or PLACEHOLDER not in backend.get_vocab(with_added_tokens=False):
        # A bridge adds it where there is none, and so it tells nothing of the model.
        vocabulary.pop(PLACEHOLDER, None)
    return vocabulary


_READ: WeakKeyDictionary[Any, tuple[Any, str]] = WeakKeyDictionary()


def _vocabulary_digest(tokenizer: Any) -> str:
    """Hash all pieces and their ids; read again only where the tokenizer's size or sampled pieces change."""
    size = len(tokenizer)
    sampled = [i * size // _SAMPLED for i in range(_SAMPLED)] if size else []
    key = (size, tuple(tokenizer.convert_ids_to_tokens(sampled)))
    if tokenizer not in _READ or _READ[tokenizer][0] != key:
        pieces = sorted(_vocabulary(tokenizer).items(), key=lambda item: (item[1], item[0]))
        text = "\n".join(f"{number} {piece!r}" for piece, number in pieces)
        _READ[tokenizer] = key, hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return _READ[tokenizer][1]


@checked
def token_texts(tokenizer: Tokenizer, tokens: Iterable[TokenId]) -> list[str]:
    r"""The text of each token, with its leading space.

    Parts of a character are written as bytes (``\xe2\x80``), ids outside of the vocabulary as ``<50300>``.
    """
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return [_text(tokenizer, int(token)) for token in ids]


def _text(tokenizer: Any, token: int) -> str:
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:
        return f"<{token}>"
    if byte := _BYTE.fullmatch(piece):
        return _byte(int(byte[1], 16))
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        known = all(character in byte_of for character in piece)
        return "".join(_byte(byte_of[character]) for character in piece) if known else piece
    # Some decoders drop a text's first space.
    return f" {text}" if piece.startswith(_PIECE) and not text.startswith(" ") else text


def _byte(value: int) -> str:
    return chr(value) if value < 0x80 else f"\\x{value:02x}"


@checked
def word_token(tokenizer: Tokenizer, word: str, d_vocab: PositiveInt | None = None) -> int:
    """The token of a word, whose leading space counts and may be written ``␣``.

    Raises InputError for a word of several tokens, and for a token that a model of ``d_vocab`` tokens lacks.
    """
    text = f" {word[1:]}" if word.startswith(_SPACE) else word
    tokens = _encoded(tokenizer, text)
    if len(tokens) > 1 and text.startswith(" "):  # where every text gets one, this is the second
        without = _encoded(tokenizer, text[1:])
        tokens = without if len(without) == 1 and _text(tokenizer, without[0]) == text else tokens
    # GPT-2's end of text, its unknown token too, is one token by name.
    if len(tokens) == 1 and (tokens[0] != tokenizer.unk_token_id or text == tokenizer.unk_token):
        if d_vocab is not None and tokens[0] >= d_vocab:
            raise InputError(
                f"The word {_quoted(text)} must be one of the model's {d_vocab} tokens, got token "
                f"{tokens[0]}, which was added to the tokenizer alone. Resize the model's embeddings and "
                "train them, or use another word."
            )
        return tokens[0]
    if not tokens or tokenizer.unk_token_id in tokens:
        raise InputError(f"The word {_quoted(text)} is not in the model's vocabulary, not even in parts.")
    parts = ", ".join(_quoted(part) for part in token_texts(tokenizer, tokens[:_MAX_PARTS]))
    raise InputError(f"The word {_quoted(text)} must be one token, got {len(tokens)}: {parts}.")


@checked
def word_tokens(tokenizer: Tokenizer, words: Sequence[str], d_vocab: PositiveInt | None = None) -> list[int]:
    """The different tokens of words, see `word_token`."""
    if not words:
        raise InputError("words must have at least one word, such as ' tea'.")
    return list(dict.fromkeys(word_token(tokenizer, word, d_vocab) for word in words))


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _quoted(text: str) -> str:
    return f"'{visible(text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + '...')}'"


@checked
def visible(token: str) -> str:
    """Write a token so that its spaces and line breaks can be seen."""
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)
    return f"␣{visible[1:]}" if visible.startswith(" ") else visible
