"""Direction, context and tokens of a model, and checks of examples against them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from matlens.data.examples import TOKENIZATION, VOCABULARY, Examples
from matlens.errors import InputError
from matlens.models.families.rotary import length_groups
from matlens.models.identity import check_raw
from matlens.models.inputs import ENCODER, is_visual, stack_of
from matlens.models.tokens import check_tokenizer, token_policy, vocabulary_digest

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


def is_masked(model: TransformerBridge) -> bool:
    """Whether a model predicts masked tokens rather than the next one."""
    return model.cfg.attention_dir == "bidirectional"


def reads_whole(model: TransformerBridge, examples: Examples) -> bool:
    """True if vectors depend on tokens after their position, as in encoders, or on the sentence's length."""
    if is_masked(model) or stack_of(model) == ENCODER or is_visual(model):
        return True
    shortest, longest = length_groups(model, np.array([1, int(examples.lengths.max())]))
    return bool(shortest != longest)


def batch_groups(model: TransformerBridge, examples: Examples) -> Int[np.ndarray, " n"]:
    """A number per sentence; only sentences with the same number can share a batch.

    Where rotary frequencies depend on the length of the input, a sentence in a batch with a longer one would
    have other vectors than alone.
    """
    groups = length_groups(model, examples.lengths)
    if examples.has_sources:
        of_sources = length_groups(model, np.diff(examples.source_offsets))
        groups = groups * (of_sources.max(initial=0) + 1) + of_sources
    return groups


def mask_token(model: TransformerBridge) -> int | None:
    """The mask of a masked-LM model; None in other models."""
    if not is_masked(model):
        return None
    mask: int | None = check_tokenizer(model).mask_token_id
    if mask is None:
        raise InputError("The tokenizer of a masked-LM model must have a mask token.")
    return mask


def check_own_tokens(model: TransformerBridge, examples: Examples) -> None:
    """Raise InputError if examples were made by another tokenizer, or with another BOS."""
    if is_visual(model):
        return  # it reads images, see `Batch.inputs`
    check_tokens(model, examples.tokens, "the examples")
    made, given = examples.provenance.get(TOKENIZATION), examples.provenance.get(VOCABULARY)
    differs = made is not None and made != token_policy(model).digest
    if differs or (given is not None and given != vocabulary_digest(model.tokenizer)):
        raise InputError(
            "The examples were made by another tokenizer or with another BOS than this model's "
            f"({token_policy(model).words}). Make them with this model."
        )


def check_tokens(model: TransformerBridge, tokens: np.ndarray, of: str) -> None:
    """Raise InputError if a token id is not in the vocabulary of a model."""
    embedding = model.original_model.get_input_embeddings()
    size = min(model.cfg.d_vocab, getattr(embedding, "num_embeddings", model.cfg.d_vocab))
    outside = (tokens < 0) | (tokens >= size)
    if outside.any():
        raise InputError(
            f"Token ids of {of} must be between 0 and {size - 1}, got {tokens[int(outside.argmax())]}. Are "
            "they of another tokenizer?"
        )


def check_readable(model: TransformerBridge) -> None:
    """Raise InputError if a model predicts neither the next token nor a masked one."""
    if not is_masked(model) and not model.adapter.supports_causal_loss:
        raise InputError(
            f"model must predict the next token or a masked one, and {model.cfg.architecture} does neither."
        )


def check_decoder(model: TransformerBridge, consequence: str) -> None:
    """Raise InputError unless a model is a decoder in eval mode."""
    check_raw(model)
    reads = ""
    if is_visual(model):
        reads = "reads images"
    elif stack_of(model) is not None:
        reads = f"is the {stack_of(model)} of an encoder-decoder"
    elif is_masked(model):
        reads = "predicts masked tokens"
    if reads:
        raise InputError(f"model must be a decoder: {model.cfg.architecture} {reads}, so it {consequence}.")


def context_length(model: TransformerBridge) -> int:
    """Maximum number of tokens of the model and its tokenizer."""
    longest = model.cfg.n_ctx if model.tokenizer is None else model.tokenizer.model_max_length
    return int(min(model.cfg.n_ctx, longest))
