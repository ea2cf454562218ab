"""Blocks that a jump passes over: what they run instead, so that nothing of them is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from matlens.errors import InputError
from matlens.patching.replacements import Replacement, stand_in

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


def skipping_forwards(
    model: TransformerBridge, jump: Replacement, as_tuples: bool
) -> dict[int, Callable[..., Any]]:
    """What the blocks of a jump run instead: they hand on their input, which the first of them maps."""
    if all(hasattr(getattr(block, "original_component", None), "layer") for block in model.blocks):
        return _skipping_forwards_of_t5(model, jump)
    needed = ("_maybe_inject_start_residual", "_check_stop_at_layer")
    kinds = {
        type(block).__name__ for block in model.blocks if not all(hasattr(block, name) for name in needed)
    }
    if kinds:
        raise InputError(
            f"{jump} skips blocks, and the blocks of this model cannot be skipped: TransformerLens runs them "
            f"as {', '.join(sorted(kinds))}. Its layers can be collected, and their maps fitted and read out."
        )

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
                h = stand_in(jump, block.hook_in(h), h)
            if layer == jump.blocks[-1]:
                h = block.hook_out(h)
            return (h, None) if as_tuples else h

        return forward

    return {layer: forward_of(layer) for layer in jump.blocks}


def _skipping_forwards_of_t5(model: TransformerBridge, jump: Replacement) -> dict[int, Callable[..., Any]]:
    """The same for T5, whose first block computes how far tokens lie apart, for all blocks of its stack."""

    def forward_of(layer: int) -> Callable[..., Any]:
        block = model.blocks[layer]

        def forward(
            h: Tensor, mask: Any = None, bias: Any = None, encoder: Any = None, *others: Any, **more: Any
        ) -> Any:
            _require_first_pass(more.get("past_key_values"), layer, len(model.blocks), h.shape[1], jump)
            if bias is None:
                attention = block.original_component.layer[0].SelfAttention
                attention = getattr(attention, "original_component", attention)
                bias = attention.compute_bias(h.shape[1], h.shape[1], device=h.device)
            if layer == jump.blocks[0]:
                h = stand_in(jump, block.hook_in(h), h)
            if layer == jump.blocks[-1]:
                h = block.hook_out(h)
            return h, bias, others[1] if len(others) > 1 else None

        return forward

    return {layer: forward_of(layer) for layer in jump.blocks}


def _require_first_pass(cache: Any, layer: int, n_layers: int, length: int, jump: Replacement) -> None:
    """Refuse to go on with a cache, in which skipped blocks have kept no place."""
    if cache is None:
        return
    lengths = [cache.get_seq_length(number) for number in range(n_layers)]
    if any(lengths[layer:]) or any(kept > length for kept in lengths[:layer]):
        raise InputError(
            f"The blocks of the jump {jump} keep no keys and values, so a pass cannot go on with a cache. "
            "Run the model with use_cache=False."
        )


def _require_no_end_inside(block: Any, layer: int, jump: Replacement) -> None:
    asked = (getattr(block, "_start_at_layer_idx", None), getattr(block, "_stop_at_layer_idx", None))
    if layer in asked:
        raise InputError(f"A pass cannot start or stop at layer {layer}: the jump {jump} passes over it.")


def _keep_place_in_cache(given: Sequence[Any], layer: int, h: Tensor) -> None:
    # The model reads off the cache how many tokens there were, and may ask a skipped layer for it.
    from transformers import Cache, EncoderDecoderCache

    for cache in given:
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if isinstance(cache, Cache):
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
