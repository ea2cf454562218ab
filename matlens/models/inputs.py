"""What a model reads: tokens, tokens and those of a source, or images.

A loaded encoder-decoder represents one of its two stacks: ``h.0 .. h.L`` are that stack's layers, and its
hooks are named as in other models. Decoder blocks read the encoder's last layer too, so a decoder also gets
the tokens of the source. A vision transformer has a class token at position 0, then one vector per patch.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from matlens.errors import InputError
from matlens.models.sites import stack_hooks

Stack = Literal["encoder", "decoder"]
ENCODER: Stack = "encoder"
DECODER: Stack = "decoder"
_CHOSEN = "matlens_stack"  # an attribute of the bridge, so that a copy has it too
_POSITIONS = "position_embeddings"  # of all vision transformers, a vector for each place


def choose_stack(model: Any, stack: Stack) -> None:
    """Name the blocks, the final norm and the hooks of a stack as other models name theirs."""
    blocks = getattr(model, f"{stack}_blocks")
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


def is_visual(model: Any) -> bool:
    """Whether a model reads images and no text."""
    return bool(getattr(model.cfg, "is_visual_model", False))


def image_shape(model: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model reads."""
    return configured_image_shape(model.original_model.config)


def configured_image_shape(config: Any) -> tuple[int, int, int]:
    """`image_shape` from a model's configuration."""
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(config.num_channels), int(height), int(width)


def n_image_positions(model: Any) -> int:
    """Number of vectors per image in the residual stream."""
    for name, parameter in model.original_model.named_parameters():
        if name.rpartition(".")[2] == _POSITIONS and parameter.ndim == 3:
            return int(parameter.shape[1])
    raise InputError(f"The number of vectors per image of {model.cfg.architecture} is unknown.")


def probe_inputs(model: Any) -> tuple[Tensor, tuple[int, int]]:
    """A few inputs to probe a model: batch size and vectors per input."""
    if is_visual(model):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(3, *image_shape(model), generator=generator, dtype=torch.float32)
        images = images.to(model.cfg.device, next(model.original_model.parameters()).dtype)
        return images, (len(images), n_image_positions(model))
    # A length that tells the axis of tokens from all others.
    heads = {getattr(model.cfg, name, None) for name in ("n_heads", "n_key_value_heads", "d_head")}
    length = next(length for length in (7, 5, 11, 13, 9) if length not in heads)
    tokens = torch.arange(1, 3 * length + 1, device=model.cfg.device) % model.cfg.d_vocab
    return tokens.view(3, length), (3, length)
