"""Examples of a corpus, or of pairs of texts: a position a sentence, from the seed and the sentence alone.

So it is the same whatever the corpus around the sentence, the split, the order and the batches are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from matlens.data.corpus import Corpus, as_corpus
from matlens.data.examples import TOKENIZATION, Examples, end_to_end
from matlens.data.readers import check_readable, context_length, mask_token
from matlens.data.token_examples import with_sources
from matlens.errors import InputError, Seed, checked, short
from matlens.models.families.encoder_decoders import DECODER, stack_of
from matlens.models.tokens import encode_text, token_policy, warn_of_unknown

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


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
