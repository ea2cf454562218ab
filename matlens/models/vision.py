"""Vision transformers: a class token at position 0, then one vector per patch."""

from __future__ import annotations

from typing import Any

from matlens.errors import InputError

_POSITIONS = "position_embeddings"  # of all models of the kind, a vector for each place


def is_visual(model: Any) -> bool:
    """Whether a model reads images and no text."""
    return bool(getattr(model.cfg, "is_visual_model", False))


def image_shape(model: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model reads."""
    config = model.original_model.config
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(config.num_channels), int(height), int(width)


def places_of_image(model: Any) -> int:
    """Number of vectors per image in the residual stream."""
    for name, parameter in model.original_model.named_parameters():
        if name.rpartition(".")[2] == _POSITIONS and parameter.ndim == 3:
            return int(parameter.shape[1])
    raise InputError(f"The number of vectors per image of {model.cfg.architecture} is unknown.")
