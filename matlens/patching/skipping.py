"""Blocks that a jump skips: what they run instead, so that nothing of them is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from matlens.errors import InputError
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement, stand_in

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_RETURNED = 2  # values, at most, of a block that can be skipped: its vectors, and what its attention weighs
_RETURNED_BY_T5 = 3  # vectors, and how far tokens lie apart, for its attention and for that to the encoder


def skipping_forwards(
    model: TransformerBridge, jump: Replacement, layout: ModelLayout
) -> dict[int, Callable[..., Any]]:
    """What the blocks of a jump run instead: they hand on their input, which the first of them maps."""
    if reason := _reason_against(model, layout):
        raise InputError(
            f"{jump} skips blocks, and the blocks of this model cannot be skipped: {reason}. Its layers can "
            "be collected, and their maps fitted and read out."
        )
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
            h = _hand_on(jump, block, layer, h)
            return (h, None)[: layout.n_returned] if layout.blocks_return_tuples else h

        return forward

    return {layer: forward_of(layer) for layer in jump.blocks}


def _hand_on(jump: Replacement, block: Any, layer: int, h: Tensor) -> Tensor:
    """What a skipped block returns: its input, which the first of them maps."""
    if layer == jump.blocks[0]:
        h = stand_in(jump, block.hook_in(h), h)
    return block.hook_out(h) if layer == jump.blocks[-1] else h


def _reason_against(model: TransformerBridge, layout: ModelLayout) -> str | None:
    """Why the input of a block cannot be returned in the place of its output."""
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
        return f"each returns {layout.n_returned} values, of which only the first, its vectors, is known"
    return None


def _is_of_t5(block: Any) -> bool:
    return hasattr(getattr(block, "original_component", None), "layer")


def _skipping_forwards_of_t5(model: TransformerBridge, jump: Replacement) -> dict[int, Callable[..., Any]]:
    """The same for T5, whose first block computes how far tokens lie apart, for all blocks of its stack."""

    def forward_of(layer: int) -> Callable[..., Any]:
        block = model.blocks[layer]

        def forward(
            h: Tensor, mask: Any = None, bias: Any = None, encoder: Any = None, *others: Any, **more: Any
        ) -> Any:
            _check_first_pass(more.get("past_key_values"), layer, len(model.blocks), h.shape[1], jump)
            if bias is None:
                attention = block.original_component.layer[0].SelfAttention
                attention = getattr(attention, "original_component", attention)
                bias = attention.compute_bias(h.shape[1], h.shape[1], device=h.device)
            h = _hand_on(jump, block, layer, h)
            return h, bias, others[1] if len(others) > 1 else None

        return forward

    return {layer: forward_of(layer) for layer in jump.blocks}


def _check_first_pass(cache: Any, layer: int, n_layers: int, length: int, jump: Replacement) -> None:
    """Refuse to go on with a cache, in which skipped blocks have kept no place."""
    if cache is None:
        return
    lengths = [cache.get_seq_length(number) for number in range(n_layers)]
    if any(lengths[layer:]) or any(kept > length for kept in lengths[:layer]):
        raise InputError(
            f"The blocks of the jump {jump} keep no keys and values, so a pass cannot go on with a cache. "
            "Run the model with use_cache=False."
        )


def _check_no_end_inside(block: Any, layer: int, jump: Replacement) -> None:
    asked = (getattr(block, "_start_at_layer_idx", None), getattr(block, "_stop_at_layer_idx", None))
    if layer in asked:
        raise InputError(f"A pass cannot start or stop at layer {layer}: the jump {jump} passes over it.")


def _keep_place_in_cache(given: Sequence[Any], layer: int, h: Tensor) -> None:
    # The model reads off the cache how many tokens there were, and may ask a skipped layer for it.
    from transformers import Cache, EncoderDecoderCache

    for cache in given:
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if not isinstance(cache, Cache):
            continue
        place = cache.layers[layer] if layer < len(cache.layers) else None
        # Linear attention keeps a state, and no keys and values; it is asked whether there was a pass.
        states = getattr(place, "has_previous_state", {})
        states.update(dict.fromkeys(states, True))
        if place is None or hasattr(place, "update"):
            nothing = h.new_zeros(h.shape[0], 1, h.shape[1], 1)
            cache.update(nothing, nothing, layer)


@contextmanager
def replaced_forwards(model: TransformerBridge, forwards: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
    """Let blocks run other functions, given by their layer."""
    # An attribute of the instance goes before the method of its class, and leaves no trace when deleted.
    before = {layer: vars(model.blocks[layer]).get("forward") for layer in forwards}
    try:
        for layer, forward in forwards.items():
            vars(model.blocks[layer])["forward"] = forward
        yield
    finally:
        for layer, forward in before.items():
            vars(model.blocks[layer]).pop("forward", None)
            if forward is not None:
                vars(model.blocks[layer])["forward"] = forward
