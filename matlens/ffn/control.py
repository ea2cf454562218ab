"""Control: a model run with the coefficients of chosen value vectors changed (paper B, section 6.1).

A value vector that is turned on adds its tokens' scores to every prediction, whatever is read. It takes a
hook on the FFN's coefficients and no training.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from matlens.errors import InputError, checked
from matlens.ffn.values import ValueName, ValueVector, ValueVectors
from matlens.linear.maps import tensor_digest
from matlens.models.hooks import hanging, intervening
from matlens.models.layout import ModelLayout
from matlens.models.sites import COEFFICIENTS, Site
from matlens.patching.contexts import TokenPlaces, find_reserved, replaced_methods, reserve_parts
from matlens.patching.replacements import Replacement

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PAPER_COEFFICIENT = 3.0  # what the paper sets coefficients of GPT-2 to
Tokens = Literal["all", "not-first", "last", "new"] | Int[Tensor, " batch"] | Bool[Tensor, "batch longest"]
_ACTIVE: WeakKeyDictionary[Any, set[ValueVector]] = WeakKeyDictionary()


@checked
@dataclass(frozen=True)
class CoefficientChange:
    """A change of a coefficient: another value, or its own with a number added or multiplied.

    A number in its place sets the coefficient; `added` and `scaled` make the others.
    """

    how: Literal["set", "added", "scaled"]
    number: float

    def __str__(self) -> str:
        return {"set": "set to", "added": "changed by adding", "scaled": "scaled by"}[self.how] + (
            f" {float(self.number)!r}"
        )


@checked
def added(number: float) -> CoefficientChange:
    """Add a number to a coefficient."""
    return CoefficientChange("added", number)


@checked
def scaled(factor: float) -> CoefficientChange:
    """Multiply a coefficient by a factor: 0 turns the value vector off."""
    return CoefficientChange("scaled", factor)


Value = float | CoefficientChange


@checked
@contextmanager
def controlled(
    model: TransformerBridge,
    names: Iterable[ValueName],
    value: Value | Mapping[ValueName, Value] = PAPER_COEFFICIENT,
    *,
    where: Tokens = "all",
) -> Iterator[TransformerBridge]:
    """Set, add to or scale the coefficients of value vectors, for as long as the context lasts.

    Works around any call: ``model(...)``, ``run_with_cache``, ``generate`` with or without a cache of keys
    and values. In gated FFNs the coefficient is the product of gate and up, so that the sub-update is
    ``value * v_i`` there too. Contexts can be nested, and combined with `matlens.patched` where that leaves
    the FFNs of these layers in place. Whatever happens inside, the model is as before afterwards. What is
    collected inside says so and is refused as the plain model's; see `changes_of`.

    Parameters
    ----------
    model
        A model, as `matlens.load` gives it.
    names
        Names of value vectors, such as ``"L3D12"``.
    value
        What their coefficients are set to; or ``added(2.0)`` or ``scaled(0.5)``; one for all, or one for each
        name. How large coefficients are differs from model to model: the paper's 3 is large for GPT-2.
    where
        At which tokens, counted from each sentence's own first: ``"all"``; ``"not-first"``; ``"last"``, the
        last of each sentence or prompt; ``"new"``, those that ``generate`` adds to its prompt, or that a pass
        with a cache reads behind it; one position for each sentence, ``[batch]``; or a truth value for each
        token of each sentence, ``[batch, longest]``, where tokens past its end are meant. Padding is none of
        them, but for ``"all"``, where it tells nothing.

    Raises
    ------
    InputError
        A name does not exist in this model, is given twice or is under control already; one of several values
        is missing, or belongs to a vector that is not named; a block, or its FFN, is replaced; ``where`` has
        not as many rows as a batch; the model is changed or read in another
        thread.

    Examples
    --------
    >>> with controlled(model, ["L24D219", "L22D984"], 5.0):
    ...     model.generate("I can't believe you")
    >>> with controlled(model, ["L24D219"], scaled(0.0), where="new"):
    ...     model.generate("I can't believe you")
    """
    values = ValueVectors(model)
    changes = _changes(values, names, value)
    if isinstance(where, Tensor) and where.ndim == 1 and bool((where < 0).any()):
        raise InputError("where must be positions of at least 0, or a Boolean mask of the tokens.")
    active = _ACTIVE.setdefault(model, set())
    repeated = sorted(active & set(changes))
    if repeated:
        raise InputError(
            f"{repeated[0]} is under control already. Expected value vectors that no context around this one "
            "sets."
        )
    ffns = [_ffn_in_use(layer) for layer in sorted({vector.layer for vector in changes})]
    layers_under_control = {vector.layer for vector in active}
    for ffn in ffns:
        replaced = ffn.source.layer not in layers_under_control and find_reserved(model, ffn)
        if replaced:
            raise InputError(
                f"Value vectors of layer {ffn.source.layer} cannot be controlled: {replaced} is replaced, "
                "so its coefficients have no effect. Expected layers whose FFNs are run."
            )
    tokens = _ChosenTokens(model, where)
    hooks = _hooks(model, values, changes, tokens)
    functions = [function for _, function in hooks] + [tokens.places.look]
    at = where if isinstance(where, str) else f"the tokens {tensor_digest(where)}"
    described = [f"the coefficient of {vector} {change} at {at}" for vector, change in changes.items()]
    with ExitStack() as stack:
        stack.enter_context(intervening(model, lambda: described, functions))
        stack.enter_context(tokens.watching())
        stack.enter_context(hanging(model, hooks))
        stack.enter_context(reserve_parts(model, ffns))
        active |= set(changes)
        try:
            yield model
        finally:
            active -= set(changes)


def _changes(
    values: ValueVectors, names: Iterable[ValueName], value: Value | Mapping[ValueName, Value]
) -> dict[ValueVector, CoefficientChange]:
    resolved = [values.resolve(name) for name in names]
    repeated = {vector for vector in resolved if resolved.count(vector) > 1}
    if repeated:
        raise InputError(f"{min(repeated)} is named twice. Expected each value vector once.")
    if isinstance(value, Mapping):
        given = {values.resolve(name): number for name, number in value.items()}
        unmatched = sorted(set(given) ^ set(resolved))
        if unmatched:
            problem = "has no value" if unmatched[0] in resolved else "has a value but is not named"
            raise InputError(
                f"{unmatched[0]} {problem}. Expected a value for each named vector and no other."
            )
    else:
        given = dict.fromkeys(resolved, value)
    return {
        vector: of_vector if isinstance(of_vector, CoefficientChange) else CoefficientChange("set", of_vector)
        for vector, of_vector in given.items()
    }


class _ChosenTokens:
    """The tokens of a running batch at which coefficients are changed.

    What a prompt is and what is new is known while ``generate`` runs, whether it keeps a cache or reads
    everything again for each token.
    """

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
                f"generate() began with {len(ends)} sentences and goes on with {len(places)}, so which "
                "tokens are new is not known. Expected where='all', or to generate one for each."
            )
        return (places == ends) & (places >= 0) if where == "last" else places > ends

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the places of tokens and, where it matters, when ``generate`` begins and ends."""
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


def _ffn_in_use(layer: int) -> Replacement:
    """A replacement that changes nothing, and says that the FFN of a layer is in use."""
    return Replacement(lambda x: x, Site("ffn_in", layer), Site("ffn_out", layer))


def _hooks(
    model: TransformerBridge,
    values: ValueVectors,
    changes: Mapping[ValueVector, CoefficientChange],
    tokens: _ChosenTokens,
) -> list[tuple[str, Any]]:
    layers: dict[int, dict[int, CoefficientChange]] = defaultdict(dict)
    for vector, change in changes.items():
        layers[vector.layer][values.column(vector)] = change
    layout = ModelLayout.from_model(model)
    return [
        (layout.hook(Site(COEFFICIENTS, layer)), _changing_hook(of_layer, tokens))
        for layer, of_layer in layers.items()
    ]


def _changing_hook(changes: Mapping[int, CoefficientChange], tokens: _ChosenTokens) -> Any:
    """A hook that changes coefficients of a layer, by their index, to ``factor * old + constant``."""
    index = torch.tensor(list(changes))
    scaled = torch.tensor([change.how == "scaled" for change in changes.values()])
    kept = torch.tensor([change.how != "set" for change in changes.values()])
    numbers = torch.tensor([float(change.number) for change in changes.values()])
    factors, constants = torch.where(scaled, numbers, kept.float()), numbers.where(~scaled, 0.0)

    def change_coefficients(m: Tensor, hook: Any) -> Tensor:
        at = index.to(m.device)
        old = m[..., at]
        factor, constant = factors.to(m), constants.to(m)
        new = torch.where(factor == 0, constant, factor * old + constant)
        if not tokens.everywhere:
            new = torch.where(tokens()[..., None].to(m.device), new, old)
        changed = m.clone()
        changed[..., at] = new
        return changed

    return change_coefficients
