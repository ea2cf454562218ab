"""Running a model with parts of it replaced by linear maps, for as long as a context lasts.

Blocks that are jumped over are not computed; a sub-module that is replaced runs, and hooks put the
stand-in's output in place of its own. Between any other two sites everything is computed, and hooks put what
is made of the first in the place of the second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from matlens.errors import InputError, checked
from matlens.linear.maps import LinearMap
from matlens.models.hooks import hanging, intervening
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement, describe_replacement, stand_in
from matlens.patching.resolution import find_overlap, resolve_replacements
from matlens.patching.skipping import replaced_forwards, skipping_forwards
from matlens.patching.token_places import TokenPlaces

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
    layout = ModelLayout.from_model(model)
    writing: list[tuple[str, Any]] = []
    reading: list[tuple[str, Any]] = []
    forwards: dict[int, Any] = {}
    places = TokenPlaces(model)
    for replacement in replacements:
        source, (target, before) = layout.hook(replacement.source), layout.written_at(replacement.target)
        if replacement.is_jump and replacement.blocks:
            forwards |= skipping_forwards(model, replacement, layout)
        elif source == target:
            writing.append((target, _mapping_hook(replacement, places)))
        else:
            entered, added = _Kept(places, layout.order(replacement.source)), _Kept(places)
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
        stack.enter_context(replaced_forwards(model, forwards))
        stack.enter_context(hanging(model, hooks))
        stack.enter_context(reserve_parts(model, replacements))
        yield


def find_reserved(model: TransformerBridge, replacement: Replacement) -> str | None:
    """Name the first part of a replacement that is reserved in the model; ``None`` if there is none."""
    return find_overlap(ModelLayout.from_model(model), replacement, _ACTIVE.get(model, []))


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
        instead = stand_in(replacement, value, value)
        return instead if replacement.is_jump else _put(replacement, instead, value, places)

    return hook


def _put(replacement: Replacement, instead: Tensor, value: Tensor, places: TokenPlaces) -> Tensor:
    """What is put in the place of a value at the chosen tokens and heads; of several, head after head."""
    chosen = places.chosen(replacement.where)[..., None].to(value.device)
    if replacement.heads is not None:
        heads = torch.zeros(value.shape[2:], dtype=torch.bool, device=value.device)
        heads[list(replacement.heads)] = True
        chosen = chosen & heads.flatten()
    return torch.where(chosen, instead, value.flatten(2)).view(value.shape)


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
        instead = stand_in(replacement, read, value.flatten(2))
        if before is not None:
            instead = instead - before.to(instead)
        return _put(replacement, instead, value, places)

    return leave
