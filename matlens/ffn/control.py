"""Steering: run a model with modified coefficients (paper B, section 6.1)."""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from matlens.errors import InputError, check, checked
from matlens.ffn.values import ValueName, ValueVector, ValueVectors
from matlens.linear.maps import tensor_digest
from matlens.models.changes import changing
from matlens.models.layout import ModelLayout
from matlens.models.sites import COEFFICIENTS, Site
from matlens.patching.contexts import TokenPlaces, find_reserved, replaced_methods, reserve_parts
from matlens.patching.replacements import Replacement

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Tokens = Literal["all", "not-first", "last", "new"] | Int[Tensor, " batch"] | Bool[Tensor, "batch longest"]
_DONE = {"set": "set to", "add": "changed by adding", "scale": "scaled by"}
_ACTIVE: WeakKeyDictionary[Any, set[ValueVector]] = WeakKeyDictionary()


@checked
@contextmanager
def controlled(
    model: TransformerBridge,
    vectors: Mapping[ValueName, float] | Iterable[ValueName],
    value: float = 3.0,
    *,
    how: Literal["set", "add", "scale"] = "set",
    where: Tokens = "all",
) -> Iterator[TransformerBridge]:
    """Set, add to or scale coefficients of value vectors inside a context.

    Works around any call: ``model(...)``, ``run_with_cache``, ``generate`` with or without a cache. In gated
    FFNs the coefficient is the product of gate and up. Contexts can be nested, and combined with
    `matlens.patched` where that leaves the FFNs of these layers in place. The model is as before afterwards,
    also after an exception. Activations collected inside record the change; see `changes_of`.

    Parameters
    ----------
    vectors
        Value vectors such as ``"L3D12"``, or a mapping from them to a value each.
    value
        The value of all vectors, unless they are a mapping. Typical coefficients differ between models: the
        paper's 3 is large for GPT-2.
    how
        Whether the value replaces the coefficient, is added to it, or multiplies it.
    where
        At which tokens, counted from each sentence's own first: ``"all"``; ``"not-first"``; ``"last"``, the
        last of each sentence or prompt; ``"new"``, those that ``generate`` adds to its prompt, or that a pass
        with a cache appends; one position per sentence, ``[batch]``; or a Boolean mask
        ``[batch, longest]``, which includes tokens past its end. Padding is excluded, but for ``"all"``,
        where it has no effect.

    Examples
    --------
    >>> with controlled(model, {"L24D219": 5.0, "L22D984": 3.0}):
    ...     model.generate("I can't believe you")
    >>> with controlled(model, ["L24D219"], 0.0, how="scale", where="new"):
    ...     model.generate("I can't believe you")
    """
    values = ValueVectors(model)
    changes: dict[ValueVector, float] = {}
    pairs = vectors.items() if isinstance(vectors, Mapping) else ((name, value) for name in vectors)
    for name, number in pairs:
        vector = values.resolve(name)
        if vector in changes:
            raise InputError(f"vectors must be different, got {vector} twice.")
        check(number, float, f"The value of {vector}")
        changes[vector] = float(number)
    if isinstance(where, Tensor) and where.ndim == 1 and bool((where < 0).any()):
        raise InputError("where must be positions of at least 0, or a Boolean mask of the tokens.")
    active = _ACTIVE.setdefault(model, set())
    if repeated := sorted(active & set(changes)):
        raise InputError(f"{repeated[0]} is already controlled.")
    ffns = [  # which change nothing, and reserve the FFNs
        Replacement(lambda x: x, Site("ffn_in", layer), Site("ffn_out", layer))
        for layer in sorted({vector.layer for vector in changes})
    ]
    layers_under_control = {vector.layer for vector in active}
    for ffn in ffns:
        replaced = ffn.source.layer not in layers_under_control and find_reserved(model, ffn)
        if replaced:
            raise InputError(
                f"Value vectors of layer {ffn.source.layer} cannot be controlled: {replaced} is replaced, "
                "so its coefficients have no effect."
            )
    tokens = _ChosenTokens(model, where)
    hooks = _hooks(model, values, changes, how, tokens)
    at = where if isinstance(where, str) else f"the tokens {tensor_digest(where)}"
    described = [
        f"the coefficient of {vector} {_DONE[how]} {float(number)!r} at {at}"
        for vector, number in changes.items()
    ]
    with ExitStack() as stack:
        stack.enter_context(changing(model, lambda: described, hooks, [tokens.places.look]))
        stack.enter_context(tokens.watching())
        stack.enter_context(reserve_parts(model, ffns))
        active |= set(changes)
        try:
            yield model
        finally:
            active -= set(changes)


class _ChosenTokens:
    """The tokens of a running batch at which coefficients are changed."""

    def __init__(self, model: TransformerBridge, where: Tokens) -> None:
        self.everywhere = isinstance(where, str) and where == "all"
        self.places, self._where = TokenPlaces(model), where
        self._owners = [model, model.original_model]
        self._running = threading.local()

    def __call__(self) -> Tensor:
        """``[batch, length]``."""
        where = self._where
        if isinstance(where, Tensor) or where == "all" or where == "not-first":
            return self.places.chosen(where)
        places = self.places.of_batch
        last = places.max(1, keepdim=True).values
        if not getattr(self._running, "generating", 0):
            first = places.masked_fill(places < 0, torch.iinfo(places.dtype).max).min(1, keepdim=True).values
            return (places == last) & (places >= 0) if where == "last" else (places >= 0) & (first > 0)
        if self._running.ends is None:  # the first pass reads the prompts
            self._running.ends = last
        ends = self._running.ends.to(places.device)
        if len(ends) != len(places):
            raise InputError(
                f"generate() began with {len(ends)} sentences and continues with {len(places)}, so the new "
                "tokens are unknown. Use where='all', or generate one sequence for each prompt."
            )
        return (places == ends) & (places >= 0) if where == "last" else places > ends

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the positions of tokens and, where it matters, when ``generate`` begins and ends."""
        if self.everywhere:
            yield
            return
        ways = [
            (owner, name)
            for owner in self._owners
            for name in ("generate", "generate_stream")
            if hasattr(type(owner), name) and isinstance(self._where, str)
        ]
        methods = [(owner, name, self._noting(getattr(owner, name))) for owner, name in ways]
        with replaced_methods(methods), self.places.watching():
            yield

    def _noting(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.isgeneratorfunction(generate):
            return self._generating()(generate)

        def noted_stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self._generating():
                yield from generate(*args, **kwargs)

        return noted_stream

    @contextmanager
    def _generating(self) -> Iterator[None]:
        running = self._running
        running.generating = getattr(running, "generating", 0) + 1
        if running.generating == 1:
            running.ends = None
        try:
            yield
        finally:
            running.generating -= 1


def _hooks(
    model: TransformerBridge,
    values: ValueVectors,
    changes: Mapping[ValueVector, float],
    how: str,
    tokens: _ChosenTokens,
) -> list[tuple[str, Any]]:
    layers: dict[int, dict[int, float]] = defaultdict(dict)
    for vector, number in changes.items():
        layers[vector.layer][values.column(vector)] = number
    layout = ModelLayout.from_model(model)
    return [
        (layout.hook(Site(COEFFICIENTS, layer)), _changing_hook(of_layer, how, tokens))
        for layer, of_layer in layers.items()
    ]


def _changing_hook(changes: Mapping[int, float], how: str, tokens: _ChosenTokens) -> Any:
    """A hook that changes coefficients of a layer, by their index."""
    index, new_values = torch.tensor(list(changes)), torch.tensor(list(changes.values()), dtype=torch.float32)

    def change_coefficients(m: Tensor, hook: Any) -> Tensor:
        at, number = index.to(m.device), new_values.to(m)
        old = m[..., at]
        new = {"set": number.expand_as(old), "add": old + number, "scale": old * number}[how]
        if not tokens.everywhere:
            new = torch.where(tokens()[..., None].to(m.device), new, old)
        changed = m.clone()
        changed[..., at] = new
        return changed

    return change_coefficients
