"""Tokenization of a model, texts of its tokens, and words of one token."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from weakref import WeakKeyDictionary

from matlens.errors import (
    Between,
    InputError,
    NonNegativeInt,
    PositiveInt,
    Tokenizer,
    checked,
    printable,
    short,
    warn,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PLACEHOLDER = "<|endoftext|>"  # added by a bridge to vocabularies without an end-of-text token
_SAMPLED = 64  # pieces compared to notice that a tokenizer's vocabulary changed
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
_SPACE, _PIECE = "␣", "▁"  # a leading space as `visible` writes it, and a space in SentencePiece's pieces
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte in SentencePiece's pieces
_NUMBERED = re.compile(r"<+([0-9]{1,10})>+")
_ESCAPED = re.compile(r"\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")  # by `visible`
_UNFINISHED = "@@"  # after a piece that does not end a word, as subword-nmt writes it
_MAX_PARTS, _MAX_CHARACTERS = 12, 60  # of a word that a message shows
TokenId = Annotated[int, Between(0, 2**31 - 1)]
Messages = Sequence[Mapping[str, Any]]
"""A conversation: ``[{"role": "user", "content": "Hello"}]``."""


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
    """Tokens of a text, at most ``longest``, with special tokens and the BOS of tokenizer and bridge.

    Special tokens that the text spells itself, such as the BOS of a chat template, are not added again.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError(f"{short(text)} must be valid Unicode, got half of a surrogate pair.")
    tokenizer, config = check_tokenizer(model), model.cfg
    prepend, by_tokenizer = bool(config.default_prepend_bos), bool(config.tokenizer_prepends_bos)
    bos = tokenizer.bos_token
    by_bridge = prepend and not by_tokenizer and bos is not None and len(_encoded(tokenizer, bos)) == 1
    # Not verbose: callers check the length of the context.
    encoded = tokenizer(f"{bos}{text}" if by_bridge else text, return_special_tokens_mask=True, verbose=False)
    ids, added = list(encoded["input_ids"]), [bool(flag) for flag in encoded["special_tokens_mask"]]
    n_front = _count(added)
    n_front += by_bridge and ids[n_front : n_front + 1] == [tokenizer.bos_token_id]
    n_end = _count(added[n_front : len(ids)][::-1])
    front, own, end = ids[:n_front], ids[n_front : len(ids) - n_end], ids[len(ids) - n_end :]
    if config.tokenizer_appends_eos and (own or front):
        end = [token for token in end if token != tokenizer.eos_token_id]
    if by_tokenizer and not prepend and tokenizer.bos_token_id is not None:
        front = front[1:]
    front, own, end = _added_once(front, own, end)
    if longest is not None:
        n = max(longest - len(front) - len(end), 0)
        own = own[max(len(own) - n, 0) :] if tokenizer.truncation_side == "left" else own[:n]
    ids = front + own + end
    if ids and max(ids) >= config.d_vocab:
        piece = tokenizer.convert_ids_to_tokens(max(ids))
        raise InputError(
            f"The text {short(text)} becomes the token {max(ids)} ({piece!r}), and the model has "
            f"{config.d_vocab} tokens. Expected the tokenizer that the model was published with."
        )
    return TextTokens(ids, [True] * len(front) + [False] * len(own) + [True] * len(end))


def encode_messages(model: TransformerBridge, messages: Messages) -> TextTokens:
    """Tokens of a conversation by the tokenizer's chat template, up to where the model answers.

    A last message of the assistant is continued.
    """
    tokenizer, continued = check_tokenizer(model), messages[-1].get("role") == "assistant"
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=False, add_generation_prompt=not continued,
            continue_final_message=continued,
        )  # fmt: skip
    except Exception as error:  # no template, or one that raises errors of its own
        raise InputError(
            f"messages must suit the chat template of {model.cfg.model_name!r}, got the error: "
            f"{printable(str(error), limit=150)}. Or give a text or token ids."
        ) from error
    return TextTokens(list(ids), [False] * len(ids))


def _count(flags: Sequence[bool]) -> int:
    """How many of the first flags are true."""
    return len(list(takewhile(bool, flags)))


def _added_once(front: list[int], own: list[int], end: list[int]) -> tuple[list[int], list[int], list[int]]:
    """A text's tokens without the special tokens it spells where they are added to it."""
    n_first = next((n for n in range(len(front), 0, -1) if own[:n] == front[-n:]), 0)
    if n_first == len(own):  # a text of special tokens alone keeps them
        front, n_first = front[: len(front) - n_first], 0
    own = own[n_first:]
    n_last = next((n for n in range(len(end), 0, -1) if own[-n:] == end[:n]), 0)
    if n_last == len(own):
        end, n_last = end[n_last:], 0
    return front, own[: len(own) - n_last], end


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
    parts = [[ids for ids, _ in probes], [tokenizer.mask_token_id, unknown], vocabulary_digest(tokenizer)]
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


_READ: WeakKeyDictionary[Any, tuple[Any, dict[Any, Any]]] = WeakKeyDictionary()


def _once(tokenizer: Any, compute: Callable[[Any], Any]) -> Any:
    """What is computed from a tokenizer, again only if its size or its sampled pieces have changed."""
    size = len(tokenizer)
    sampled = [i * size // _SAMPLED for i in range(_SAMPLED)] if size else []
    key = (size, tuple(tokenizer.convert_ids_to_tokens(sampled)))
    if tokenizer not in _READ or _READ[tokenizer][0] != key:
        _READ[tokenizer] = key, {}
    computed = _READ[tokenizer][1]
    if compute not in computed:
        computed[compute] = compute(tokenizer)
    return computed[compute]


def vocabulary_digest(tokenizer: Any) -> str | None:
    """A hash of all pieces and their ids; None without a tokenizer."""
    return None if tokenizer is None else str(_once(tokenizer, _hash_pieces))


def _hash_pieces(tokenizer: Any) -> str:
    pieces = sorted(_vocabulary(tokenizer).items(), key=lambda item: (item[1], item[0]))
    text = "\n".join(f"{number} {piece!r}" for piece, number in pieces)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@checked
def token_texts(tokenizer: Tokenizer | None, tokens: Iterable[TokenId]) -> list[str]:
    r"""The text of each token, with its leading space; different for all tokens.

    A word of one token is looked up by this text, everywhere. Parts of a character are written as bytes
    (``\xe2\x80``), ids outside of the vocabulary as ``<50300>``. If several tokens have the same text, it is
    that of the one that the tokenizer makes of it; the others are written as in the vocabulary (``<0x41>``).
    """
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if tokenizer is None:
        return [f"<{token}>" for token in ids]
    texts = _once(tokenizer, _TokenTexts)
    return [texts[int(token)] for token in ids]


class _TokenTexts:
    """A text for each token, and the token of each text."""

    def __init__(self, tokenizer: Any) -> None:
        pieces = _pieces(tokenizer)
        spelled = dict(zip(pieces, _spelled(tokenizer, pieces), strict=True))
        # Bytes last: the letter A has the text "A", and the byte <0x41> has not.
        in_bytes = {token for token, piece in pieces.items() if piece.startswith("<0x")}
        order = sorted(pieces, key=lambda token: (token in in_bytes, token)) if in_bytes else list(pieces)
        self.ids: dict[str, int] = {}
        again = [spelled[token] for token in order if self.ids.setdefault(spelled[token], token) != token]
        shared = list(dict.fromkeys(again))
        for text, ids in zip(shared, _encode_all(tokenizer, shared), strict=True):
            if len(ids) == 1 and spelled.get(ids[0]) == text:
                self.ids[text] = ids[0]
        self._texts = {token: text for text, token in self.ids.items()}
        for token in order:
            if token not in self._texts:
                piece = pieces[token]
                self._texts[token] = self._numbered(token) if piece in self.ids else piece
                self.ids[self._texts[token]] = token

    def __getitem__(self, token: int) -> str:
        return self._texts.get(token) or self._numbered(token)

    def find(self, text: str) -> int | None:
        """The token with this text."""
        number = _NUMBERED.fullmatch(text)
        if text not in self.ids and number and self[int(number[1])] == text:
            return int(number[1])
        return self.ids.get(text)

    def _numbered(self, token: int) -> str:
        text = f"<{token}>"
        while text in self.ids:
            text = f"<{text}>"
        return text


def _pieces(tokenizer: Any) -> dict[int, str]:
    """All pieces as the vocabulary writes them, by ascending id."""
    pieces = {number: piece for piece, number in tokenizer.get_vocab().items()}
    backend = _backend(tokenizer)
    if backend is not None:  # a vocabulary can have the same piece twice, of which get_vocab() lists one
        missing = {*range(max(pieces, default=-1))} - {*pieces}
        pieces |= {i: piece for i in missing if (piece := backend.id_to_token(i)) is not None}
    return dict(sorted(pieces.items()))


def _backend(tokenizer: Any) -> Any:
    """The tokenizer of the library tokenizers; None if it is written in Python."""
    return getattr(tokenizer, "backend_tokenizer", None)


def _spelled(tokenizer: Any, pieces: Mapping[int, str]) -> Iterator[str]:
    """The text that each piece stands for, by the decoder of its tokenizer."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = str.maketrans({character: chr(byte) for byte, character in bytes_to_unicode().items()})
    characters = frozenset(map(chr, byte_of))
    backend = _backend(tokenizer)
    parts = [] if backend is None else [*_components(backend.decoder), *_components(backend.pre_tokenizer)]
    is_bytes = any(part["type"] == "ByteLevel" for part in parts) or hasattr(tokenizer, "byte_decoder")
    suffix: str = getattr(getattr(backend, "model", None), "end_of_word_suffix", None) or ""
    spaces = {part["replacement"]: " " for part in parts if part["type"] == "Metaspace"} | {
        part["pattern"]["String"]: part["content"]
        for part in parts
        if part["type"] == "Replace" and "String" in part["pattern"]
    }
    if backend is None:
        spaces = {_PIECE: " "}
    literal = _literal(tokenizer, is_bytes=is_bytes)
    for token, piece in pieces.items():
        if token in literal:
            yield piece
            continue
        ended = bool(suffix) and piece.endswith(suffix)
        text = piece.removesuffix(suffix) if ended else piece
        if is_bytes:
            if characters.issuperset(text):
                text = _decoded(text.translate(byte_of).encode("latin-1"))
        elif byte := _BYTE.fullmatch(text):
            text = _decoded(bytes([int(byte[1], 16)]))
        elif backend is None and len(text) == 1 and not tokenizer.convert_tokens_to_string([text]):
            text = _decoded(text.encode("latin-1", "ignore"))  # ByT5 writes a byte as the character
        else:
            for written, space in spaces.items():
                text = text.replace(written, space)
        yield text if ended or not suffix else text + _UNFINISHED


def _decoded(values: bytes) -> str:
    return values.decode("utf-8", "backslashreplace")


def _literal(tokenizer: Any, *, is_bytes: bool) -> set[int]:
    """Added tokens, whose text is their piece; others of them are pieces of the model, too."""
    added, backend = getattr(tokenizer, "added_tokens_decoder", {}), _backend(tokenizer)
    if is_bytes or backend is None:
        return {*added}
    return {i for i, each in added.items() if each.special or backend.model.token_to_id(each.content) is None}


def _components(component: Any) -> list[Mapping[str, Any]]:
    """The settings of a component of a tokenizer and of all components in it; none of a custom one."""
    try:
        state = json.loads(component.__getstate__()) if component is not None else {}
    except Exception:  # tokenizers raises Exception for components written in Python
        return []
    return list(_flat(state))


def _flat(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for inner in (*state.get("decoders", ()), *state.get("pretokenizers", ())):
        yield from _flat(inner)
    if "type" in state:
        yield state


@checked
def word_token(tokenizer: Tokenizer, word: str, *, n_tokens: PositiveInt | None = None) -> int:
    """The token with this text (`token_texts`), or else the only token of a word.

    A leading space counts and may be written ``␣``. Raises InputError for a word of several tokens, and for a
    token that a model with ``n_tokens`` does not have.
    """
    token = _find_token(tokenizer, word)
    if n_tokens is not None and token >= n_tokens:
        raise InputError(
            f"The word {_quoted(word)} must be a token of the model, which has {n_tokens:,}, got token "
            f"{token:,} of its tokenizer."
        )
    return token


def _find_token(tokenizer: Any, word: str) -> int:
    texts = _once(tokenizer, _TokenTexts)
    text = f" {word[1:]}" if word.startswith(_SPACE) else word
    escaped = _ESCAPED.sub(lambda match: match[0].encode().decode("unicode_escape"), text)
    for written in (word, text, escaped):
        if (token := texts.find(written)) is not None:
            return int(token)
    tokens = _encoded(tokenizer, text)
    if len(tokens) == 1 and tokens[0] != tokenizer.unk_token_id:
        return tokens[0]
    if not tokens or tokenizer.unk_token_id in tokens:
        raise InputError(f"The word {_quoted(text)} is not in the model's vocabulary, not even in parts.")
    parts = ", ".join(_quoted(part) for part in token_texts(tokenizer, tokens[:_MAX_PARTS]))
    raise InputError(f"The word {_quoted(text)} must be one token, got {len(tokens)}: {parts}.")


@checked
def word_tokens(
    tokenizer: Tokenizer, words: Sequence[str], *, n_tokens: PositiveInt | None = None
) -> list[int]:
    """The different tokens of words, see `word_token`."""
    if not words:
        raise InputError("words must have at least one word, such as ' tea'.")
    return list(dict.fromkeys(word_token(tokenizer, word, n_tokens=n_tokens) for word in words))


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def _quoted(text: str) -> str:
    return f"'{visible(text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + '...')}'"


@checked
def visible(token: str) -> str:
    """Write a token so that its spaces and line breaks can be seen."""
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)
    return f"␣{visible[1:]}" if visible.startswith(" ") else visible
