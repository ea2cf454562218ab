"""Encoder-decoders: two stacks of blocks, of which a model stands for one at a time.

A stream passes through the encoder and another through the decoder, whose blocks read the encoder's last
layer as well. So a model with two stacks is read as two models: of the one whose stack is chosen,
``h.0 .. h.L`` are the layers of that stack, and hooks of its blocks are called as in other models. What the
decoder is given besides its own tokens are those of the source.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from matlens.errors import InputError
from matlens.models.sites import stack_hooks

ENCODER, DECODER = "encoder", "decoder"
STACKS = (ENCODER, DECODER)
Stack = Literal["encoder", "decoder"]
_CHOSEN = "matlens_stack"


def stack_of(model: Any) -> str | None:
    """The stack that a model stands for; ``None`` for a model with a single one."""
    return getattr(model, _CHOSEN, None)


def choose_stack(model: Any, stack: str) -> None:
    """Let a bridge stand for one of its two stacks, in place."""
    blocks = getattr(model, f"{stack}_blocks", None)
    if blocks is None:
        raise InputError(
            f"{model.cfg.architecture} has no stacks that are known. Expected an encoder-decoder such as T5."
        )
    setattr(model, _CHOSEN, stack)
    model.blocks = blocks
    model.cfg.n_layers = len(blocks)
    norm = getattr(model, f"{stack}_ln_final", None)
    if norm is not None:
        model.ln_final = norm
    # Hooks of the stack are called as those of other models are.
    for name, point in list(model._hook_registry.items()):
        for old, new in stack_hooks(stack).items():
            if name.startswith(old):
                called = new + name.removeprefix(old)
                if point.name in (None, name, called):
                    point.name = called
                del model._hook_registry[name]
                model._hook_registry[called] = point


def inputs_of(
    model: Any, tokens: Tensor, mask: Tensor, source: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a model is called with, ``model(first, **others)``.

    ``tokens`` and ``mask`` are of the stack that the model stands for, ``source`` is what the encoder of a
    decoder reads, as tokens and mask.
    """
    if stack_of(model) != DECODER:
        return tokens, {"attention_mask": mask}
    if source is None:
        raise InputError(
            "This is a decoder that reads an encoder's last layer, and the examples hold no source for it. "
            "Make them with matlens.data.make_pairs(model, sources, targets), or of token ids with "
            "matlens.make_token_examples(model, ids, sources=...)."
        )
    return source[0], {
        "attention_mask": source[1],
        "decoder_input_ids": tokens,
        "decoder_attention_mask": mask,
    }
