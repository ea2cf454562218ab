"""Batches of sentences, and what a model is called with to read one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.errors import InputError
from matlens.models.images import image_shape, is_visual
from matlens.models.stacks import inputs_of

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@dataclass(frozen=True)
class Batch:
    """Sentences padded on the right with token 0, which the mask keeps the model from reading.

    Attributes
    ----------
    index
        Numbers of the sentences.
    tokens, mask
        ``[batch, length]``; the mask is 1 where there is a token of the sentence, and 0 at padding.
    source
        Tokens and mask of what the encoder of an encoder-decoder reads, where the model is its decoder.
    images
        What a vision transformer reads.
    """

    index: Int[np.ndarray, " batch"]
    tokens: Int[Tensor, "batch length"]
    mask: Int[Tensor, "batch length"]
    source: tuple[Tensor, Tensor] | None = None
    images: Float[Tensor, "batch channels height width"] | None = None

    def inputs(self, model: TransformerBridge) -> tuple[Tensor, dict[str, Any]]:
        """What the model is called with, on its device: ``model(first, **others)``.

        Raises
        ------
        InputError
            The model stands for a decoder that reads an encoder, and the examples have no sources; or it
            reads images, and there are none.
        """
        device = torch.device(model.cfg.device)
        if is_visual(model):
            return _images_of(model, self.images), {}
        source = None if self.source is None else (self.source[0].to(device), self.source[1].to(device))
        first, others = inputs_of(model, self.tokens.to(device), self.mask.to(device), source)
        return first, {**others, "use_cache": False}


def _images_of(model: TransformerBridge, images: Tensor | None) -> Tensor:
    if images is None or tuple(images.shape[1:]) != image_shape(model):
        raise InputError(
            f"{model.cfg.architecture} reads images of the shape {image_shape(model)}, and the examples hold "
            "none. Make them with matlens.data.make_image_examples(model, images)."
        )
    return images.to(model.cfg.device, next(model.original_model.parameters()).dtype)


def padded(
    tokens: np.ndarray, offsets: np.ndarray, index: np.ndarray, length: int | None = None
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
    """Tokens of some sentences, padded on the right to the longest or to a length, and their mask."""
    longest = int(np.diff(offsets)[index].max()) if length is None else length
    ids = np.zeros((len(index), longest), dtype=np.int64)
    mask = np.zeros((len(index), longest), dtype=np.int64)
    for row, sentence in enumerate(index):
        of_sentence = tokens[offsets[sentence] : offsets[sentence + 1]]
        ids[row, : len(of_sentence)], mask[row, : len(of_sentence)] = of_sentence, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)
