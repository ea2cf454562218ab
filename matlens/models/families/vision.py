"""Vision transformers: what they read instead of tokens, and how many vectors an image has.

An image is cut into patches, and each becomes a vector of the stream, behind the class token's, which is the
first. So the places of an image are counted as those of a sentence's tokens are: 0 is the class token.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

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
    """How many vectors an image has in the stream.

    Raises
    ------
    InputError
        It is not known.
    """
    for name, parameter in model.original_model.named_parameters():
        if name.rpartition(".")[2] == _POSITIONS and parameter.ndim == 3:
            return int(parameter.shape[1])
    raise InputError(f"How many vectors {model.cfg.architecture} makes of an image is not known.")


def probe_images(model: Any) -> Float[Tensor, "3 channels height width"]:
    """A few images of noise, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, *image_shape(model), generator=generator)
    return images.to(model.cfg.device, next(model.original_model.parameters()).dtype)
