"""Running a model with parts of it replaced by linear maps, for as long as a context lasts.

Blocks that are jumped over are not computed; a sub-module that is replaced runs, and hooks put the
stand-in's output in place of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from matlens.errors import InputError
from matlens.linear.maps import LinearMap
from matlens.models.anatomy import Anatomy
from matlens.patching.replacements import Function, Replacement, Where, find_overlap, resolve_replacements
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_ACTIVE: WeakKeyDictionary[Any, list[Replacement]] = WeakKeyDictionary()


@checked
@contextmanager
def patched(
    model: TransformerBridge, replacements: Iterable[Replacement | LinearMap]
) -> Iterator[TransformerBridge]:
    """Run a model with parts replaced, for as long as the context lasts.

    Works around any call: ``model(...)``, ``run_with_cache``, ``generate`` with or without a cache of
    keys and values. Blocks that a jump skips are not computed and their hooks do not fire; where there is
    a cache, they keep an empty place in it. Contexts can be nested. Whatever happens inside, the model is
    as before afterwards.

    Parameters
    ----------
    model
        As `matlens.load` gives it.
    replacements
        Maps, or `Replacement` where not all tokens are meant: what `jump`, `mat_attn`, `mat_ffn`,
        `mat_ln1_ln2` and `Scheme.replacements` give, in any order and combination. A stand-in reads what
        enters its sub-module before hooks that are added inside the context, and what hooks that were
        there before do to the sub-module's output is lost.

    Raises
    ------
    InputError
        A map belongs to another model or its sites are not the two ends of a part; a range runs
        backwards; two replacements touch the same part.

    Examples
    --------
    >>> with matlens.patched(model, [maps[4, 10], *matlens.mat_attn(maps, 20, 30)]):
    ...     model.generate("The capital of France is")
    """
    if not isinstance(replacements, Iterable):
        raise InputError(f"Expected a list of maps or replacements, not {type(replacements).__name__}.")
    wanted = [_as_replacement(item) for item in replacements]
    with apply_replacements(model, resolve_replacements(model, wanted, _ACTIVE.get(model, []))):
        yield model


def _as_replacement(item: Any) -> Replacement:
    if isinstance(item, LinearMap):
        return Replacement.from_map(item)
    if not isinstance(item, Replacement):
        raise InputError(
            f"{item!r} replaces nothing: expected maps or replacements. From a MapSet, choose the maps: "
            "jump(maps, 4, 10), or maps.values() for all of them."
        )
    return item


@contextmanager
def apply_replacements(model: TransformerBridge, replacements: Sequence[Replacement]) -> Iterator[None]:
    """Do what `patched` does with replacements that have been checked."""
    anatomy = Anatomy.from_model(model)
    hooks: list[tuple[str, Any]] = []
    with ExitStack() as stack:
        places = _TokenPlaces()
        if any(not replacement.is_jump for replacement in replacements):
            stack.enter_context(places.watching(model))
        for replacement in replacements:
            if not replacement.is_jump:
                hooks += _submodule_hooks(replacement, anatomy, places)
            elif replacement.blocks:
                stack.enter_context(_skipped_blocks(model, replacement, anatomy.blocks_return_tuples))
            else:
                hooks.append((anatomy.hook(replacement.source), _mapping_hook(replacement.function)))
        stack.enter_context(model.hooks(fwd_hooks=hooks))
        stack.enter_context(reserve_parts(model, replacements))
        yield


def find_reserved(model: TransformerBridge, replacement: Replacement) -> str | None:
    """Name the first part of a replacement that is reserved in the model; ``None`` if there is none."""
    return find_overlap(replacement, _ACTIVE.get(model, []))


@contextmanager
def reserve_parts(model: TransformerBridge, replacements: Sequence[Replacement]) -> Iterator[None]:
    """Reserve parts of a model: as long as the context lasts, replacements that touch them are refused."""
    active = _ACTIVE.setdefault(model, [])
    active += replacements
    try:
        yield
    finally:
        del active[len(active) - len(replacements) :]


def _mapping_hook(function: Function) -> Any:
    return lambda value, hook: function(value).to(value.dtype)


def _submodule_hooks(
    replacement: Replacement, anatomy: Anatomy, places: _TokenPlaces
) -> list[tuple[str, Any]]:
    entered: list[Tensor] = []

    def enter(value: Tensor, hook: Any) -> None:
        entered[:] = [value]

    def leave(value: Tensor, hook: Any) -> Tensor:
        instead = replacement.function(entered.pop()).to(value.dtype)
        return torch.where(places.chosen(replacement.where)[..., None], instead, value)

    return [(anatomy.hook(replacement.source), enter), (anatomy.hook(replacement.target), leave)]


class _TokenPlaces:
    """The place of every token of a running batch in its sentence, and -1 for padding.

    Padding is never replaced: it is no sentence's token, and what a stand-in would make of it can grow
    beyond all numbers and reach the others through an attention weight of zero.
    """

    def __init__(self) -> None:
        self._places: Tensor | None = None

    def chosen(self, where: Where) -> Tensor:
        """``[batch, length]``: the tokens at which something is replaced."""
        places = cast(Tensor, self._places)
        if isinstance(where, str):
            return places >= (1 if where == "not-first" else 0)
        if len(where) != len(places):
            raise InputError(
                f"'where' has {len(where)} rows for a batch of {len(places)} sentences. Expected one row for "
                "each sentence."
            )
        where = where.to(places.device)
        if where.dtype != torch.bool:
            return places == where[:, None]
        known = places < where.shape[1]
        meant = where.gather(1, places.clamp(0, where.shape[1] - 1)) | ~known
        return meant & (places >= 0)

    @contextmanager
    def watching(self, model: TransformerBridge) -> Iterator[None]:
        """Note the places of the tokens that each forward pass is given."""
        inner = model.original_model
        signature = inspect.signature(inner.forward)

        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = signature.bind_partial(*args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
            n, length = tokens.shape[:2]
            mask, cache = given.get("attention_mask"), given.get("past_key_values")
            if mask is not None and mask.ndim != 2:
                raise InputError(
                    f"A stand-in has to know which tokens are padding: expected an attention mask [batch, "
                    f"length], got one of {mask.ndim} dimensions."
                )
            if mask is not None:
                real = mask.bool()
                self._places = (real.cumsum(1) - 1).masked_fill(~real, -1)[:, -length:]
                return
            past = 0 if cache is None else cache.get_seq_length()
            self._places = torch.arange(past, past + length, device=tokens.device).expand(n, length)

        handle = inner.register_forward_pre_hook(look, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _skipped_blocks(model: TransformerBridge, jump: Replacement, as_tuples: bool) -> Iterator[None]:
    """Let the blocks of a jump hand on their input, which the first of them maps."""

    def forward_of(layer: int) -> Callable[..., Any]:
        block = model.blocks[layer]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if layer == jump.blocks[0]:  # a pass may be asked to start or to stop here
                args, kwargs = block._maybe_inject_start_residual(args, kwargs)
                block._check_stop_at_layer(*args, **kwargs)
            else:
                _require_no_end_inside(block, layer, jump)
            h = args[0] if args else kwargs["hidden_states"]
            _keep_place_in_cache((*args[1:], *kwargs.values()), layer, h)
            if layer == jump.blocks[0]:
                h = jump.function(block.hook_in(h)).to(h.dtype)
            if layer == jump.blocks[-1]:
                h = block.hook_out(h)
            return (h, None) if as_tuples else h

        return forward

    # An attribute of the instance goes before the method of its class, and leaves no trace when deleted.
    try:
        for layer in jump.blocks:
            vars(model.blocks[layer])["forward"] = forward_of(layer)
        yield
    finally:
        for layer in jump.blocks:
            vars(model.blocks[layer]).pop("forward", None)


def _require_no_end_inside(block: Any, layer: int, jump: Replacement) -> None:
    asked = (getattr(block, "_start_at_layer_idx", None), getattr(block, "_stop_at_layer_idx", None))
    if layer in asked:
        raise InputError(f"A pass cannot start or stop at layer {layer}: the jump {jump} passes over it.")


def _keep_place_in_cache(given: Sequence[Any], layer: int, h: Tensor) -> None:
    # The model reads off the cache how many tokens there were, and may ask a skipped layer for it.
    from transformers import Cache

    for cache in given:
        if isinstance(cache, Cache):
            nothing = h.new_zeros(h.shape[0], 1, h.shape[1], 1)
            cache.update(nothing, nothing, layer)
