"""Which token of its sentence each place of a running batch holds; padding is none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from matlens.errors import InputError
from matlens.models.families.encoder_decoders import DECODER, stack_of
from matlens.models.families.vision import is_visual, places_of_image
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Where

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


class TokenPlaces:
    """The position of every token of a running batch in its sentence, and -1 for padding.

    Padding is never replaced: a map's output there could overflow and reach the other tokens through an
    attention weight of zero. Only one pass of a patched model runs at a time, see `matlens.models.hooks`.
    """

    def __init__(self, model: TransformerBridge) -> None:
        self._model, self._inner = model, model.original_model
        self._signature = inspect.signature(self._inner.forward)
        self.of_batch = torch.empty(0, 0)  # [batch, length], of the running pass
        self.read: dict[Any, Tensor] = {}  # vectors of the running pass that are still to be used
        self.look: Callable[..., None] = self._look  # one object, by which the hook is known

    def starts_behind(self, order: int) -> bool:
        """Whether the running pass starts at a later layer than a hook, which then carries nothing of it."""
        start = getattr(self._model.blocks[0], "_start_at_layer_idx", None)
        return start is not None and order < ModelLayout.from_model(self._model).start_of_block(start)

    def chosen(self, where: Where) -> Tensor:
        """``[batch, length]``: the tokens at which something is replaced."""
        places = self.of_batch
        if isinstance(where, str) and where == "last":  # a pass that goes on from a cache reads no prompt
            last = places.max(1, keepdim=True).values
            return (places == last) & (places >= 0) & (places == 0).any(1, keepdim=True)
        if isinstance(where, str):
            return places >= (1 if where == "not-first" else 0)
        if len(where) != len(places):
            raise InputError(
                f"'where' has {len(where)} rows for a batch of {len(places)} sentences. Expected one row for "
                "each sentence."
            )
        where = where.to(places.device)
        if where.dtype != torch.bool:
            outside = (places == 0).any(1) & (where > places.max(1).values)
            if bool(outside.any()):
                sentence = int(outside.int().argmax())
                raise InputError(
                    f"'where' has the position {int(where[sentence])} for sentence {sentence}, which has the "
                    f"tokens 0 to {int(places[sentence].max())}. Expected one of them; truth values for each "
                    "token mean those to come, too."
                )
            return places == where[:, None]
        known = places < where.shape[1]
        meant = where.gather(1, places.clamp(0, where.shape[1] - 1)) | ~known
        return meant & (places >= 0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the places of the tokens that each forward pass is given."""
        handle = self._inner.register_forward_pre_hook(self.look, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def keep(self, key: Any) -> Callable[..., None]:
        """A hook that keeps the vectors of the running pass, those of all heads side by side."""

        def hook(value: Tensor, hook: Any) -> None:
            self.read[key] = value.flatten(2)

        return hook

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.read.clear()
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if is_visual(self._model):
            n, length = len(given["pixel_values"]), places_of_image(self._model)
            self.of_batch = torch.arange(length, device=given["pixel_values"].device).expand(n, length)
            return
        of_stack = "decoder_" if stack_of(self._model) == DECODER else ""
        tokens = given.get(f"{of_stack}input_ids")
        tokens = given[f"{of_stack}inputs_embeds"] if tokens is None else tokens
        n, length = tokens.shape[:2]
        mask, cache = given.get(f"{of_stack}attention_mask"), given.get("past_key_values")
        if mask is not None and mask.ndim != 2:
            raise InputError(
                "To know which tokens are padding, an attention mask [batch, length] is needed: got one of "
                f"{mask.ndim} dimensions."
            )
        if mask is not None:
            real = mask.bool()
            self.of_batch = (real.cumsum(1) - 1).masked_fill(~real, -1)[:, -length:]
            return
        past = 0 if cache is None else cache.get_seq_length()
        self.of_batch = torch.arange(past, past + length, device=tokens.device).expand(n, length)
