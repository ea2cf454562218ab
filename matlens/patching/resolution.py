"""Which replacements fit a model and each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from matlens.errors import InputError, short
from matlens.linear.maps import LinearMap
from matlens.models.changes import changes_of, describe_changes
from matlens.models.identity import ModelIdentity, Provenance, check_raw
from matlens.models.layout import ModelLayout, probe_inputs
from matlens.models.sites import MID, MID_CROSS, STREAM, Site
from matlens.patching.replacements import Replacement, describe_replacement

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


def resolve_replacements(
    model: TransformerBridge,
    replacements: Sequence[Replacement],
    active: Sequence[Replacement] = (),
    *,
    identity: ModelIdentity | None = None,
) -> list[Replacement]:
    """Resolve the sites of replacements; refuses those that do not fit the model or each other.

    ``active`` are replacements that are in the model already, and ``identity`` is the model's where it is
    known, since reading it reads all weights.
    """
    check_raw(model)
    layout = ModelLayout.from_model(model)
    _check_fitted_on(model, replacements, identity)
    resolved: list[Replacement] = []
    for replacement in replacements:
        source, target = layout.resolve(replacement.source), layout.resolve(replacement.target)
        replacement = replace(replacement, source=source, target=target)
        _check_heads(replacement, layout)
        _check_order(replacement, layout)
        _check_finite(replacement)
        if shared := find_overlap(layout, replacement, [*active, *resolved]):
            raise InputError(
                f"The replacement {replacement} overlaps another: {shared} is replaced or controlled already."
            )
        _check_effect(model, layout, replacement)
        resolved.append(replacement)
    _check_same_changes(model, resolved)
    return resolved


def find_overlap(layout: ModelLayout, replacement: Replacement, others: Sequence[Replacement]) -> str | None:
    """Name the first site that a replacement and another both write, or that one of them covers."""
    for other in others:
        pair = replacement, other
        same_target = layout.written_at(replacement.target)[0] == layout.written_at(other.target)[0]
        if same_target and not (any(each.blocks for each in pair) and any(map(_is_place, pair))):
            return str(replacement.target)
        for outer, inner in (pair, pair[::-1]):
            start, end = _covered(layout, outer)
            moments = {inner.target: layout.write_order(inner.target)}
            if outer.is_jump:
                moments[inner.source] = layout.order(inner.source)
            hidden = [site for site, moment in moments.items() if start < moment < end]
            if hidden:
                return f"{hidden[0]}, which {outer} covers,"
    return None


def _is_place(replacement: Replacement) -> bool:
    """Whether a layer of the residual stream is mapped onto itself, also after a jump onto it."""
    return replacement.is_jump and not replacement.blocks


def _covered(layout: ModelLayout, replacement: Replacement) -> tuple[int, int]:
    """Between which two moments of a pass all that is written is lost, as the replacement writes over it."""
    source, target = replacement.source, replacement.target
    end = layout.write_order(target)
    if replacement.is_jump:
        return (layout.start_of_block(source.layer), end) if replacement.blocks else (end, end)
    if not replacement.is_everywhere:
        return end, end  # at the other tokens it is not
    start = layout.order(source)
    if target.kind in (STREAM, MID, MID_CROSS):
        return start, end
    before = target.kind.removesuffix("_out") + "_in"
    if before not in layout.kinds or before == target.kind:
        return end, end
    return max(start, layout.order(Site(before, target.layer))), end


def _check_order(replacement: Replacement, layout: ModelLayout) -> None:
    source, target = replacement.source, replacement.target
    first, last = layout.order(source), layout.write_order(target)
    unread = next((hook for hook in map(layout.hook, (source, target)) if not layout.hooks[hook].shape), None)
    if unread is not None:
        raise InputError(
            f"{replacement} cannot be replaced: the hook {unread} {layout.hooks[unread].carries}."
        )
    if first > last or (first == last and not source.kind == target.kind == STREAM):
        raise InputError(
            f"The replacement {replacement} runs backwards or ends where it starts. Expected a target that a "
            "pass comes to later than to its source."
        )


_EFFECTIVE: WeakKeyDictionary[Any, set[Site]] = WeakKeyDictionary()


def _check_effect(model: TransformerBridge, layout: ModelLayout, replacement: Replacement) -> None:
    """Refuse to write at a hook that the model does not read: some only show what was computed elsewhere."""
    target, known = replacement.target, _EFFECTIVE.setdefault(model, set())
    if replacement.is_submodule or target.kind == STREAM or target in known:
        return

    def disturb(value: Tensor, hook: Any) -> Tensor:
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
        return value + noise * (value.float().std() + 1).to(value.dtype)

    probe, _ = probe_inputs(model)
    try:
        with torch.inference_mode():
            before = model(probe)
            with model.hooks(fwd_hooks=[(layout.written_at(target)[0], disturb)]):
                after = model(probe)
    except InputError:  # what is replaced already is for another batch
        return
    if torch.equal(before, after):
        raise InputError(
            f"The replacement {replacement} would change nothing: what stands at {target} is not read by "
            "this model as it runs now. Expected a target that is computed with."
        )
    known.add(target)


def _check_heads(replacement: Replacement, layout: ModelLayout) -> None:
    if replacement.heads is None:
        return
    shape = layout.hooks[layout.hook(replacement.target)].shape
    if len(shape) != 2:
        raise InputError(
            f"Heads are chosen for {replacement}, and its target is not divided into heads as z.3 is."
        )
    heads = sorted(set(replacement.heads))
    if not heads or len(heads) < len(replacement.heads) or not 0 <= heads[0] <= heads[-1] < shape[0]:
        raise InputError(
            f"The heads of {replacement} must be different numbers from 0 to {shape[0] - 1}, got "
            f"{short(replacement.heads)}."
        )


def _check_finite(replacement: Replacement) -> None:
    if isinstance(replacement.function, LinearMap):
        for part in (replacement.function.weight, replacement.function.bias):
            if part is not None and not bool(part.isfinite().all()):
                raise InputError(f"The map {replacement} has weights that are not finite.")


def _check_fitted_on(
    model: TransformerBridge, replacements: Sequence[Replacement], identity: ModelIdentity | None
) -> None:
    origins: dict[tuple[Any, ...], Provenance] = {}
    for replacement in replacements:
        if not isinstance(replacement.function, LinearMap):
            continue
        provenance = replacement.function.provenance
        if provenance.model is None:
            raise InputError(
                f"The map {replacement} must be of this model, got one whose provenance names no model. "
                "Fit it with MapSet.fit or on what matlens.activations.stream yields, or say whose it "
                "is: MapSet([...], provenance=Provenance(ModelIdentity.from_model(model)))."
            )
        origins[provenance.model.key] = provenance
    if origins:
        identity = identity or ModelIdentity.from_model(model, hash_unembedding=False)
        for provenance in origins.values():
            provenance.check_same(identity.of_weights, ours="the maps")


def _check_same_changes(model: TransformerBridge, replacements: Sequence[Replacement]) -> None:
    """Refuse maps that were fitted on a changed model where these changes do not hold."""
    for replacement in replacements:
        provenance = getattr(replacement.function, "provenance", Provenance())
        fitted_with = set((provenance.model and provenance.model.changes) or ())
        if not fitted_with:
            continue
        beside = {describe_replacement(other) for other in replacements if other is not replacement}
        missing = sorted(fitted_with - {*changes_of(model), *beside})
        if missing:
            raise InputError(
                f"The map {replacement} was fitted on a model with {describe_changes(missing)}, which this "
                "model is without. Put the map in where the same changes hold, or fit it on the plain model."
            )
