"""Examples made of corpora, pairs, prompts, running text and images.

A sampled position depends on the seed and its sentence alone, not on the corpus, the split or the batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.data.corpus import Corpus, as_corpus
from matlens.data.examples import LAST, TOKENIZATION, Examples, end_to_end
from matlens.data.readers import check_decoder, check_readable, check_tokens, context_length, mask_token
from matlens.data.texts import open_text
from matlens.data.token_examples import with_sources
from matlens.errors import Between, InputError, PositiveInt, Seed, check_int, checked, short, warn
from matlens.models.inputs import DECODER, image_shape, is_visual, n_image_positions, stack_of
from matlens.models.tokens import (
    Messages,
    TextTokens,
    TokenId,
    encode_messages,
    encode_text,
    token_policy,
    warn_of_unknown,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

MASKED = 0.15  # of a sentence's tokens, as BERT is trained
Prompt = str | Sequence[TokenId] | Int[Tensor, "..."] | Int[np.ndarray, "..."] | Messages


@checked
def make_examples(
    model: TransformerBridge, corpus: Corpus | Sequence[str], *, seed: Seed = 0, sample_special: bool = True
) -> Examples:
    """Tokenize a corpus with the model's tokenizer and sample a position in each sentence.

    Sentences longer than the context are cut there, with a warning.

    Parameters
    ----------
    model
        The model. In a masked-LM model the token at the position is replaced by the mask.
    corpus
        The corpus, or a list of texts; for token ids see `make_token_examples`.
    sample_special
        Whether positions may be those of special tokens (``[CLS]``, ``<s>``), as in the authors' code.
    """
    corpus = as_corpus(corpus)
    check_readable(model)
    if stack_of(model) == DECODER:
        raise InputError(
            "model must not be the decoder of an encoder-decoder: a corpus has no sources for it. Use "
            "matlens.data.make_pairs(model, sources, targets)."
        )
    if not len(corpus):
        raise InputError(f"corpus must have at least one sentence, got {corpus.name} without any.")
    mask, n_ctx = mask_token(model), context_length(model)
    encoded = [encode_text(model, text) for text in corpus.sentences]
    too_long = [s for s, encoding in enumerate(encoded) if len(encoding.ids) > n_ctx]
    for s in too_long:
        encoded[s] = encode_text(model, corpus.sentences[s], longest=n_ctx)
    _warn_of_cut(len(too_long), corpus, n_ctx)
    warn_of_unknown(model, corpus.sentences, encoded)
    positions = np.array(
        [
            _sample_position(text, encoding.added, seed, sample_special)
            for text, encoding in zip(corpus.sentences, encoded, strict=True)
        ]
    )
    ids = [np.asarray(encoding.ids, dtype=np.int64) for encoding in encoded]
    if mask is not None:
        for sentence, position in zip(ids, positions, strict=True):
            sentence[position] = mask
    provenance = {
        "corpus": corpus.name,
        "corpus_fingerprint": corpus.fingerprint,
        "seed": seed,
        "position": "uniform over all tokens" if sample_special else "uniform over tokens not special",
        "masked": mask is not None,
        TOKENIZATION: token_policy(model).digest,
        "n": len(ids),
        "n_truncated": len(too_long),
    }
    return end_to_end(ids, positions, provenance)


def _warn_of_cut(n: int, corpus: Corpus, longest: int) -> None:
    if n:
        warn(f"{n:,} of {len(corpus):,} sentences of {corpus.name} are cut after {longest:,} tokens.")


@checked
def make_pairs(
    model: TransformerBridge, sources: Sequence[str], targets: Sequence[str], *, seed: Seed = 0
) -> Examples:
    """Tokenize sources and targets for a decoder, with one position per target.

    The encoder reads the source; the decoder reads its start token and the target without the last token, as
    in training, and predicts the target's token at each position.

    Parameters
    ----------
    model
        An encoder-decoder loaded with ``stack="decoder"``.
    sources, targets
        Texts, a target for each source.
    """
    if stack_of(model) != DECODER:
        raise InputError("model must be an encoder-decoder loaded with stack='decoder'.")
    if len(sources) != len(targets) or not sources:
        raise InputError(
            f"sources and targets must be lists of the same length, got {len(sources)} and {len(targets)}."
        )
    start, n_ctx = model.original_model.config.decoder_start_token_id, context_length(model)
    source_ids, target_ids = (
        [encode_text(model, text).ids for text in texts] for texts in (sources, targets)
    )
    for text, tokens in zip([*sources, *targets], source_ids + target_ids, strict=True):
        if not 0 < len(tokens) <= n_ctx:
            raise InputError(f"A text must have 1 to {n_ctx} tokens, got {len(tokens)} in {short(text)}.")
    read = [np.array([start, *target[:-1]], dtype=np.int64) for target in target_ids]
    positions = [
        _sample_position(f"{source}\n{target}", [False] * len(tokens), seed)
        for source, target, tokens in zip(sources, targets, read, strict=True)
    ]
    provenance = {"corpus": "pairs", "seed": seed, TOKENIZATION: token_policy(model).digest, "n": len(read)}
    examples = end_to_end(read, np.array(positions), provenance)
    return with_sources(model, examples, [np.array(source, dtype=np.int64) for source in source_ids])


def _sample_position(text: str, added: list[bool], seed: int, sample_special: bool = True) -> int:
    """A position in a sentence, from the seed and the text alone."""
    allowed = np.arange(len(added)) if sample_special else np.flatnonzero(~np.asarray(added, dtype=bool))
    if not len(allowed):
        found = "only special tokens" if added else "no token"
        raise InputError(f"A sentence must have tokens, got {found} of {short(text)}.")
    digest = hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=8).digest()
    return int(allowed[int.from_bytes(digest, "big") * len(allowed) >> 64])


@checked
def make_prompts(model: TransformerBridge, prompts: Corpus | Sequence[Prompt]) -> Examples:
    """Tokenize prompts, with the position of their prediction.

    A prompt is a text, or token ids that are read as they are, or the messages of a conversation, which the
    tokenizer's chat template turns into tokens up to where the model answers. The position is the last token
    in a decoder; in a masked-LM model the mask, of which a prompt has exactly one.
    """
    given = prompts.sentences if isinstance(prompts, Corpus) else list(prompts)
    check_readable(model)
    mask, n_ctx = mask_token(model), context_length(model)
    encoded = [encode_prompt(model, prompt) for prompt in given]
    texts = [(text, tokens) for text, tokens in zip(given, encoded, strict=True) if isinstance(text, str)]
    if texts:
        warn_of_unknown(model, *zip(*texts, strict=True))
    ids = [np.asarray(tokens.ids, dtype=np.int64) for tokens in encoded]
    positions = []
    for prompt, tokens, (_, added) in zip(given, ids, encoded, strict=True):
        if len(tokens) > n_ctx:
            raise InputError(f"A prompt must have at most {n_ctx} tokens, got {len(tokens)}.")
        places = np.flatnonzero(tokens == mask)
        if mask is None:  # an end-of-text token that the tokenizer adds is not the prompt's last
            places = np.flatnonzero(~np.asarray(added, dtype=bool))[-1:]
        if len(places) != 1:
            expected = "at least one token" if mask is None else f"exactly one {model.tokenizer.mask_token}"
            raise InputError(f"A prompt must have {expected}, got {short(prompt)}.")
        positions.append(int(places[0]))
    if not ids:
        raise InputError("prompts must have at least one text, got none.")
    provenance = {"corpus": "prompts", TOKENIZATION: token_policy(model).digest, "n": len(ids)}
    return end_to_end(ids, np.array(positions), provenance)


def encode_prompt(model: TransformerBridge, prompt: Prompt) -> TextTokens:
    """Tokens of a prompt, see `make_prompts`."""
    if isinstance(prompt, str):
        return encode_text(model, prompt)
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return encode_messages(model, cast(Messages, prompt))
    ids = torch.as_tensor(prompt).cpu().numpy()
    if ids.ndim == 2 and len(ids) == 1:  # as model.to_tokens returns them
        ids = ids[0]
    if ids.ndim != 1:
        raise InputError(f"Token ids of a prompt must be one row, got {short(prompt)}.")
    check_tokens(model, ids, "a prompt")
    return TextTokens(ids.tolist(), [False] * len(ids))


def choose_prompt(prompt: Prompt | None, messages: Messages | None) -> Prompt:
    """The one of two arguments that is given."""
    chosen = prompt if messages is None else messages
    if chosen is None or (prompt is not None and messages is not None):
        raise InputError("Give either a prompt, a text or token ids, or messages.")
    return chosen


def prompt_text(model: TransformerBridge, prompt: Prompt, tokens: Int[np.ndarray, " n"]) -> str:
    """The text of a prompt in titles; ``tokens`` are the tokens of it."""
    if isinstance(prompt, str):
        return prompt
    return f"{len(tokens)} token ids" if model.tokenizer is None else str(model.tokenizer.decode(tokens))


@checked
def make_windows(
    model: TransformerBridge,
    text: str | Path | Corpus | Sequence[str],
    *,
    size: Annotated[int, Between(2)] = 1024,
    max_windows: PositiveInt | None = None,
    targets: bool = False,
    seed: Seed = 0,
    name: str | None = None,
) -> Examples:
    """Split running text into windows of tokens that do not overlap (paper B, Table 5).

    The text is tokenized as a whole; special tokens that precede any text, such as a BOS, precede each
    window. With ``targets`` the examples have the next token at every position of a window except its last;
    for a masked-LM model, they are sentences of which 15% of the tokens, at least one, are masked.

    Parameters
    ----------
    text
        The path of a text file, plain or gzip; or a corpus or a list of texts, which are joined by spaces.
    size
        Number of tokens of a window, at most the model's context. The last window may be shorter; masked
        sentences are cut there.
    max_windows
        Maximum number of windows, spread evenly over the text (of sentences: the first ones); by default all.
    targets
        Whether positions are all that have a target, instead of the last one of each window.
    name
        Name of the text in tables, by default that of the corpus or the file.
    """
    check_readable(model)
    mask = mask_token(model)
    if targets and mask is not None and not isinstance(text, str | Path):
        return _check_two(_masked_sentences(model, mask, as_corpus(text), size, max_windows, seed))
    check_decoder(model, "reads no running text")
    size = min(size, context_length(model))
    whole, default = _running_text(text)
    windows = _windows(model, whole, size)
    if max_windows is not None and max_windows < len(windows):
        full = [window for window in windows if len(window) == size]
        spread = np.linspace(0, len(full) - 1, min(max_windows, len(full)))
        windows = [full[i] for i in spread.round().astype(int)]
    provenance = {
        "corpus": default if name is None else name,
        "corpus_fingerprint": hashlib.sha256(whole.encode(errors="surrogatepass")).hexdigest()[:16],
        "given_as": "running text",
        TOKENIZATION: token_policy(model).digest,
        "window": size,
        "position": LAST,
        "masked": False,
        "n": len(windows),
    }
    examples = end_to_end(windows, np.array([len(window) - 1 for window in windows]), provenance)
    return _check_two(_with_next_tokens(examples)) if targets else examples


def _check_two(examples: Examples) -> Examples:
    if len(examples) < 2:
        raise InputError(f"text must give at least two windows, for intervals, got {len(examples)}.")
    return examples


def _running_text(text: str | Path | Corpus | Sequence[str]) -> tuple[str, str]:
    """A text, and its name."""
    if not isinstance(text, str | Path):
        corpus = as_corpus(text)
        return " ".join(corpus.sentences), corpus.name
    path = Path(text).expanduser()
    with open_text(path) as (_, lines):
        return "".join(line for _, line in lines), path.name


def _windows(model: TransformerBridge, text: str, size: int) -> list[np.ndarray]:
    all_ids, added = encode_text(model, text)
    front = all_ids[: added.index(False) if False in added else len(added)]
    ids = [token for token, special in zip(all_ids, added, strict=True) if not special]
    step = size - len(front)
    if step < 1:
        raise InputError(
            f"size must be at least {len(front) + 1} with {len(front)} special tokens, got {size}."
        )
    windows = [np.array(front + ids[start : start + step]) for start in range(0, len(ids), step)]
    if len(windows) > 1 and len(windows[-1]) < 2:  # it would predict nothing
        windows.pop()
    if not windows or len(windows[0]) < 2:
        raise InputError(f"text must have at least two tokens, got {len(ids)}.")
    return windows


def _with_next_tokens(windows: Examples) -> Examples:
    """All positions except the last of each window, with the next token as the target."""
    last = np.zeros(len(windows.tokens), dtype=bool)
    last[windows.offsets[1:] - 1] = True
    sentences = np.repeat(np.arange(len(windows)), windows.lengths)
    return replace(
        windows, positions=windows.places[~last], sentences=sentences[~last],
        targets=windows.tokens[1:][~last[:-1]],
        provenance={**windows.provenance, "position": "all but the last"},
    )  # fmt: skip


def _masked_sentences(
    model: TransformerBridge, mask: int, corpus: Corpus, size: int, max_sentences: int | None, seed: int
) -> Examples:
    generator, longest = np.random.default_rng(seed), min(size, context_length(model))
    ids, positions, targets = [], [], []
    n_cut = 0
    for text in corpus.sentences[:max_sentences]:
        encoded = encode_text(model, text)
        if len(encoded.ids) > longest:
            encoded, n_cut = encode_text(model, text, longest=longest), n_cut + 1
        tokens = np.asarray(encoded.ids, dtype=np.int64)
        free = np.flatnonzero(~np.asarray(encoded.added, dtype=bool))
        if len(free):
            n = max(1, round(MASKED * len(free)))
            chosen = np.sort(generator.choice(free, n, replace=False))
            targets.append(tokens[chosen].copy())
            tokens[chosen] = mask
            ids.append(tokens)
            positions.append(chosen)
    if not ids:
        raise InputError(f"{corpus.name} must have tokens to mask, got none.")
    if longest < size:  # by the context, not as asked
        _warn_of_cut(n_cut, corpus, longest)
    provenance = {
        "corpus": corpus.name, "corpus_fingerprint": corpus.fingerprint, "seed": seed,
        "position": f"{MASKED:.0%} of a sentence's tokens", "masked": True,
        TOKENIZATION: token_policy(model).digest, "n": len(ids),
    }  # fmt: skip
    sentences = np.repeat(np.arange(len(ids)), list(map(len, positions)))
    examples = end_to_end(ids, np.concatenate(positions), provenance, sentences)
    return replace(examples, targets=np.concatenate(targets))


@checked
def make_image_examples(
    model: TransformerBridge,
    images: Float[Tensor, "n channels height width"],
    *,
    position: int = 0,
    name: str = "images",
) -> Examples:
    """Examples of images, read at one position of each.

    Parameters
    ----------
    images
        ``[n, channels, height, width]`` as the model's processor returns them:
        ``AutoImageProcessor.from_pretrained(name)(images, return_tensors="pt")["pixel_values"]``.
    position
        0 for the class token, or a patch, from 1 row by row (from 2 in DeiT, where 1 is the distillation
        token). ``collect(..., positions="all")`` reads all of them.
    """
    if not is_visual(model):
        raise InputError(f"model must be a vision transformer such as ViT, got {model.cfg.architecture}.")
    expected = image_shape(model)
    if tuple(images.shape[1:]) != expected or not len(images) or not bool(images.isfinite().all()):
        raise InputError(
            f"images must be finite and of the shape {short(('n', *expected))}, as the processor returns "
            f"them, got {short(images)}."
        )
    n_places = n_image_positions(model)
    place = check_int(position, "position", min=-n_places, max=n_places - 1) % n_places
    provenance = {"corpus": name, "given_as": "images", "position": f"place {place}", "n": len(images)}
    examples = end_to_end([np.arange(n_places)] * len(images), np.full(len(images), place), provenance)
    return replace(examples, images=images.detach().cpu().float().numpy())
