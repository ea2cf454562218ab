"""Running a model with parts of it replaced by linear maps, for as long as a context lasts.

Blocks that are jumped over are not computed; a sub-module that is replaced runs, and hooks put the
stand-in's output in place of its own. Between any other two sites everything is computed, and hooks put what
is made of the first in the place of the second.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from matlens.arguments import short
from matlens.errors import InputError
from matlens.kinds.images import is_visual, places_of_image
from matlens.kinds.stacks import DECODER, stack_of
from matlens.linear.maps import LinearMap
from matlens.models.anatomy import Anatomy
from matlens.models.changes import hanging, intervening
from matlens.patching.replacements import (
    Replacement,
    Where,
    describe_replacement,
    find_overlap,
    resolve_replacements,
)
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_ACTIVE: WeakKeyDictionary[Any, list[Replacement]] = WeakKeyDictionary()


@checked
def patched(
    model: TransformerBridge, replacements: Iterable[Replacement | LinearMap]
) -> AbstractContextManager[TransformerBridge]:
    """Run a model with parts replaced, for as long as the context lasts.

    Works around any call: ``model(...)``, ``run_with_cache``, ``generate`` with or without a cache of
    keys and values. Blocks that a jump skips are not computed and their hooks do not fire; where there is
    a cache, they keep an empty place in it. Contexts can be nested, and end in any order. Whatever happens
    inside, the model is as before afterwards. What is collected inside says that it comes of a patched model
    and is refused as the plain model's; see `changes_of`.

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
        A map belongs to another model, or was fitted on a model with changes that do not hold here; a map is
        not finite, or of another width; its sites are not the two ends of a part; a range runs backwards; two
        replacements touch the same part; the context is entered twice; or the model is changed or read in
        another thread.

    Examples
    --------
    >>> with matlens.patched(model, [maps[4, 10], *matlens.mat_attn(maps, 20, 30)]):
    ...     model.generate("The capital of France is")
    """
    return SingleUse(_patched(model, replacements), "patched(model, maps)")


@contextmanager
def _patched(
    model: TransformerBridge, replacements: Iterable[Replacement | LinearMap]
) -> Iterator[TransformerBridge]:
    if not isinstance(replacements, Iterable) or (isinstance(replacements, Mapping) and not replacements):
        raise InputError(f"Expected a list of maps or replacements, not {type(replacements).__name__}.")
    wanted = [_as_replacement(item) for item in replacements]
    with apply_replacements(model, resolve_replacements(model, wanted, _ACTIVE.get(model, []))):
        yield model


class SingleUse(AbstractContextManager[Any]):
    """A context that is entered once, and says so where it is entered again."""

    def __init__(self, context: AbstractContextManager[Any], call: str) -> None:
        self._context, self._call, self._state = context, call, "new"

    def __enter__(self) -> Any:
        if self._state != "new":
            raise InputError(
                f"This context was entered before. Make a new one for each use: with {self._call}: ..."
            )
        self._state = "entered"
        return self._context.__enter__()

    def __exit__(self, *failure: Any) -> bool | None:
        if self._state != "entered":
            raise InputError(f"This context is not entered. Use it as a whole: with {self._call}: ...")
        self._state = "left"
        return self._context.__exit__(*failure)


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
    writing: list[tuple[str, Any]] = []
    reading: list[tuple[str, Any]] = []
    forwards: dict[int, Any] = {}
    places = TokenPlaces(model)
    for replacement in replacements:
        source, (target, before) = anatomy.hook(replacement.source), anatomy.written_at(replacement.target)
        if replacement.is_jump and replacement.blocks:
            forwards |= _skipping_forwards(model, replacement, anatomy.blocks_return_tuples)
        elif source == target:
            writing.append((target, _mapping_hook(replacement, places)))
        else:
            entered, added = _Kept(places, anatomy.order(replacement.source)), _Kept(places)
            writing.append(
                (target, _writing_hook(replacement, places, entered, None if before is None else added))
            )
            reading.append((source, entered.keep))
            if before is not None:
                reading.append((before, added.keep))
    hooks = writing + reading  # what one writes another reads, in whichever order they are given
    functions = [function for _, function in hooks] + [places.look, *forwards.values()]

    def changes() -> list[str]:
        return [describe_replacement(replacement) for replacement in replacements]

    with ExitStack() as stack:
        stack.enter_context(intervening(model, changes, functions))
        if any(not replacement.is_jump for replacement in replacements):
            stack.enter_context(places.watching())
        stack.enter_context(_replaced_forwards(model, forwards))
        stack.enter_context(hanging(model, hooks))
        stack.enter_context(reserve_parts(model, replacements))
        yield


def find_reserved(model: TransformerBridge, replacement: Replacement) -> str | None:
    """Name the first part of a replacement that is reserved in the model; ``None`` if there is none."""
    return find_overlap(Anatomy.from_model(model), replacement, _ACTIVE.get(model, []))


@contextmanager
def reserve_parts(model: TransformerBridge, replacements: Sequence[Replacement]) -> Iterator[None]:
    """Reserve parts of a model: as long as the context lasts, replacements that touch them are refused."""
    active = _ACTIVE.setdefault(model, [])
    active += replacements
    try:
        yield
    finally:  # contexts may end in another order than they began, so not the last ones
        ending = set(map(id, replacements))
        active[:] = [replacement for replacement in active if id(replacement) not in ending]


def _mapping_hook(replacement: Replacement, places: TokenPlaces) -> Any:
    def hook(value: Tensor, hook: Any) -> Tensor:
        instead = _stand_in(replacement, value, value)
        return instead if replacement.is_jump else _put(replacement, instead, value, places)

    return hook


def _put(replacement: Replacement, instead: Tensor, value: Tensor, places: TokenPlaces) -> Tensor:
    """What is put in the place of a value at the chosen tokens and heads; of several, head after head."""
    chosen = places.chosen(replacement.where)[..., None]
    if replacement.heads is not None:
        heads = torch.zeros(value.shape[2:], dtype=torch.bool, device=value.device)
        heads[list(replacement.heads)] = True
        chosen = chosen & heads.flatten()
    return torch.where(chosen, instead, value.flatten(2)).view(value.shape)


def _stand_in(replacement: Replacement, entered: Tensor, left: Tensor) -> Tensor:
    """What stands in for vectors that leave a part of a model, from those that enter it."""
    instead = replacement.function(entered)
    if not isinstance(instead, Tensor) or instead.shape != left.shape:
        raise InputError(
            f"What stands in for {replacement} gives {short(instead)}. Expected a tensor of the shape "
            f"{tuple(left.shape)}, a vector for each token."
        )
    return instead.to(left.dtype)


class _Kept:
    """The vectors at a hook, from when a pass comes to it until they are used in the same pass."""

    def __init__(self, places: TokenPlaces, order: int | None = None) -> None:
        self._places, self._order = places, order
        self._running = threading.local()  # a patched model may be run by several threads
        self.keep: Callable[..., None] = self._keep  # one object, by which the hook is known

    def _keep(self, value: Tensor, hook: Any) -> None:
        self._running.kept = self._places.number, value.flatten(2)

    def use(self) -> Tensor | None:
        """The vectors of this pass; ``None`` where it has not come to the hook, or has started behind it."""
        number, value = vars(self._running).pop("kept", (None, None))
        behind = self._order is not None and self._places.starts_behind(self._order)
        return None if behind or number != self._places.number else value


def _writing_hook(
    replacement: Replacement, places: TokenPlaces, entered: _Kept, added: _Kept | None
) -> Callable[..., Tensor]:
    """What puts others in the place of the vectors at a target, less what the model adds to them."""

    def leave(value: Tensor, hook: Any) -> Tensor:
        read, before = entered.use(), added.use() if added else None
        if read is None or (added and before is None):
            raise InputError(
                f"The pass came to {replacement.target} and not to {replacement.source} before, so there is "
                "nothing to put there. Expected a pass that starts no later than the replacement."
            )
        instead = _stand_in(replacement, read, value.flatten(2))
        if before is not None:
            instead = instead - before.to(instead.dtype)
        return _put(replacement, instead, value, places)

    return leave


class TokenPlaces:
    """The place of every token of a running batch in its sentence, and -1 for padding.

    Padding is never replaced: it is no sentence's token, and what a stand-in would make of it can grow
    beyond all numbers and reach the others through an attention weight of zero.
    """

    def __init__(self, model: TransformerBridge) -> None:
        self._model, self._inner = model, model.original_model
        self._signature = inspect.signature(self._inner.forward)
        self._running = threading.local()  # the batch that runs in each thread
        self.look: Callable[..., None] = self._look  # one object, by which the hook is known

    def starts_behind(self, order: int) -> bool:
        """Whether the running pass starts at a later layer than a hook, which then carries nothing of it."""
        start = getattr(self._model.blocks[0], "_start_at_layer_idx", None)
        return start is not None and order < Anatomy.from_model(self._model).start_of_block(start)

    @property
    def number(self) -> int:
        """The number of the running pass."""
        return int(getattr(self._running, "number", 0))

    def chosen(self, where: Where) -> Tensor:
        """``[batch, length]``: the tokens at which something is replaced."""
        places = cast(Tensor, self._running.places)
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

    @property
    def of_batch(self) -> Tensor:
        """``[batch, length]``: the place of each token of the running batch."""
        return cast(Tensor, self._running.places)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the places of the tokens that each forward pass is given."""
        handle = self._inner.register_forward_pre_hook(self.look, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.number = self.number + 1
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if is_visual(self._model):
            n, length = len(given["pixel_values"]), places_of_image(self._model)
            self._running.places = torch.arange(length, device=given["pixel_values"].device).expand(n, length)
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
            self._running.places = (real.cumsum(1) - 1).masked_fill(~real, -1)[:, -length:]
            return
        past = 0 if cache is None else cache.get_seq_length()
        self._running.places = torch.arange(past, past + length, device=tokens.device).expand(n, length)


def _skipping_forwards(
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
                h = _stand_in(jump, block.hook_in(h), h)
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
                h = _stand_in(jump, block.hook_in(h), h)
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


@contextmanager
def _replaced_forwards(
    model: TransformerBridge, forwards: Mapping[int, Callable[..., Any]]
) -> Iterator[None]:
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
