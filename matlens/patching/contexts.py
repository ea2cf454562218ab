"""Running a model with parts of it replaced by linear maps, for as long as a context lasts.

Blocks that are jumped over are not computed; a sub-module that is replaced runs, and hooks put the
stand-in's output in place of its own. Between any other two sites everything is computed, and hooks put what
is made of the first in the place of the second.
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
@contextmanager
def patched(
    model: TransformerBridge, replacements: Iterable[Replacement | LinearMap]
) -> Iterator[TransformerBridge]:
    """Run a model with parts replaced, for as long as the context lasts.

    Works around any call: ``model(...)``, ``run_with_cache``, ``generate`` with or without a cache of
    keys and values. Blocks that a jump skips are not computed and their hooks do not fire; in a cache they
    keep an empty place. Contexts can be nested, and end in any order. Whatever happens inside, the model is
    as before afterwards. What is collected inside is known as a patched model's; see `changes_of`.

    Parameters
    ----------
    model
        As `matlens.load` gives it.
    replacements
        Maps, or `Replacement` where not all tokens are meant: what `jump`, `mat_attn`, `mat_ffn`,
        `mat_ln1_ln2` and `Scheme.replacements` give, in any order and combination. A replacement reads the
        input of its sub-module before hooks that are added inside the context; what hooks added earlier do
        to the sub-module's output is lost.

    Raises
    ------
    InputError
        A map belongs to another model, was fitted on a model with changes that do not hold here, or is not
        finite; a range runs backwards; two replacements touch the same part; or the model is changed or read
        in another thread.

    Examples
    --------
    >>> with matlens.patched(model, [maps[4, 10], *matlens.mat_attn(maps, 20, 30)]):
    ...     model.generate("The capital of France is")
    """
    requested = []
    for item in replacements:
        check(item, Replacement | LinearMap, "A replacement")
        requested.append(Replacement.from_map(item) if isinstance(item, LinearMap) else item)
    with apply_replacements(model, resolve_replacements(model, requested, _ACTIVE.get(model, []))):
        yield model


@contextmanager
def apply_replacements(model: TransformerBridge, replacements: Sequence[Replacement]) -> Iterator[None]:
    """Do what `patched` does with replacements that have been checked."""
    layout = ModelLayout.from_model(model)
    writing: list[tuple[str, Any]] = []
    reading: list[tuple[str, Any]] = []
    forwards: dict[int, Any] = {}
    places = TokenPlaces(model)
    for i, replacement in enumerate(replacements):
        source, (target, before) = layout.hook(replacement.source), layout.written_at(replacement.target)
        if replacement.blocks:
            forwards |= skipping_forwards(model, replacement, layout)
        elif source == target:
            writing.append((target, _mapping_hook(replacement, places)))
        else:
            keys = {hook: (i, hook) for hook in (source, before) if hook is not None}
            order = layout.order(replacement.source)
            writing.append((target, _writing_hook(replacement, places, order, list(keys.values()))))
            reading += [(hook, places.keep(key)) for hook, key in keys.items()]
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


def _writing_hook(
    replacement: Replacement, places: TokenPlaces, order: int, keys: Sequence[tuple[int, str]]
) -> Callable[..., Tensor]:
    """What replaces the vectors at a target, less what the model adds to them."""

    def leave(value: Tensor, hook: Any) -> Tensor:
        if not places.read.keys() >= set(keys) or places.starts_behind(order):
            raise InputError(
                f"The pass came to {replacement.target} and not to {replacement.source} before, so there is "
                "nothing to put there. Expected a pass that starts no later than the replacement."
            )
        read, *added = map(places.read.pop, keys)
        instead = stand_in(replacement, read, value.flatten(2))
        for before in added:
            instead = instead - before.to(instead)
        return _put(replacement, instead, value, places)

    return leave
