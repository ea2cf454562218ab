"""Examples of a corpus: one position a sentence, drawn from the seed and the sentence alone.

So it is the same whatever the corpus around the sentence, the split, the order and the batches are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from matlens.data.corpus import Corpus, as_corpus
from matlens.data.examples import TOKENIZATION, Examples, end_to_end
from matlens.data.readers import check_model, check_readable, context_length, is_masked
from matlens.errors import InputError, Seed, checked, short
from matlens.models.stacks import DECODER, stack_of
from matlens.models.tokenization import check_tokenizer, encode_text, token_policy, warn_of_unknown

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
    check_model(model)
    corpus = as_corpus(corpus)
    check_readable(model)
    tokenizer = check_tokenizer(model)
    if stack_of(model) == DECODER:
        raise InputError(
            "This is a decoder that reads an encoder's last layer, and a corpus holds no sources for it. "
            "Make examples of both with matlens.data.make_pairs(model, sources, targets)."
        )
    if not len(corpus):
        raise InputError(f"{corpus.name} holds no sentences. Expected at least one.")
    mask_token = tokenizer.mask_token_id if is_masked(model) else None
    if is_masked(model) and mask_token is None:
        raise InputError("This is a masked-LM model, but its tokenizer has no mask token.")
    n_ctx = context_length(model)
    encoded = [encode_text(model, text) for text in corpus.sentences]
    too_long = [s for s, encoding in enumerate(encoded) if len(encoding.ids) > n_ctx]
    for s in too_long:
        encoded[s] = encode_text(model, corpus.sentences[s], longest=n_ctx)
    warn_of_unknown(model, corpus.sentences, encoded)
    positions = np.array(
        [
            draw_position(text, encoding.added, seed, draw_special)
            for text, encoding in zip(corpus.sentences, encoded, strict=True)
        ]
    )
    ids = [np.asarray(encoding.ids, dtype=np.int64) for encoding in encoded]
    if mask_token is not None:
        for sentence, position in zip(ids, positions, strict=True):
            sentence[position] = mask_token
    provenance = {
        "corpus": corpus.name,
        "corpus_fingerprint": corpus.fingerprint,
        "seed": seed,
        "position": "uniform over all tokens" if draw_special else "uniform over tokens not special",
        "masked": mask_token is not None,
        TOKENIZATION: token_policy(model).digest,
        "n": len(ids),
        "n_truncated": len(too_long),
    }
    return end_to_end(ids, positions, provenance)


def draw_position(text: str, added: list[bool], seed: int, draw_special: bool) -> int:
    """A position in a sentence, from the seed and the text alone.

    Raises
    ------
    InputError
        The sentence has no token to draw.
    """
    allowed = np.arange(len(added)) if draw_special else np.flatnonzero(~np.asarray(added, dtype=bool))
    if not len(allowed):
        reason = (
            "of it the tokenizer makes only special tokens" if added else "the tokenizer makes none of it"
        )
        raise InputError(f"The sentence {short(text)} has no token whose position could be drawn: {reason}.")
    digest = hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=8).digest()
    return int(allowed[int.from_bytes(digest, "big") * len(allowed) >> 64])
