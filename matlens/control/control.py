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
        As `matlens.load` gives it.
    names
        Which value vectors, such as ``"L3D12"``.
    value
        What their coefficients are set to; one number for all, or a number for each name. How large
        coefficients are differs from model to model: the paper's 3 is large for GPT-2.

    Raises
    ------
    InputError
        There are no names, or one does not exist in this model, or is given twice or under control already;
        a value is no finite number or, of several, missing or of a vector that is not named; a block, or its
        FFN, is replaced.

    Examples
    --------
    >>> with controlled(model, ["L24D219", "L22D984"], 5.0):
    ...     model.generate("I can't believe you")
    """
    values = ValueVectors(model)
    wanted = _coefficients(values, names, value)
    active = _ACTIVE.setdefault(model, set())
    again = sorted(active & set(wanted))
    if again:
        raise InputError(
            f"{again[0]} is under control already. Expected value vectors that no context around this one "
            "sets."
        )
    kept = [_kept(layer) for layer in sorted({one.layer for one in wanted})]
    controlled_already = {one.layer for one in active}
    for ffn in kept:
        replaced = ffn.source.layer not in controlled_already and find_reserved(model, ffn)
        if replaced:
            raise InputError(
                f"Value vectors of layer {ffn.source.layer} cannot be controlled: {replaced} is replaced, "
                "and what its coefficients are plays no part. Expected layers whose FFNs are run."
            )
    with model.hooks(fwd_hooks=_hooks(model, wanted)), reserve_parts(model, kept):
        active |= set(wanted)
        try:
            yield model
        finally:
            active -= set(wanted)


def _coefficients(
    values: ValueVectors, names: Iterable[ValueName], value: float | Mapping[ValueName, float]
) -> dict[ValueVector, float]:
    if isinstance(names, str | ValueVector):
        raise InputError(f"{names!r} is one name. Expected a list of them, such as ['L3D12'].")
    resolved = [values.resolve(name) for name in names]
    if not resolved:
        raise InputError("No value vectors are named. Expected at least one, such as 'L3D12'.")
    twice = {one for one in resolved if resolved.count(one) > 1}
    if twice:
        raise InputError(f"{min(twice)} is named twice. Expected each value vector once.")
    if isinstance(value, Mapping):
        given = {values.resolve(name): number for name, number in value.items()}
        odd = sorted(set(given) ^ set(resolved))
        if odd:
            what = "has no value" if odd[0] in resolved else "has a value but is not named"
            raise InputError(f"{odd[0]} {what}. Expected a value for each named vector and no other.")
    else:
        given = dict.fromkeys(resolved, value)
    for one, number in given.items():
        if not isinstance(number, Real) or not math.isfinite(number):
            raise InputError(
                f"{number!r} is no value for the coefficient of {one}. Expected a finite number."
            )
    return {one: float(given[one]) for one in resolved}


def _kept(layer: int) -> Replacement:
    """What says that the FFN of a layer is in use."""
    return Replacement(lambda x: x, Site("ffn_in", layer), Site("ffn_out", layer))


def _hooks(model: TransformerBridge, wanted: Mapping[ValueVector, float]) -> list[tuple[str, Any]]:
    layers: dict[int, dict[int, float]] = defaultdict(dict)
    for one, number in wanted.items():
        layers[one.layer][one.index] = number
    found = Anatomy.from_model(model)
    return [(found.hook(Site(COEFFICIENTS, layer)), _setting(own)) for layer, own in layers.items()]


def _setting(own: Mapping[int, float]) -> Any:
    index, numbers = torch.tensor(list(own)), torch.tensor(list(own.values()))

    def set_coefficients(m: Tensor, hook: Any) -> Tensor:
        changed = m.clone()
        changed[..., index.to(m.device)] = numbers.to(m)
        return changed

    return set_coefficients
