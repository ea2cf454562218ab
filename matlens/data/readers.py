"""Models as readers: what of a text bears on their vectors, how much they take, and what they cannot read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from matlens.data.examples import MAKE_EXAMPLES, TOKENIZATION, Examples
from matlens.errors import InputError, checked
from matlens.models.changes import check_eval_mode
from matlens.models.families.encoder_decoders import ENCODER, stack_of
from matlens.models.families.vision import is_visual
from matlens.models.tokens import check_tokenizer, token_policy

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
def is_masked(model: TransformerBridge) -> bool:
    """Whether a model predicts masked tokens rather than the next one."""
    return model.cfg.attention_dir == "bidirectional"


def reads_whole(model: TransformerBridge) -> bool:
    """Whether what stands behind a position bears on its vectors: not so in decoders."""
    return is_masked(model) or stack_of(model) == ENCODER or is_visual(model)


def mask_token(model: TransformerBridge) -> int | None:
    """The token of a masked-LM model that hides others; None in other models."""
    if not is_masked(model):
        return None
    mask: int | None = check_tokenizer(model).mask_token_id
    if mask is None:
        raise InputError("This is a masked-LM model, but its tokenizer has no mask token.")
    return mask


def check_own_tokens(model: TransformerBridge, examples: Examples) -> None:
    """Refuse examples whose texts became tokens in another way than they do in this model.

    Raises
    ------
    InputError
        They were made with another tokenizer or another BOS, or a token is not in the vocabulary.
    """
    if is_visual(model):
        return  # what is read are images, see `Batch.inputs`
    check_tokens(model, examples.tokens, "the examples")
    made = examples.provenance.get(TOKENIZATION)
    if made is not None and made != token_policy(model).digest:
        raise InputError(
            "The examples were made for a model whose text becomes other tokens, by another tokenizer or "
            f"with another BOS. Expected those of this model ({token_policy(model).words}). {MAKE_EXAMPLES}"
        )


def check_tokens(model: TransformerBridge, tokens: np.ndarray, of: str) -> None:
    """Refuse tokens that a model does not have.

    Raises
    ------
    InputError
        An id is negative or past the vocabulary.
    """
    embedding = model.original_model.get_input_embeddings()
    size = min(model.cfg.d_vocab, getattr(embedding, "num_embeddings", model.cfg.d_vocab))
    outside = (tokens < 0) | (tokens >= size)
    if outside.any():
        place = int(outside.argmax())
        raise InputError(
            f"Token {place} of {of} is {tokens[place]}, and the model has the tokens 0 to {size - 1}. Were "
            "they made by the tokenizer of another model?"
        )


def check_readable(model: TransformerBridge) -> None:
    """Refuse models whose layers predict nothing that could be read at a position.

    Raises
    ------
    InputError
        The model predicts neither the next token nor a single masked one.
    """
    if not is_masked(model) and not model.adapter.supports_causal_loss:
        raise InputError(
            f"{model.cfg.architecture} predicts neither the next token nor a single masked one, so what its "
            "layers predict cannot be read at a position."
        )


def check_decoder(model: TransformerBridge, consequence: str) -> None:
    """Refuse a model that does not read on from its own text, with what it therefore cannot do.

    Raises
    ------
    InputError
        It predicts masked tokens, reads images, or stands for a stack of an encoder-decoder.
    """
    check_eval_mode(model)
    if stack_of(model) is not None or is_visual(model):
        reads = (
            "reads images" if is_visual(model) else f"is read as the {stack_of(model)} of an encoder-decoder"
        )
        raise InputError(
            f"{model.cfg.architecture} {reads}, so it {consequence} here. Expected a decoder alone."
        )
    if is_masked(model):
        raise InputError(
            f"{model.cfg.architecture} predicts masked tokens, not the next one, so it {consequence}. "
            "Expected a decoder."
        )


def context_length(model: TransformerBridge) -> int:
    """How many tokens the model and its tokenizer can take."""
    return int(min(model.cfg.n_ctx, check_tokenizer(model).model_max_length))
