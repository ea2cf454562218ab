"""Pairs of texts: what the encoder of an encoder-decoder reads, and what its decoder writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from matlens.data.corpus_examples import draw_position
from matlens.data.examples import TOKENIZATION, Examples, end_to_end
from matlens.data.prompts import list_of_texts
from matlens.data.readers import check_model, context_length
from matlens.data.token_examples import with_sources
from matlens.errors import InputError, Seed, checked, short
from matlens.models.stacks import DECODER, stack_of
from matlens.models.tokenization import encode_text, token_policy

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
def make_pairs(
    model: TransformerBridge, sources: Iterable[str], targets: Iterable[str], *, seed: Seed = 0
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
    check_model(model)
    seed, given = seed, (list_of_texts(sources), list_of_texts(targets))
    if stack_of(model) != DECODER:
        raise InputError("Pairs are for the decoder of an encoder-decoder, loaded with stack='decoder'.")
    if len(given[0]) != len(given[1]) or not given[0]:
        raise InputError(
            f"There are {len(given[0])} sources and {len(given[1])} targets. Expected a target for each "
            "source, and one at least."
        )
    start, n_ctx = model.original_model.config.decoder_start_token_id, context_length(model)
    ids = [[encode_text(model, text).ids for text in texts] for texts in given]
    for text, tokens in zip(given[0] + given[1], ids[0] + ids[1], strict=True):
        if not 0 < len(tokens) <= n_ctx:
            raise InputError(f"The text {short(text)} has {len(tokens)} tokens. Expected 1 to {n_ctx}.")
    read = [np.array([start, *target[:-1]], dtype=np.int64) for target in ids[1]]
    positions = [
        draw_position(f"{source}\n{target}", [False] * len(tokens), seed, True)
        for source, target, tokens in zip(*given, read, strict=True)
    ]
    provenance = {"corpus": "pairs", "seed": seed, TOKENIZATION: token_policy(model).digest, "n": len(read)}
    examples = end_to_end(read, np.array(positions), provenance)
    return with_sources(model, examples, [np.array(source, dtype=np.int64) for source in ids[0]])
