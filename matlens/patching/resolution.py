"""Which replacements fit a model and each other, and which parts of it each of them takes."""

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

    Parameters
    ----------
    model
        The model that is to be patched.
    replacements
        What is to be replaced.
    active
        Replacements that are in the model already, which must not be overlapped either.
    identity
        The model's, where it has just been looked at, which reads all its weights.

    Raises
    ------
    InputError
        A replacement does not fit the model, or overlaps another.
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
        _check_width(replacement, layout)
        shared = find_overlap(layout, replacement, [*active, *resolved])
        if shared:
            raise InputError(
                f"The replacement {replacement} overlaps another: {shared} is replaced or controlled already."
            )
        _check_effect(model, layout, replacement)
        resolved.append(replacement)
    _check_same_changes(model, resolved)
    return resolved


def find_overlap(layout: ModelLayout, replacement: Replacement, others: Sequence[Replacement]) -> str | None:
    """Name the first part that a replacement has in common with others; ``None`` if there is none."""
    taken = [part for other in others for part in _parts(other)]
    for part in _parts(replacement):
        if any(_clash(part, other) for other in taken):
            return _part_name(part)
    lost = (_find_lost(layout, replacement, other) for other in others)
    return next((name for name in lost if name), None)


def _parts(replacement: Replacement) -> list[tuple[int, str]]:
    """Parts of the model that are replaced, as ``(block, sub-module)``; a whole block is ``(block, "")``.

    A map over no blocks replaces the place before a block, ``(block, "h")``, which a jump over both sides
    of it replaces too.
    """
    source, blocks = replacement.source, replacement.blocks
    if replacement.is_patch:
        return []
    if not replacement.is_jump:
        return [(source.layer, source.kind.removesuffix("_in"))]
    if not blocks:
        return [(source.layer, STREAM)]
    return [(block, "") for block in blocks] + [(block, STREAM) for block in blocks[1:]]


def _clash(part: tuple[int, str], taken: tuple[int, str]) -> bool:
    names = part[1], taken[1]
    whole = "" in names and STREAM not in names
    return part[0] == taken[0] and (names[0] == names[1] or whole)


def _part_name(part: tuple[int, str]) -> str:
    block, name = part
    if name == STREAM:
        return f"layer {block} of the stream"
    return f"{name} of block {block}" if name else f"block {block}, or a part of it,"


def _find_lost(layout: ModelLayout, replacement: Replacement, other: Replacement) -> str | None:
    """Name what a pass does not come to, or what is lost, where two are made of which one is a patch."""
    if not replacement.is_patch and not other.is_patch:
        return None
    if layout.written_at(replacement.target)[0] == layout.written_at(other.target)[0]:
        return str(replacement.target)
    pair = replacement, other
    for outer, inner in sorted((pair, pair[::-1]), key=lambda both: not both[0].is_jump):
        moments = {inner.target: layout.write_order(inner.target)}
        if outer.is_jump:
            moments[inner.source] = layout.order(inner.source)
        start, end = _covered(layout, outer)
        hidden = [site for site, moment in moments.items() if start < moment < end]
        if hidden:
            return f"{hidden[0]}, which {outer} covers,"
    return None


def _covered(layout: ModelLayout, replacement: Replacement) -> tuple[int, int]:
    """Between which two moments of a pass all that is written is lost, as the replacement writes over it."""
    source, target = replacement.source, replacement.target
    end = layout.write_order(target)
    if replacement.is_jump:
        return (layout.start_of_block(source.layer), end) if replacement.blocks else (end, end)
    if not isinstance(replacement.where, str) or replacement.where != "all":
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
    if first > last:
        raise InputError(
            f"The replacement {replacement} runs backwards: a pass comes to {target} before {source}. "
            "Expected a target that it comes to later."
        )
    if first == last and not source.kind == target.kind == STREAM:
        raise InputError(
            f"The replacement {replacement} ends where it starts. Expected a target that a pass comes to "
            "later than to its source."
        )


_EFFECTIVE: WeakKeyDictionary[Any, set[Site]] = WeakKeyDictionary()


def _check_effect(model: TransformerBridge, layout: ModelLayout, replacement: Replacement) -> None:
    """Refuse to write at a hook that the model does not read: some only show what was computed elsewhere."""
    target, known = replacement.target, _EFFECTIVE.setdefault(model, set())
    if not replacement.is_patch or target.kind == STREAM or target in known:
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
    heads, target = replacement.heads, replacement.target
    if heads is None:
        return
    shape = layout.hooks[layout.hook(target)].shape
    if len(shape) != 2:
        raise InputError(
            f"Heads are chosen for {replacement}, and {target} is not divided into heads. Expected a target "
            "that is, such as z.3."
        )
    known = range(shape[0])
    if not heads or len(set(heads)) < len(heads) or any(head not in known for head in heads):
        raise InputError(
            f"The heads of {replacement} are {short(heads)}. Expected one or more of 0 to {shape[0] - 1}, "
            "each once."
        )


def _check_width(replacement: Replacement, layout: ModelLayout) -> None:
    if not isinstance(replacement.function, LinearMap):
        return
    weight, bias = replacement.function.weight, replacement.function.bias
    d_in, d_out = layout.width(replacement.source), layout.width(replacement.target)
    if tuple(weight.shape) != (d_out, d_in) or (bias is not None and tuple(bias.shape) != (d_out,)):
        widths = f"{d_in}" if d_in == d_out else f"{d_in} and {d_out}"
        raise InputError(
            f"The map {replacement} has the shape {tuple(weight.shape)}, and the vectors of this model have "
            f"{widths} coordinates. Was it fitted on another model?"
        )
    for part in (weight, bias):
        if part is not None and not bool(part.isfinite().all()):
            raise InputError(
                f"The map {replacement} holds numbers that are not finite, and so would be all that is read "
                "behind it. Fit it anew, on vectors that are finite."
            )


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
