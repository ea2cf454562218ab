"""Steering: run a model with modified coefficients (paper B, section 6.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from matlens.errors import InputError, check, checked
from matlens.ffn.values import ValueName, ValueVector, ValueVectors
from matlens.models.hooks import changing
from matlens.models.layout import ModelLayout
from matlens.models.sites import COEFFICIENTS, Site
from matlens.models.weights import tensor_digest
from matlens.patching.contexts import find_reserved, reserve_parts
from matlens.patching.positions import TokenPositions, Tokens
from matlens.patching.replacements import Replacement

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

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
    also after an exception. Activations collected inside record the change; see `active_hooks`.

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
        The tokens, counted from each sentence's own first: ``"all"``; ``"not-first"``; ``"last"``, the last
        of each sentence, or of its prompt in ``generate``; ``"new"``, those that ``generate`` adds to its
        prompt; one position per sentence, ``[batch]``; or a Boolean mask ``[batch, longest]``, which
        includes tokens past its end. In passes of your own that continue a cache, ``"last"`` is the last
        token of the first of them inside the context, and ``"new"`` are tokens after those in the cache.
        Padding is excluded, except for ``"all"``, where it has no effect.

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
        if abs(number) > torch.finfo(model.cfg.dtype).max:
            raise InputError(
                f"The value of {vector} must be finite in the model's {model.cfg.dtype}, got {number!r}."
            )
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
    tokens = TokenPositions.of(model)
    hooks = [*_hooks(model, values, changes, how, where, tokens), tokens.measuring()]
    at = where if isinstance(where, str) else f"the tokens {tensor_digest(where)}"
    described = [
        f"the coefficient of {vector} {_DONE[how]} {float(number)!r} at {at}"
        for vector, number in changes.items()
    ]
    with ExitStack() as stack:
        stack.enter_context(changing(model, described, hooks))
        stack.enter_context(tokens.watching())
        stack.enter_context(reserve_parts(model, ffns))
        active |= set(changes)
        try:
            yield model
        finally:
            active -= set(changes)


def _hooks(
    model: TransformerBridge,
    values: ValueVectors,
    changes: Mapping[ValueVector, float],
    how: str,
    where: Tokens,
    tokens: TokenPositions,
) -> list[tuple[str, Any]]:
    layers: dict[int, dict[int, float]] = defaultdict(dict)
    for vector, number in changes.items():
        layers[vector.layer][values.column(vector)] = number
    layout = ModelLayout.from_model(model)
    return [
        (layout.hook(Site(COEFFICIENTS, layer)), _changing_hook(of_layer, how, where, tokens))
        for layer, of_layer in layers.items()
    ]


def _changing_hook(changes: Mapping[int, float], how: str, where: Tokens, tokens: TokenPositions) -> Any:
    """A hook that changes coefficients of a layer, by their index."""
    index = torch.tensor(list(changes))
    new_values = torch.tensor(list(changes.values()), dtype=torch.float64)
    everywhere = isinstance(where, str) and where == "all"

    def change_coefficients(m: Tensor, hook: Any) -> Tensor:
        at, number = index.to(m.device), new_values.to(m)
        old = m[..., at]
        new = {"set": number.expand_as(old), "add": old + number, "scale": old * number}[how]
        if not everywhere:
            new = torch.where(tokens.chosen(where)[..., None].to(m.device), new, old)
        changed = m.clone()
        changed[..., at] = new
        return changed

    return change_coefficients
