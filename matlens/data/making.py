"""Examples made of corpora, pairs, prompts, running text and images.

A position that is sampled comes from the seed and the sentence alone, so it is the same whatever the corpus
around the sentence, the split, the order and the batches are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from matlens.data.corpus import Corpus, as_corpus
from matlens.data.examples import LAST, TOKENIZATION, Examples, end_to_end
from matlens.data.readers import check_decoder, check_readable, context_length, is_masked, mask_token
from matlens.data.texts import open_text
from matlens.data.token_examples import with_sources
from matlens.errors import Between, InputError, PositiveInt, Seed, check_int, checked, short
from matlens.models.families.encoder_decoders import DECODER, stack_of
from matlens.models.families.vision import image_shape, is_visual, places_of_image
from matlens.models.tokens import check_tokenizer, encode_text, token_policy, warn_of_unknown

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

WINDOW_TOKENS = 1024  # tokens that running text is read in at once, as in paper B
MASKED = 0.15  # of a sentence's tokens, as BERT is trained


@checked
def make_examples(
    model: TransformerBridge, corpus: Corpus | Sequence[str], *, seed: Seed = 0, draw_special: bool = True
) -> Examples:
    """Tokenise a corpus as the model's own tokenizer does and draw a position in each sentence.

    Parameters
    ----------
    model
        The model, which has the tokenizer and the length of the context. In a masked-LM model the token at
        the position is replaced by the mask.
    corpus
        The corpus, or a list of texts. For tokens that are there already see `make_token_examples`.
    seed
        Seed of the positions.
    draw_special
        Whether the position may fall on tokens that the tokenizer adds (``[CLS]``, ``<s>``), as in the
        authors' code. With ``False`` they are read by the model but never drawn.

    Raises
    ------
    InputError
        There are no sentences, a sentence has no token to draw, the model has no tokenizer or is a masked-LM
        without a mask token, or what is given is no corpus.
    """
    corpus = as_corpus(corpus)
    check_readable(model)
    if stack_of(model) == DECODER:
        raise InputError(
            "This is a decoder that reads an encoder's last layer, and a corpus holds no sources for it. "
            "Make examples of both with matlens.data.make_pairs(model, sources, targets)."
        )
    if not len(corpus):
        raise InputError(f"{corpus.name} holds no sentences. Expected at least one.")
    mask, n_ctx = mask_token(model), context_length(model)
    encoded = [encode_text(model, text) for text in corpus.sentences]
    too_long = [s for s, encoding in enumerate(encoded) if len(encoding.ids) > n_ctx]
    for s in too_long:
        encoded[s] = encode_text(model, corpus.sentences[s], longest=n_ctx)
    warn_of_unknown(model, corpus.sentences, encoded)
    positions = np.array(
        [
            _draw_position(text, encoding.added, seed, draw_special)
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
        "position": "uniform over all tokens" if draw_special else "uniform over tokens not special",
        "masked": mask is not None,
        TOKENIZATION: token_policy(model).digest,
        "n": len(ids),
        "n_truncated": len(too_long),
    }
    return end_to_end(ids, positions, provenance)


@checked
def make_pairs(
    model: TransformerBridge, sources: Sequence[str], targets: Sequence[str], *, seed: Seed = 0
) -> Examples:
    """Tokenise sources and targets for the decoder of an encoder-decoder, and draw a position in each target.

    The encoder reads the source, and the decoder its start token and the target but for the last token, as it
    does when it is trained: at each position it predicts the target's token there.

    Parameters
    ----------
    model
        An encoder-decoder that was loaded with ``stack="decoder"``.
    sources, targets
        Texts, a target for each source.
    seed
        Seed of the positions, of which one is drawn in each target, from the seed and the texts alone.

    Raises
    ------
    InputError
        The model is no such decoder, there are no texts, or not as many targets as sources; or a text is
        longer than the context.
    """
    if stack_of(model) != DECODER:
        raise InputError("Pairs are for the decoder of an encoder-decoder, loaded with stack='decoder'.")
    if len(sources) != len(targets) or not sources:
        raise InputError(
            f"There are {len(sources)} sources and {len(targets)} targets. Expected a target for each "
            "source, and one at least."
        )
    start, n_ctx = model.original_model.config.decoder_start_token_id, context_length(model)
    source_ids, target_ids = (
        [encode_text(model, text).ids for text in texts] for texts in (sources, targets)
    )
    for text, tokens in zip([*sources, *targets], source_ids + target_ids, strict=True):
        if not 0 < len(tokens) <= n_ctx:
            raise InputError(f"The text {short(text)} has {len(tokens)} tokens. Expected 1 to {n_ctx}.")
    read = [np.array([start, *target[:-1]], dtype=np.int64) for target in target_ids]
    positions = [
        _draw_position(f"{source}\n{target}", [False] * len(tokens), seed)
        for source, target, tokens in zip(sources, targets, read, strict=True)
    ]
    provenance = {"corpus": "pairs", "seed": seed, TOKENIZATION: token_policy(model).digest, "n": len(read)}
    examples = end_to_end(read, np.array(positions), provenance)
    return with_sources(model, examples, [np.array(source, dtype=np.int64) for source in source_ids])


def _draw_position(text: str, added: list[bool], seed: int, draw_special: bool = True) -> int:
    """A position in a sentence, from the seed and the text alone."""
    allowed = np.arange(len(added)) if draw_special else np.flatnonzero(~np.asarray(added, dtype=bool))
    if not len(allowed):
        reason = "makes only special tokens of it" if added else "makes nothing of it"
        raise InputError(
            f"The sentence {short(text)} has no token whose position could be drawn: the tokenizer {reason}."
        )
    digest = hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=8).digest()
    return int(allowed[int.from_bytes(digest, "big") * len(allowed) >> 64])


@checked
def make_prompts(model: TransformerBridge, prompts: Corpus | Sequence[str]) -> Examples:
    """Tokenise prompts, each with the position whose prediction one wants to read.

    In a decoder that is the last token; in a masked-LM model the mask token, of which a prompt holds exactly
    one.

    Parameters
    ----------
    model
        The model, which has the tokenizer and the length of the context.
    prompts
        The prompts.

    Raises
    ------
    InputError
        There is no prompt, or one is empty or does not hold exactly one mask token where that is needed.
    """
    texts = as_corpus(prompts).sentences
    check_readable(model)
    tokenizer, n_ctx = check_tokenizer(model), context_length(model)
    encoded = [encode_text(model, text) for text in texts]
    warn_of_unknown(model, texts, encoded)
    ids = [np.asarray(tokens.ids, dtype=np.int64) for tokens in encoded]
    positions = []
    for text, tokens, (_, added) in zip(texts, ids, encoded, strict=True):
        if len(tokens) > n_ctx:
            raise InputError(
                f"The prompt of {len(tokens)} tokens is longer than the model's context of {n_ctx}."
            )
        places = np.flatnonzero(tokens == tokenizer.mask_token_id)
        if not is_masked(model):  # an end-of-text token that the tokenizer adds is not the prompt's last
            places = np.flatnonzero(~np.asarray(added, dtype=bool))[-1:]
        if len(places) != 1:
            expected = f"exactly one {tokenizer.mask_token}" if is_masked(model) else "at least one token"
            raise InputError(f"The prompt {short(text)} cannot be read out: expected {expected} in it.")
        positions.append(int(places[0]))
    if not ids:
        raise InputError("There are no prompts. Expected at least one.")
    provenance = {"corpus": "prompts", TOKENIZATION: token_policy(model).digest, "n": len(ids)}
    return end_to_end(ids, np.array(positions), provenance)


@checked
def make_windows(
    model: TransformerBridge,
    source: str | Path | Corpus | Sequence[str],
    *,
    size: Annotated[int, Between(2)] = WINDOW_TOKENS,
    most: PositiveInt | None = None,
    name: str | None = None,
) -> Examples:
    """Cut running text into windows that do not overlap, to be read each for itself (paper B, Table 5).

    The tokens are those of the whole text, and the last window may be shorter. What the model is given in
    front of any text, such as a BOS, stands in front of each window. The position of a window is its last
    token.

    Parameters
    ----------
    model
        The model that is to read them, a decoder.
    source
        The path of a file that holds the text, plain or packed; or a corpus or a list of texts,
        which are joined by spaces in their order.
    size
        Tokens of a window, or the model's context where that is shorter.
    most
        Take no more whole windows than this, spread evenly over the text; by default all there are.
    name
        What the windows are called in tables, by default as the corpus or the file.

    Raises
    ------
    InputError
        The text has fewer than two tokens, the file cannot be read, a size is not usable, or the model
        predicts masked tokens.
    """
    check_readable(model)
    check_decoder(model, "reads no running text")
    size = min(size, context_length(model))
    text, default = _running_text(source)
    all_ids, added = encode_text(model, text)
    front = all_ids[: added.index(False) if False in added else len(added)]
    ids = [token for token, flag in zip(all_ids, added, strict=True) if not flag]
    step = size - len(front)
    if step < 1:
        raise InputError(
            f"A window of {size} tokens has no room for text: {len(front)} tokens stand in front of each. "
            f"Expected a size of {len(front) + 1} at least."
        )
    windows = [np.array(front + ids[start : start + step]) for start in range(0, len(ids), step)]
    if len(windows) > 1 and len(windows[-1]) < 2:  # it would predict nothing
        windows.pop()
    if not windows or len(windows[0]) < 2:
        raise InputError(
            f"The text {short(text)} has {len(ids)} tokens. Expected two at least: one to predict another."
        )
    if most is not None and most < len(windows):
        whole = [window for window in windows if len(window) == size]
        windows = [
            whole[i] for i in np.linspace(0, len(whole) - 1, min(most, len(whole))).round().astype(int)
        ]
    provenance = {
        "corpus": default if name is None else name,
        "corpus_fingerprint": hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16],
        "given_as": "running text",
        TOKENIZATION: token_policy(model).digest,
        "window": size,
        "position": LAST,
        "masked": False,
        "n": len(windows),
    }
    return end_to_end(windows, np.array([len(window) - 1 for window in windows]), provenance)


def _running_text(source: str | Path | Corpus | Sequence[str]) -> tuple[str, str]:
    """A text, and what it is called."""
    if not isinstance(source, str | Path):
        corpus = as_corpus(source)
        return " ".join(corpus.sentences), corpus.name
    path = Path(source).expanduser()
    with open_text(path) as (_, lines):
        return "".join(line for _, line in lines), path.name


@checked
@dataclass(frozen=True, eq=False)
class JudgedText:
    """Text with the tokens that a model should think likely.

    Attributes
    ----------
    examples
        What the model reads; its positions are those that something is predicted at.
    truth
        The right token at each position.
    """

    examples: Examples
    truth: Int[np.ndarray, " n_positions"]

    def __post_init__(self) -> None:
        if len(self.truth) != self.examples.n_positions:
            raise InputError(
                f"There are {len(self.truth)} right tokens for {self.examples.n_positions} positions. "
                "Expected one for each."
            )

    @property
    def texts(self) -> Int[np.ndarray, " n_positions"]:
        """The number of the text that each position is in."""
        return self.examples.sentences


@checked
def make_judged_text(
    model: TransformerBridge,
    corpus: Corpus | Sequence[str],
    *,
    size: Annotated[int, Between(2)] = 64,
    most: Annotated[int, Between(2)] | None = None,
    seed: Seed = 0,
) -> JudgedText:
    """Running text in windows, with the next token at every place; or sentences with some tokens masked.

    Parameters
    ----------
    model
        The model that is to read it. For a decoder, windows of the joined sentences are made, see
        `matlens.data.make_windows`; for a masked-LM model each sentence stands for itself, and 15% of its
        tokens, at least one, are masked.
    corpus
        The sentences.
    size
        Tokens of a window, or most tokens of a sentence, which is cut there.
    most
        Take no more windows or sentences than this, by default all.
    seed
        Seed of the masks.

    Raises
    ------
    InputError
        There are fewer than two texts, or the model has no mask.
    """
    corpus = as_corpus(corpus)
    mask = mask_token(model)
    if mask is None:
        made = _running(make_windows(model, corpus, size=size, most=most))
    else:
        made = _masked(model, mask, corpus, size, most, seed)
    if len(made.examples) < 2:
        raise InputError(
            f"{corpus.name} gives {len(made.examples)} text of {size} tokens. Expected two at least, for "
            "intervals: a larger corpus, or smaller windows."
        )
    return made


def _running(windows: Examples) -> JudgedText:
    """All places of windows but the last of each."""
    last = np.zeros(len(windows.tokens), dtype=bool)
    last[windows.offsets[1:] - 1] = True
    sentences = np.repeat(np.arange(len(windows)), windows.lengths)
    examples = replace(
        windows, positions=windows.places[~last], sentences=sentences[~last],
        provenance={**windows.provenance, "position": "all but the last"},
    )  # fmt: skip
    return JudgedText(examples, windows.tokens[1:][~last[:-1]])


def _masked(
    model: TransformerBridge, mask: int, corpus: Corpus, size: int, most: int | None, seed: int
) -> JudgedText:
    generator, longest = np.random.default_rng(seed), min(size, context_length(model))
    ids, positions, truth = [], [], []
    for text in corpus.sentences[:most]:
        encoded = encode_text(model, text, longest=longest)
        tokens = np.asarray(encoded.ids, dtype=np.int64)
        free = np.flatnonzero(~np.asarray(encoded.added, dtype=bool))
        if len(free):
            n = max(1, round(MASKED * len(free)))
            chosen = np.sort(generator.choice(free, n, replace=False))
            truth.append(tokens[chosen].copy())
            tokens[chosen] = mask
            ids.append(tokens)
            positions.append(chosen)
    if not ids:
        raise InputError(f"{corpus.name} holds no token that could be masked. Expected sentences.")
    sentences = np.repeat(np.arange(len(ids)), list(map(len, positions)))
    provenance = {
        "corpus": corpus.name, "corpus_fingerprint": corpus.fingerprint, "seed": seed,
        "position": f"{MASKED:.0%} of a sentence's tokens", "masked": True,
        TOKENIZATION: token_policy(model).digest, "n": len(ids),
    }  # fmt: skip
    examples = end_to_end(ids, np.concatenate(positions), provenance, sentences)
    return JudgedText(examples, np.concatenate(truth))


@checked
def make_image_examples(
    model: TransformerBridge,
    images: Float[Tensor, "n channels height width"],
    *,
    position: int = 0,
    name: str = "images",
) -> Examples:
    """Make examples of images, read at one place of each.

    Parameters
    ----------
    model
        A vision transformer.
    images
        ``[n, channels, height, width]``, as the model's own processor gives them: of the size that the model
        reads, and normalised (``AutoImageProcessor.from_pretrained(name)(images, return_tensors="pt")``, its
        ``pixel_values``).
    position
        Where vectors are read: 0, the class token, from which images are classified, or a patch, counted from
        1 row by row (from 2 in DeiT, where 1 is the token of distillation); from the end where it is
        negative. ``collect(..., positions="all")`` reads all places.
    name
        What the examples are called in tables.

    Raises
    ------
    InputError
        The model reads text; the images are of another shape, are none, or hold numbers that are not finite;
        or there is no such place.
    """
    if not is_visual(model):
        raise InputError(
            f"{model.cfg.architecture} reads text and no images. Expected a vision transformer, such as ViT."
        )
    expected = image_shape(model)
    if tuple(images.shape[1:]) != expected or not len(images) or not bool(images.isfinite().all()):
        raise InputError(
            f"images must be finite and of the shape {short(('n', *expected))}, as the processor gives "
            f"them, got {short(images)}."
        )
    n_places = places_of_image(model)
    place = check_int(position, "position", min=-n_places, max=n_places - 1) % n_places
    provenance = {"corpus": name, "given_as": "images", "position": f"place {place}", "n": len(images)}
    examples = end_to_end([np.arange(n_places)] * len(images), np.full(len(images), place), provenance)
    return replace(examples, images=images.detach().cpu().float().numpy())
