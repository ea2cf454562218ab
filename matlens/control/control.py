"""Control: a model run with the coefficients of chosen value vectors set to a value (paper B, section 6.1).

A value vector that is turned on adds its tokens' scores to every prediction, whatever is read. It takes a
hook on the FFN's coefficients and no training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from matlens.errors import InputError
from matlens.ffn.values import ValueName, ValueVector, ValueVectors
from matlens.models.anatomy import Anatomy
from matlens.models.changes import hanging, intervening
from matlens.models.sites import COEFFICIENTS, Site
from matlens.patching.contexts import find_reserved, reserve_parts
from matlens.patching.replacements import Replacement

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PAPER_COEFFICIENT = 3.0  # what the paper sets coefficients of GPT-2 to
_ACTIVE: WeakKeyDictionary[Any, set[ValueVector]] = WeakKeyDictionary()


@contextmanager
def controlled(
    model: TransformerBridge,
    names: Iterable[ValueName],
    value: float | Mapping[ValueName, float] = PAPER_COEFFICIENT,
) -> Iterator[TransformerBridge]:
    """Set the coefficients of value vectors at all positions, for as long as the context lasts.

    Works around any call: ``model(...)``, ``run_with_cache``, ``generate`` with or without a cache of keys
    and values. In gated FFNs the coefficient is the product of gate and up, so that the sub-update is
    ``value * v_i`` there too. Contexts can be nested, and combined with `matlens.patched` where that leaves
    the FFNs of these layers in place. Whatever happens inside, the model is as before afterwards.

    Parameters
    ----------
    model
        A model, as `matlens.load` gives it.
    names
        Names of value vectors, such as ``"L3D12"``.
    value
        What their coefficients are set to; one number for all, or a number for each name. How large
        coefficients are differs from model to model: the paper's 3 is large for GPT-2.

    Raises
    ------
    InputError
        There are no names; a name does not exist in this model, is given twice or is under control already; a
        value is not a finite number; of several values one is missing, or belongs to a vector that is not
        named; a block, or its FFN, is replaced.

    Examples
    --------
    >>> with controlled(model, ["L24D219", "L22D984"], 5.0):
    ...     model.generate("I can't believe you")
    """
    values = ValueVectors(model)
    coefficients = _coefficients(values, names, value)
    active = _ACTIVE.setdefault(model, set())
    repeated = sorted(active & set(coefficients))
    if repeated:
        raise InputError(
            f"{repeated[0]} is under control already. Expected value vectors that no context around this one "
            "sets."
        )
    ffns = [_ffn_in_use(layer) for layer in sorted({vector.layer for vector in coefficients})]
    layers_under_control = {vector.layer for vector in active}
    for ffn in ffns:
        replaced = ffn.source.layer not in layers_under_control and find_reserved(model, ffn)
        if replaced:
            raise InputError(
                f"Value vectors of layer {ffn.source.layer} cannot be controlled: {replaced} is replaced, "
                "so its coefficients have no effect. Expected layers whose FFNs are run."
            )
    hooks = _hooks(model, coefficients)
    changes = [f"the coefficient of {vector} set to {number}" for vector, number in coefficients.items()]
    functions = [function for _, function in hooks]
    with intervening(model, lambda: changes, functions), hanging(model, hooks), reserve_parts(model, ffns):
        active |= set(coefficients)
        try:
            yield model
        finally:
            active -= set(coefficients)


def _coefficients(
    values: ValueVectors, names: Iterable[ValueName], value: float | Mapping[ValueName, float]
) -> dict[ValueVector, float]:
    if isinstance(names, str | ValueVector):
        raise InputError(f"{names!r} is one name. Expected a list of them, such as ['L3D12'].")
    if not isinstance(names, Iterable):
        raise InputError(f"names is {names!r}. Expected a list of value vectors, such as ['L3D12'].")
    resolved = [values.resolve(name) for name in names]
    if not resolved:
        raise InputError("No value vectors are named. Expected at least one, such as 'L3D12'.")
    repeated = {vector for vector in resolved if resolved.count(vector) > 1}
    if repeated:
        raise InputError(f"{min(repeated)} is named twice. Expected each value vector once.")
    if isinstance(value, Mapping):
        numbers = {values.resolve(name): number for name, number in value.items()}
        unmatched = sorted(set(numbers) ^ set(resolved))
        if unmatched:
            problem = "has no value" if unmatched[0] in resolved else "has a value but is not named"
            raise InputError(
                f"{unmatched[0]} {problem}. Expected a value for each named vector and no other."
            )
    else:
        numbers = dict.fromkeys(resolved, value)
    for vector, number in numbers.items():
        if not isinstance(number, Real) or not math.isfinite(number):
            raise InputError(
                f"{number!r} is no value for the coefficient of {vector}. Expected a finite number."
            )
    return {vector: float(numbers[vector]) for vector in resolved}


def _ffn_in_use(layer: int) -> Replacement:
    """A replacement that changes nothing, and says that the FFN of a layer is in use."""
    return Replacement(lambda x: x, Site("ffn_in", layer), Site("ffn_out", layer))


def _hooks(model: TransformerBridge, coefficients: Mapping[ValueVector, float]) -> list[tuple[str, Any]]:
    layers: dict[int, dict[int, float]] = defaultdict(dict)
    for vector, number in coefficients.items():
        layers[vector.layer][vector.index] = number
    anatomy = Anatomy.from_model(model)
    return [
        (anatomy.hook(Site(COEFFICIENTS, layer)), _setter(of_layer)) for layer, of_layer in layers.items()
    ]


def _setter(coefficients: Mapping[int, float]) -> Any:
    """A hook that sets the coefficients of a layer, given by their index."""
    index, numbers = torch.tensor(list(coefficients)), torch.tensor(list(coefficients.values()))

    def set_coefficients(m: Tensor, hook: Any) -> Tensor:
        changed = m.clone()
        changed[..., index.to(m.device)] = numbers.to(m)
        return changed

    return set_coefficients
