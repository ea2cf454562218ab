"""Running a model with parts of it replaced by linear maps.

A map says by its two sites what it replaces: one from ``h.4`` to ``h.10`` stands for the blocks 4 to 9,
which are then not computed; one from ``attn_in.3`` to ``attn_out.3`` stands for the attention of block 3.
`patched` puts any number of them into a model for as long as its context lasts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens.errors import InputError
from matlens.maps import LinearMap, MapSet
from matlens.models import fingerprint, require_raw
from matlens.sites import STREAM, Anatomy, Site, anatomy

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Where = Literal["all", "not-first"] | Int[Tensor, " batch"] | Bool[Tensor, "batch longest"]
Function = Callable[[Float[Tensor, "... d_model"]], Float[Tensor, "... d_model"]]


@dataclass(frozen=True, eq=False)
class Replacement:
    """One part of a model and what stands in for it.

    Attributes
    ----------
    function
        What stands in: vectors at ``source`` to vectors at ``target``, such as a `LinearMap`.
    source, target
        Two layers of the stream for a jump over the blocks between them, or the input and the output of
        one sub-module, such as ``ffn_in.3`` and ``ffn_out.3``.
    where
        At which tokens: ``"all"``; ``"not-first"``, all but the first of each sentence, which many models
        use as an attention sink; one position for each sentence, ``[batch]``; or a truth value for each
        token of each sentence, ``[batch, longest]``, such as ``~find_sinks(...)``, where tokens past its
        end are meant. Tokens are counted from the sentence's own first and without padding. A jump is
        always over all tokens, because skipped blocks leave nothing that the others could attend to.
    """

    function: Function
    source: Site
    target: Site
    where: Where = "all"

    @classmethod
    def by(cls, linear: LinearMap, *, where: Where = "all") -> Replacement:
        """What a map replaces by the sites that it is from and to."""
        return cls(linear, Site.parse(linear.source), Site.parse(linear.target), where)

    @property
    def is_jump(self) -> bool:
        """Whether it replaces whole blocks and not a sub-module."""
        return self.source.kind == STREAM

    @property
    def blocks(self) -> range:
        """Blocks that it touches."""
        return range(self.source.layer, self.target.layer if self.is_jump else self.source.layer + 1)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


_ACTIVE: WeakKeyDictionary[Any, list[Replacement]] = WeakKeyDictionary()


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
        enters its sub-module before hooks that are added inside the context.

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
    given = [one if isinstance(one, Replacement) else Replacement.by(one) for one in replacements]
    with applied(model, checked(model, given)):
        yield model


def jump(maps: MapSet, first: int, last: int) -> list[Replacement]:
    """``mat`` from layer ``first`` of the stream to layer ``last``, over the blocks between (Eq. 1)."""
    return [_from(maps, Site(STREAM, first), Site(STREAM, last), "all")]


def mat_attn(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """Attention replaced by ``A_attn`` in the blocks from layer ``first`` to ``last`` (appendix A)."""
    return stand_ins(maps, ("attn",), first, last, where=where)


def mat_ffn(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """FFN replaced by ``A_ffn`` in the blocks from layer ``first`` to ``last`` (appendix A)."""
    return stand_ins(maps, ("ffn",), first, last, where=where)


def mat_ln1_ln2(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """Both norms replaced in the blocks from layer ``first`` to ``last``, attention and FFN kept.

    In blocks with one norm (GPT-J) only that one; norms after attention and FFN (Gemma) are kept.
    """
    names = ("ln1", "ln2") if any(source.startswith("ln2_in.") for source, _ in maps) else ("ln1",)
    return stand_ins(maps, names, first, last, where=where)


def stand_ins(
    maps: MapSet, names: Sequence[str], first: int, last: int, *, where: Where = "all"
) -> list[Replacement]:
    """Replace the named sub-modules in the blocks from layer ``first`` of the stream to layer ``last``.

    Raises
    ------
    InputError
        The range runs backwards, or there is no map of a sub-module.
    """
    if not 0 <= first <= last:
        raise InputError(
            f"Sub-modules from layer {first} to layer {last}: the range runs backwards or starts below 0."
        )
    return [
        _from(maps, Site(f"{name}_in", layer), Site(f"{name}_out", layer), where)
        for layer in range(first, last)
        for name in names
    ]


def _from(maps: MapSet, source: Site, target: Site, where: Where) -> Replacement:
    if (str(source), str(target)) not in maps:
        there = ", ".join(sorted({f"{a.split('.')[0]} -> {b.split('.')[0]}" for a, b in maps})) or "none"
        raise InputError(
            f"There is no map {source} -> {target} in this set of {len(maps)} (it has {there}). Fit one, "
            "or check the range."
        )
    return Replacement.by(maps[str(source), str(target)], where=where)


def checked(model: TransformerBridge, replacements: Sequence[Replacement]) -> list[Replacement]:
    """Replacements with their sites resolved; refuses what `patched` refuses."""
    require_raw(model)
    found = anatomy(model)
    _require_fitted_on(model, replacements)
    taken = [part for active in _ACTIVE.get(model, []) for part in _parts(active)]
    sound = []
    for one in replacements:
        source, target = found.resolve(one.source), found.resolve(one.target)
        one = Replacement(one.function, source, target, one.where)
        if not one.is_jump and not _is_submodule(source, target):
            raise InputError(
                f"A map {one} replaces no part of a model. Expected one between two layers of the stream, "
                "or from the input to the output of one sub-module, such as ffn_in.3 -> ffn_out.3."
            )
        if one.is_jump and target.kind != STREAM:
            raise InputError(f"A map {one} starts in the stream and must end there too.")
        if one.is_jump and source.layer > target.layer:
            raise InputError(f"A jump {one} runs backwards: expected a target at or after its source.")
        if one.is_jump and not (isinstance(one.where, str) and one.where == "all"):
            raise InputError(f"A jump {one} is over all tokens: its blocks are not computed for any.")
        if isinstance(one.where, str) and one.where not in ("all", "not-first"):
            raise InputError(f"where={one.where!r}: expected 'all', 'not-first' or a position a sentence.")
        _require_width(one, found.d_model)
        clashing = [part for part in _parts(one) if _clashes(part, taken)]
        if clashing:
            raise InputError(
                f"The replacement {one} overlaps another: {_named(clashing[0])} is replaced already."
            )
        taken += _parts(one)
        sound.append(one)
    return sound


def _is_submodule(source: Site, target: Site) -> bool:
    name, _, end = source.kind.rpartition("_")
    return end == "in" and target == Site(f"{name}_out", source.layer)


def _parts(one: Replacement) -> list[tuple[int, str]]:
    """What is taken, as ``(block, sub-module)``; a whole block is ``(block, "")``."""
    name = "" if one.is_jump else one.source.kind.removesuffix("_in")
    return [(block, name) for block in one.blocks]


def _clashes(part: tuple[int, str], taken: Sequence[tuple[int, str]]) -> bool:
    block, name = part
    return any(block == other and (not name or not own or name == own) for other, own in taken)


def _named(part: tuple[int, str]) -> str:
    block, name = part
    return f"{name} of block {block}" if name else f"block {block}, or a part of it,"


def _require_width(one: Replacement, d_model: int) -> None:
    weight = getattr(one.function, "weight", None)
    if isinstance(weight, Tensor) and tuple(weight.shape) != (d_model, d_model):
        raise InputError(
            f"The map {one} is of shape {tuple(weight.shape)}, and this model's vectors have {d_model} "
            "coordinates. Was it fitted on another model?"
        )


def _require_fitted_on(model: TransformerBridge, replacements: Sequence[Replacement]) -> None:
    seen: dict[str, Any] = {}
    for one in replacements:
        origin = getattr(one.function, "provenance", {}).get("model")
        if origin is not None:
            seen[origin["fingerprint"]] = getattr(one.function, "provenance", {})
    if seen:
        own = fingerprint(model)
        for provenance in seen.values():
            MapSet(provenance=provenance).require_model(own)


@contextmanager
def applied(model: TransformerBridge, replacements: Sequence[Replacement]) -> Iterator[None]:
    """Do what `patched` does with replacements that have been checked."""
    found = anatomy(model)
    hooks: list[tuple[str, Any]] = []
    with ExitStack() as stack:
        places = _Places()
        if any(not isinstance(one.where, str) or one.where != "all" for one in replacements):
            stack.enter_context(places.watching(model))
        for one in replacements:
            if not one.is_jump:
                hooks += _stand_in(one, found, places)
            elif one.blocks:
                stack.enter_context(_skipping(model, one, found.blocks_return_tuples))
            else:
                hooks.append((found.hook(one.source), _mapping(one.function)))
        stack.enter_context(model.hooks(fwd_hooks=hooks))
        stack.enter_context(_noted(model, replacements))
        yield


@contextmanager
def _noted(model: TransformerBridge, replacements: Sequence[Replacement]) -> Iterator[None]:
    active = _ACTIVE.setdefault(model, [])
    active += replacements
    try:
        yield
    finally:
        del active[len(active) - len(replacements) :]


def _mapping(function: Function) -> Any:
    return lambda value, hook: function(value).to(value.dtype)


def _stand_in(one: Replacement, found: Anatomy, places: _Places) -> list[tuple[str, Any]]:
    entered: list[Tensor] = []

    def enter(value: Tensor, hook: Any) -> None:
        entered[:] = [value]

    def leave(value: Tensor, hook: Any) -> Tensor:
        instead = one.function(entered.pop()).to(value.dtype)
        if isinstance(one.where, str) and one.where == "all":
            return instead
        return torch.where(places.chosen(one.where)[..., None], instead, value)

    return [(found.hook(one.source), enter), (found.hook(one.target), leave)]


class _Places:
    """Which token of its sentence every column of a running batch is."""

    def __init__(self) -> None:
        self._places: Tensor | None = None

    def chosen(self, where: Where) -> Tensor:
        """``[batch, length]``: which tokens are meant."""
        places = cast(Tensor, self._places)
        if isinstance(where, str):
            return places > 0
        if len(where) != len(places):
            raise InputError(
                f"'where' has {len(where)} rows for a batch of {len(places)} sentences. Expected one each."
            )
        where = where.to(places.device)
        if where.dtype != torch.bool:
            return places == where[:, None]
        known = (places >= 0) & (places < where.shape[1])
        return where.gather(1, places.clamp(0, where.shape[1] - 1)) | ~known

    @contextmanager
    def watching(self, model: TransformerBridge) -> Iterator[None]:
        """Look at what every forward pass is given."""
        inner = model.original_model
        signature = inspect.signature(inner.forward)

        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = signature.bind_partial(*args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
            n, length = tokens.shape[:2]
            mask, cache = given.get("attention_mask"), given.get("past_key_values")
            if mask is not None and mask.ndim == 2:
                self._places = (mask.long().cumsum(1) - 1)[:, -length:]
                return
            past = 0 if cache is None else cache.get_seq_length()
            self._places = torch.arange(past, past + length, device=tokens.device).expand(n, length)

        handle = inner.register_forward_pre_hook(look, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _skipping(model: TransformerBridge, one: Replacement, as_tuples: bool) -> Iterator[None]:
    """Let blocks hand on what they are given, and the first of them map it before."""

    def forward_of(layer: int) -> Callable[..., Any]:
        block = model.blocks[layer]

        def forward(*args: Any, **kwargs: Any) -> Any:
            h = args[0] if args else kwargs["hidden_states"]
            _keep_place_in_cache((*args[1:], *kwargs.values()), layer, h)
            if layer == one.blocks[0]:
                h = block.hook_in(h)
                h = one.function(h).to(h.dtype)
            if layer == one.blocks[-1]:
                h = block.hook_out(h)
            return (h, None) if as_tuples else h

        return forward

    # An attribute of the instance goes before the method of its class, and leaves no trace when deleted.
    try:
        for layer in one.blocks:
            vars(model.blocks[layer])["forward"] = forward_of(layer)
        yield
    finally:
        for layer in one.blocks:
            vars(model.blocks[layer]).pop("forward", None)


def _keep_place_in_cache(given: Sequence[Any], layer: int, h: Tensor) -> None:
    # The model reads off the cache how many tokens there were, and may ask a skipped layer for it.
    from transformers import Cache

    for cache in given:
        if isinstance(cache, Cache):
            nothing = h.new_zeros(h.shape[0], 1, h.shape[1], 1)
            cache.update(nothing, nothing, layer)
