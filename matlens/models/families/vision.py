"""Vision transformers: a class token at position 0, then one vector per patch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from matlens.errors import InputError
from matlens.models.registry import Family, register

_POSITIONS = "position_embeddings"  # of all models of the kind, a vector for each place


@register
class Vision(Family):
    """Vision transformers."""

    def probe(self, model: Any) -> tuple[Tensor, tuple[int, int]] | None:
        """A few images of noise, the same at each call."""
        if not is_visual(model):
            return None
        images = torch.randn(3, *image_shape(model), generator=torch.Generator().manual_seed(0))
        images = images.to(model.cfg.device, next(model.original_model.parameters()).dtype)
        return images, (len(images), places_of_image(model))


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
