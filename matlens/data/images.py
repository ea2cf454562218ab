"""Images as examples, for vision transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from matlens.data.examples import Examples, end_to_end
from matlens.errors import InputError, check_int, checked, short
from matlens.models.families.vision import image_shape, is_visual, places_of_image

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
def make_image_examples(
    model: TransformerBridge, images: Tensor, *, position: int = 0, name: str = "images"
) -> Examples:
    """Make examples of images, read at one place of each.

    Parameters
    ----------
    model
        A vision transformer.
    images
        ``[n, channels, height, width]``, as the model's own processor gives them: of the size that the model
        reads, and normalised (``AutoImageProcessor.from_pretrained(name)(images, return_tensors="pt")``, its
        ``pixel_values``).
    position
        Where vectors are read: 0, the class token, from which images are classified, or a patch, counted from
        1 row by row (from 2 in DeiT, where 1 is the token of distillation); from the end where it is
        negative. ``collect(..., positions="all")`` reads all places.
    name
        What the examples are called in tables.

    Raises
    ------
    InputError
        The model reads text; the images are of another shape, are none, or hold numbers that are not finite;
        or there is no such place.
    """
    if not is_visual(model):
        raise InputError(
            f"{model.cfg.architecture} reads text and no images. Expected a vision transformer, such as ViT."
        )
    expected = image_shape(model)
    if images.ndim != 4 or tuple(images.shape[1:]) != expected or not len(images):
        raise InputError(
            f"The images have the shape {short(tuple(images.shape))}. Expected {short(('n', *expected))}, "
            "one image at least, as the model's processor gives them."
        )
    if not images.is_floating_point() or not bool(images.isfinite().all()):
        raise InputError(
            f"The images are of {images.dtype} or not finite. Expected finite floating-point numbers, as the "
            "model's processor gives them."
        )
    n_places = places_of_image(model)
    place = check_int(position, "position", min=-n_places, max=n_places - 1) % n_places
    provenance = {"corpus": name, "given_as": "images", "position": f"place {place}", "n": len(images)}
    examples = end_to_end([np.arange(n_places)] * len(images), np.full(len(images), place), provenance)
    return replace(examples, images=images.detach().cpu().float().numpy())
