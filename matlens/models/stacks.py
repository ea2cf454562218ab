"""Encoder-decoders: two stacks of blocks, of which a loaded model represents one.

``h.0 .. h.L`` are the layers of the chosen stack, whose hooks are named as in other models. Decoder blocks
read the encoder's last layer too, so a decoder also gets the tokens of the source.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from matlens.errors import InputError
from matlens.models.sites import stack_hooks

Stack = Literal["encoder", "decoder"]
ENCODER: Stack = "encoder"
DECODER: Stack = "decoder"
_CHOSEN = "matlens_stack"  # an attribute of the bridge, so that a copy has it too


def choose_stack(model: Any, stack: Stack) -> None:
    """Name the blocks, the final norm and the hooks of a stack as other models name theirs."""
    blocks = getattr(model, f"{stack}_blocks", None)
    if blocks is None:
        raise InputError(
            f"stack must be None for {model.cfg.architecture}, which is not a known encoder-decoder."
        )
    setattr(model, _CHOSEN, stack)
    model.blocks, model.cfg.n_layers = blocks, len(blocks)
    norm = getattr(model, f"{stack}_ln_final", None)
    if norm is not None:
        model.ln_final = norm
    for name, point in list(model._hook_registry.items()):
        for old, new in stack_hooks(stack).items():
            if name.startswith(old):
                called = new + name.removeprefix(old)
                if point.name in (None, name, called):
                    point.name = called
                del model._hook_registry[name]
                model._hook_registry[called] = point


def stack_of(model: Any) -> Stack | None:
    """The stack of a loaded encoder-decoder; None for other models."""
    return getattr(model, _CHOSEN, None)


def inputs_of(
    model: Any, tokens: Tensor, mask: Tensor, source: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Arguments of a forward pass, ``model(first, **others)``.

    ``tokens`` and ``mask`` are those of the model's stack, ``source`` the tokens and mask that the encoder of
    a decoder reads.
    """
    if stack_of(model) != DECODER:
        return tokens, {"attention_mask": mask}
    if source is None:
        raise InputError(
            "This is a decoder that reads an encoder's last layer, and the examples have no source for it. "
            "Make them with matlens.data.make_pairs(model, sources, targets), or of token ids with "
            "matlens.make_token_examples(model, ids, sources=...)."
        )
    decoder = {"decoder_input_ids": tokens, "decoder_attention_mask": mask}
    return source[0], {"attention_mask": source[1], **decoder}
