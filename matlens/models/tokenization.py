"""How text becomes a model's tokens: the one policy that examples, prompts and the identity share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from matlens.errors import InputError, NonNegativeInt, checked, short, warn

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PLACEHOLDER = "<|endoftext|>"  # what a bridge adds to vocabularies that have no end-of-text token
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


class TextTokens(NamedTuple):
    """A text as tokens: their ids, and which of them the text itself does not hold, such as a BOS."""

    ids: list[int]
    added: list[bool]


@checked
@dataclass(frozen=True)
class TokenPolicy:
    """How a model's text becomes tokens.

    Attributes
    ----------
    digest
        Sixteen hex digits of the tokens of a fixed set of texts, the vocabulary and the special tokens;
        ``None`` for a model without a tokenizer.
    words
        What is added to a text, such as ``"'<s>' in front"``.
    """

    digest: str | None
    words: str


def warn_of_unknown(model: TransformerBridge, texts: Sequence[str], encoded: Sequence[TextTokens]) -> None:
    """Warn, with `InputWarning`, of texts of which the tokenizer knows nothing, such as another script's."""
    tokenizer = check_tokenizer(model)
    unknown = tokenizer.unk_token_id
    # By name: a BOS that the vocabulary lacks has the number of the unknown token.
    if unknown is None or tokenizer.unk_token in (tokenizer.bos_token, tokenizer.eos_token):
        return

    def of_text(tokens: TextTokens) -> set[int]:
        own = {token for token, flag in zip(*tokens, strict=True) if not flag or token == unknown}
        return own - {tokenizer.mask_token_id}

    nothing = [text for text, tokens in zip(texts, encoded, strict=True) if of_text(tokens) == {unknown}]
    if nothing:
        warn(
            f"{len(nothing):,} of {len(texts):,} texts, such as {short(nothing[0])}, are only unknown tokens "
            f"({tokenizer.unk_token}), so the model reads them as the same. Leave them out, or use a model "
            "for their language."
        )


@checked
def encode_text(model: TransformerBridge, text: str, *, longest: NonNegativeInt | None = None) -> TextTokens:
    """Turn a text into the tokens that the model itself reads when it is given the text.

    What the tokenizer puts around a text is kept. A bridge that was booted elsewhere can put a BOS in front,
    or take it and an appended EOS away: then it is done here too. See `matlens.wrap`.

    Parameters
    ----------
    model
        The model, which has the tokenizer and says whether a BOS is put in front.
    text
        The text.
    longest
        Cut what is longer than so many tokens.

    Raises
    ------
    InputError
        The model has no tokenizer, or makes tokens that the model does not have; or the text holds half of a
        surrogate pair.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError(f"{short(text)} holds half of a surrogate pair, which no text can. Remove it.")
    tokenizer, config = check_tokenizer(model), model.cfg
    wanted, there = bool(config.default_prepend_bos), bool(config.tokenizer_prepends_bos)
    put = wanted and not there and _is_atom(tokenizer, tokenizer.bos_token)
    cut: dict[str, Any] = {} if longest is None else {"truncation": True, "max_length": longest}
    before = tokenizer.bos_token if put else ""
    # Whether it is longer than the context is for those to say who ask for the tokens.
    encoded = tokenizer(before + text, return_special_tokens_mask=True, verbose=False, **cut)
    ids, added = list(encoded["input_ids"]), [bool(flag) for flag in encoded["special_tokens_mask"]]
    if put and added:
        added[0] = True
    if config.tokenizer_appends_eos and tokenizer.eos_token_id is not None:
        while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
            ids, added = ids[:-1], added[:-1]
    if there and not wanted and tokenizer.bos_token_id is not None:
        ids, added = ids[1:], added[1:]
    if ids and max(ids) >= config.d_vocab:
        piece = tokenizer.convert_ids_to_tokens(max(ids))
        raise InputError(
            f"The text {short(text)} becomes the token {max(ids)} ({piece!r}), and the model has "
            f"{config.d_vocab} tokens. Expected the tokenizer that the model was published with."
        )
    return TextTokens(ids, added)


def check_tokenizer(model: TransformerBridge) -> Any:
    """The model's tokenizer.

    Raises
    ------
    InputError
        It has none.
    """
    if model.tokenizer is None:
        raise InputError(
            f"The model {model.cfg.model_name!r} has no tokenizer, so no text can be turned into its tokens. "
            "Boot the bridge with tokenizer=..., or give token ids instead of text."
        )
    return model.tokenizer


@checked
def token_policy(model: TransformerBridge) -> TokenPolicy:
    """Look at how a model's text becomes tokens, as it is at this moment."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return TokenPolicy(None, "no tokenizer")
    probes = [_outcome(model, text) for text in _PROBES]
    specials = [tokenizer.mask_token_id, tokenizer.unk_token_id]
    parts = [probes, specials, _vocabulary_digest(tokenizer)]
    if _says_little(probes, tokenizer.unk_token_id):
        parts.append([_outcome(model, text) for text in _own_texts(tokenizer)])
    content = json.dumps(parts, default=str)
    return TokenPolicy(hashlib.sha256(content.encode()).hexdigest()[:16], _words(model))


def _outcome(model: TransformerBridge, text: str) -> list[int] | str:
    try:
        return encode_text(model, text).ids
    except Exception as error:  # some tokenizers refuse characters, which is a way to treat them
        return type(error).__name__


def _says_little(probes: list[list[int] | str], unknown: int | None) -> bool:
    """Whether most tokens of the fixed texts are unknown, as in vocabularies of few words."""
    ids = [number for outcome in probes if isinstance(outcome, list) for number in outcome]
    return unknown is not None and 2 * ids.count(unknown) > len(ids)


def _own_texts(tokenizer: Any) -> Iterator[str]:
    """Texts of the vocabulary's own pieces, as they are and in capitals, which normalisers change."""
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


def _words(model: TransformerBridge) -> str:
    """What is added to a text, for messages."""
    probe = next((text for text in _PROBES if isinstance(_outcome(model, text), list)), None)
    ids, added = encode_text(model, probe) if probe is not None else TextTokens([], [])
    first = next((i for i, flag in enumerate(added) if not flag), 0)
    last = next((i for i, flag in enumerate(reversed(added)) if not flag), 0)
    parts = []
    for tokens, place in ((ids[:first], "in front"), (ids[len(ids) - last :], "at the end")):
        if tokens:
            pieces = model.tokenizer.convert_ids_to_tokens(tokens)
            parts.append(f"{' '.join(map(repr, pieces))} {place}")
    return " and ".join(parts) or "nothing added"


def _is_atom(tokenizer: Any, token: str | None) -> bool:
    """Whether a token's spelling is read as that one token."""
    return token is not None and len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1


_READ: WeakKeyDictionary[Any, tuple[Any, str]] = WeakKeyDictionary()


def _vocabulary_digest(tokenizer: Any) -> str:
    """Hash all pieces and their ids; read anew only where the tokenizer's size or sampled pieces change."""
    size = len(tokenizer)
    sample = (
        tuple(tokenizer.convert_ids_to_tokens(i * size // _SAMPLED) for i in range(_SAMPLED)) if size else ()
    )
    key = (size, sample)
    known = _READ.get(tokenizer)
    if known is None or known[0] != key:
        pieces = sorted(_vocabulary(tokenizer).items(), key=lambda item: (item[1], item[0]))
        text = "\n".join(f"{number} {piece!r}" for piece, number in pieces)
        known = _READ[tokenizer] = (key, hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest())
    return known[1]
