"""Running a model with parts of it replaced by linear maps.

Skipped blocks run a function that returns their input, which the first of them maps. A sub-module that is
replaced runs, and hooks replace its output. Between any other two sites everything runs, and a hook writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from matlens.errors import InputError, check, checked
from matlens.linear.maps import LinearMap
from matlens.models.hooks import changing
from matlens.models.layout import ModelLayout
from matlens.patching.positions import TokenPositions, cache_of, replaced_methods
from matlens.patching.replacements import (
    Replacement,
    describe_replacement,
    find_overlap,
    replaced_vectors,
    resolve_replacements,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_ACTIVE: WeakKeyDictionary[Any, list[Replacement]] = WeakKeyDictionary()


@checked
@contextmanager
def patched(
    model: TransformerBridge, replacements: Iterable[Replacement | LinearMap], *, strict: bool = True
) -> Iterator[TransformerBridge]:
    """Run a model with parts replaced, inside a context.

    Works around any call: ``model(...)``, ``run_with_cache``, ``generate`` with or without a cache. Blocks
    that a jump skips are not computed, and their hooks do not fire. Contexts can be nested, and end in any
    order. The model is as before afterwards, also after an exception. Activations collected inside record
    the change; see `active_hooks`.

    Parameters
    ----------
    replacements
        Maps, or `Replacement`, as `jump`, `mat_attn`, `mat_ffn`, `mat_ln1_ln2` and `Scheme.replacements`
        return, in any order and combination. Maps of known provenance must be of this model; a `Replacement`
        takes any matrix, ``nn.Linear`` or function. A replacement reads the input of its sub-module before
        hooks that are added inside the context; changes of earlier hooks to the sub-module's output are lost.
    strict
        With ``False``, maps of another model of the same shape are accepted, with a warning.

    Examples
    --------
    >>> with matlens.patched(model, [maps[4, 10], *matlens.mat_attn(maps, 20, 30)]):
    ...     model.generate("The capital of France is")
    """
    requested = []
    for item in replacements:
        check(item, Replacement | LinearMap, "A replacement")
        requested.append(Replacement.from_map(item) if isinstance(item, LinearMap) else item)
    resolved = resolve_replacements(model, requested, _ACTIVE.get(model, []), strict=strict)
    with apply_replacements(model, resolved):
        yield model


@contextmanager
def apply_replacements(model: TransformerBridge, replacements: Sequence[Replacement]) -> Iterator[None]:
    """Do what `patched` does with replacements that have been checked."""
    layout = ModelLayout.from_model(model)
    writing: list[tuple[str, Any]] = []
    reading: list[tuple[str, Any]] = []
    forwards: dict[int, Any] = {}
    tokens = TokenPositions.of(model)
    for replacement in replacements:
        source, (target, before) = layout.hook(replacement.source), layout.written_at(replacement.target)
        if replacement.blocks:
            forwards |= skipping_forwards(model, replacement, layout)
        elif source == target:
            writing.append((target, _mapping_hook(replacement, tokens)))
        else:
            keys = {hook: (replacement, hook) for hook in (source, before) if hook is not None}
            order = layout.order(replacement.source)
            write = _writing_hook(model, replacement, tokens, order, list(keys.values()))
            writing.append((target, write))
            reading += [(hook, tokens.keep(key)) for hook, key in keys.items()]
    hooks = [
        *writing,
        *reading,
        tokens.measuring(),
    ]  # a replacement can read the output of another, in any order

    descriptions = [describe_replacement(replacement) for replacement in replacements]
    functions = [r.function for r in replacements if not isinstance(r.function, LinearMap)]
    with ExitStack() as stack:
        stack.enter_context(changing(model, descriptions, hooks, functions))
        stack.enter_context(tokens.watching())
        methods = [(model.blocks[layer], "forward", forward) for layer, forward in forwards.items()]
        stack.enter_context(replaced_methods(methods))
        stack.enter_context(reserve_parts(model, replacements))
        yield


def skipped_layers(model: TransformerBridge) -> set[int]:
    """Layers of the residual stream that active jumps do not compute."""
    return {layer for active in _ACTIVE.get(model, []) for layer in active.blocks[1:]}


def has_skipped_blocks(model: TransformerBridge) -> bool:
    """Whether active jumps skip any block."""
    return any(active.blocks for active in _ACTIVE.get(model, []))


def find_reserved(model: TransformerBridge, replacement: Replacement) -> str | None:
    """Name the first part of a replacement that is reserved in the model, if any."""
    return find_overlap(ModelLayout.from_model(model), replacement, _ACTIVE.get(model, []))


@contextmanager
def reserve_parts(model: TransformerBridge, replacements: Sequence[Replacement]) -> Iterator[None]:
    """Refuse other replacements of parts of a model inside the context."""
    active = _ACTIVE.setdefault(model, [])
    active += replacements
    try:
        yield
    finally:  # contexts may end in another order than they began, so not the last ones
        ending = set(map(id, replacements))
        active[:] = [replacement for replacement in active if id(replacement) not in ending]


def _mapping_hook(replacement: Replacement, tokens: TokenPositions) -> Any:
    def hook(value: Tensor, hook: Any) -> Tensor:
        vectors = value.flatten(2)  # heads concatenated
        instead = replaced_vectors(replacement, vectors, vectors)
        return instead if replacement.is_jump else _put(replacement, instead, value, tokens)

    return hook


def _put(replacement: Replacement, instead: Tensor, value: Tensor, tokens: TokenPositions) -> Tensor:
    """A value with the chosen tokens and heads replaced."""
    chosen = tokens.chosen(replacement.where)[..., None].to(value.device)
    if replacement.heads is not None:
        heads = torch.zeros(value.shape[2:], dtype=torch.bool, device=value.device)
        heads[list(replacement.heads)] = True
        chosen = chosen & heads.flatten()
    return torch.where(chosen, instead, value.flatten(2)).view(value.shape)


def _writing_hook(
    model: TransformerBridge,
    replacement: Replacement,
    tokens: TokenPositions,
    order: int,
    keys: Sequence[Any],
) -> Callable[..., Tensor]:
    """A hook that replaces the vectors at a target, minus later additions to it."""

    def leave(value: Tensor, hook: Any) -> Tensor:
        if not tokens.read.keys() >= set(keys) or _starts_behind(model, order):
            raise InputError(
                f"The pass reached {replacement.target} without {replacement.source}. Start it before the "
                "replacement."
            )
        read, *added = map(tokens.read.pop, keys)
        instead = replaced_vectors(replacement, read, value.flatten(2))
        for before in added:
            instead = instead - before.to(instead)
        return _put(replacement, instead, value, tokens)

    return leave


def _starts_behind(model: TransformerBridge, order: int) -> bool:
    """True if the running pass starts at a later layer than a hook."""
    start = getattr(model.blocks[0], "_start_at_layer_idx", None)
    return start is not None and order < ModelLayout.from_model(model).start_of_block(start)


_RETURNED = 2  # maximum outputs of a block that can be skipped: its vectors and attention weights
_RETURNED_BY_T5 = 3  # vectors and the position biases of both attentions


def skipping_forwards(
    model: TransformerBridge, jump: Replacement, layout: ModelLayout
) -> dict[int, Callable[..., Any]]:
    """Forwards of the skipped blocks: they return their input, which the first of them maps."""
    if reason := _reason_against(model, layout):
        raise InputError(f"The blocks of this model cannot be skipped by {jump}: {reason}.")
    if all(map(_is_of_t5, model.blocks)):
        return _skipping_forwards_of_t5(model, jump)

    def forward_of(layer: int) -> Callable[..., Any]:
        block = model.blocks[layer]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if layer == jump.blocks[0]:  # a pass may be asked to start or to stop here
                args, kwargs = block._maybe_inject_start_residual(args, kwargs)
                block._check_stop_at_layer(*args, **kwargs)
            else:
                _check_no_end_inside(block, layer, jump)
            h = args[0] if args else kwargs["hidden_states"]
            _keep_place_in_cache((*args[1:], *kwargs.values()), layer, h)
            h = _returned(jump, block, layer, h)
            return (h, None)[: layout.n_returned] if layout.n_returned else h

        return forward

    return {layer: forward_of(layer) for layer in jump.blocks}


def _returned(jump: Replacement, block: Any, layer: int, h: Tensor) -> Tensor:
    """The output of a skipped block: its input, which the first of them maps."""
    if layer == jump.blocks[0]:
        h = replaced_vectors(jump, block.hook_in(h), h)
    return block.hook_out(h) if layer == jump.blocks[-1] else h


def _reason_against(model: TransformerBridge, layout: ModelLayout) -> str | None:
    """Why the blocks of a model cannot be skipped."""
    if all(map(_is_of_t5, model.blocks)):
        first = model.blocks[0].original_component.layer[0]
        known = layout.n_returned == _RETURNED_BY_T5 and hasattr(first, "SelfAttention")
        return None if known else f"they return {layout.n_returned} values, and not what T5's do"
    needed = ("_maybe_inject_start_residual", "_check_stop_at_layer")
    kinds = {
        type(block).__name__ for block in model.blocks if not all(hasattr(block, name) for name in needed)
    }
    if kinds:
        return f"TransformerLens runs them as {', '.join(sorted(kinds))}"
    if layout.n_returned > _RETURNED:
        return f"each returns {layout.n_returned} values, of which only the first is known"
    return None


def _is_of_t5(block: Any) -> bool:
    return hasattr(getattr(block, "original_component", None), "layer")


def _skipping_forwards_of_t5(model: TransformerBridge, jump: Replacement) -> dict[int, Callable[..., Any]]:
    """The same for T5, whose first block computes the position bias for all blocks of its stack."""

    def forward_of(layer: int) -> Callable[..., Any]:
        block = model.blocks[layer]

        def forward(
            h: Tensor, mask: Any = None, bias: Any = None, encoder: Any = None, *others: Any, **more: Any
        ) -> Any:
            _check_first_pass(cache_of(more), layer, len(model.blocks), h.shape[1], jump)
            if bias is None:
                attention = block.original_component.layer[0].SelfAttention
                attention = getattr(attention, "original_component", attention)
                bias = attention.compute_bias(h.shape[1], h.shape[1], device=h.device)
            h = _returned(jump, block, layer, h)
            return h, bias, others[1] if len(others) > 1 else None

        return forward

    return {layer: forward_of(layer) for layer in jump.blocks}


def _check_first_pass(cache: Any, layer: int, n_layers: int, length: int, jump: Replacement) -> None:
    """Refuse a cache that a pass with skipped blocks has filled."""
    if cache is None:
        return
    lengths = [cache.get_seq_length(number) for number in range(n_layers)]
    if any(lengths[layer:]) or any(stored > length for stored in lengths[:layer]):
        raise InputError(f"use_cache must be False: blocks skipped by {jump} cannot be cached.")


def _check_no_end_inside(block: Any, layer: int, jump: Replacement) -> None:
    asked = (getattr(block, "_start_at_layer_idx", None), getattr(block, "_stop_at_layer_idx", None))
    if layer in asked:
        raise InputError(f"A pass cannot start or stop at layer {layer}: the jump {jump} skips it.")


def _keep_place_in_cache(given: Sequence[Any], layer: int, h: Tensor) -> None:
    # The model takes the number of past tokens from the cache, perhaps from a skipped layer.
    from transformers import Cache, EncoderDecoderCache

    for cache in given:
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if not isinstance(cache, Cache):
            continue
        place: Any = cache.layers[layer] if layer < len(cache.layers) else None
        # Linear attention has a state instead of keys and values, and a flag for a previous pass.
        states = getattr(place, "has_previous_state", None)
        if isinstance(states, dict):
            states.update(dict.fromkeys(states, True))
        elif states is not None:  # before transformers 5.10
            place.has_previous_state = True
        if place is None or hasattr(place, "update"):
            keys = getattr(place, "keys", None)  # of a pass before the context
            n_heads, width = (1, 1) if keys is None or keys.ndim < 4 else (keys.shape[1], keys.shape[3])
            # NaN, which a pass that computes the block after all cannot take for vectors.
            nothing = h.new_full((h.shape[0], n_heads, h.shape[1], width), torch.nan)
            cache.update(nothing, nothing, layer)
