"""What can be replaced in a model by a map, and which replacements fit it and each other.

A map says by its two sites what it replaces: one from ``h.4`` to ``h.10`` stands for the blocks 4 to 9; one
from ``attn_in.3`` to ``attn_out.3`` stands for the attention of block 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens.errors import InputError
from matlens.linear.maps import LinearMap, tensor_digest
from matlens.linear.mapsets import MapSet
from matlens.models.anatomy import Anatomy
from matlens.models.changes import changes_of, describe_changes, function_name
from matlens.models.identity import ModelIdentity, Provenance, require_raw
from matlens.models.sites import STREAM, Site

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Where = Literal["all", "not-first"] | Int[Tensor, " batch"] | Bool[Tensor, "batch longest"]
Function = Callable[[Float[Tensor, "... d_model"]], Float[Tensor, "... d_model"]]


@dataclass(frozen=True, eq=False)
class Replacement:
    """A part of a model and what stands in for it.

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
        end are meant. Tokens are counted from the sentence's own first; padding is none of them. A jump is
        always over all tokens, because skipped blocks leave nothing that the others could attend to.
    """

    function: Function
    source: Site
    target: Site
    where: Where = "all"

    @classmethod
    def from_map(cls, linear: LinearMap, *, where: Where = "all") -> Replacement:
        """Replace the part of a model that lies between the sites of a map."""
        return cls(linear, Site.read(linear.source), Site.read(linear.target), where)

    @property
    def is_jump(self) -> bool:
        """Whether whole blocks are replaced and not a sub-module."""
        return self.source.kind == STREAM

    @property
    def blocks(self) -> range:
        """Blocks that the replacement touches."""
        return range(self.source.layer, self.target.layer if self.is_jump else self.source.layer + 1)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


def jump(maps: MapSet, first: int, last: int) -> list[Replacement]:
    """``mat`` from layer ``first`` of the stream to layer ``last``, over the blocks between (Eq. 1)."""
    return [_from_set(maps, Site(STREAM, first), Site(STREAM, last), "all")]


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
        _from_set(maps, Site(f"{name}_in", layer), Site(f"{name}_out", layer), where)
        for layer in range(first, last)
        for name in names
    ]


def _from_set(maps: MapSet, source: Site, target: Site, where: Where) -> Replacement:
    if (str(source), str(target)) not in maps:
        there = ", ".join(sorted({f"{a.split('.')[0]} -> {b.split('.')[0]}" for a, b in maps})) or "none"
        raise InputError(
            f"There is no map {source} -> {target} in this set of {len(maps)} (it has {there}). Fit the map, "
            "or check the range."
        )
    return Replacement.from_map(maps[str(source), str(target)], where=where)


def resolve_replacements(
    model: TransformerBridge, replacements: Sequence[Replacement], active: Sequence[Replacement] = ()
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

    Raises
    ------
    InputError
        A replacement does not fit the model, or overlaps another.
    """
    require_raw(model)
    anatomy = Anatomy.from_model(model)
    _require_fitted_on(model, replacements)
    resolved: list[Replacement] = []
    for replacement in replacements:
        source, target = anatomy.resolve(replacement.source), anatomy.resolve(replacement.target)
        replacement = replace(replacement, source=source, target=target)
        _require_part(replacement)
        _require_where(replacement)
        _require_width(replacement, anatomy.d_model)
        shared = find_overlap(replacement, [*active, *resolved])
        if shared:
            raise InputError(
                f"The replacement {replacement} overlaps another: {shared} is replaced or controlled already."
            )
        resolved.append(replacement)
    _require_same_changes(model, resolved)
    return resolved


def describe_replacement(replacement: Replacement) -> str:
    """What is replaced, by which numbers and at which tokens, as `changes_of` names it."""
    function, where = replacement.function, replacement.where
    by = f"the map {function.digest}" if isinstance(function, LinearMap) else function_name(function)
    at = where if isinstance(where, str) else f"the tokens {tensor_digest(where)}"
    return f"{replacement} replaced by {by} at {at}"


def find_overlap(replacement: Replacement, others: Sequence[Replacement]) -> str | None:
    """Name the first part that a replacement has in common with others; ``None`` if there is none."""
    taken = [part for other in others for part in _parts(other)]
    return next((_part_name(part) for part in _parts(replacement) if _clashes(part, taken)), None)


def _require_part(replacement: Replacement) -> None:
    source, target = replacement.source, replacement.target
    name, _, end = source.kind.rpartition("_")
    is_submodule = end == "in" and target == Site(f"{name}_out", source.layer)
    if not replacement.is_jump and not is_submodule:
        raise InputError(
            f"A map {replacement} replaces no part of a model. Expected a map between two layers of the "
            "stream, or from the input to the output of a sub-module, such as ffn_in.3 -> ffn_out.3."
        )
    if replacement.is_jump and target.kind != STREAM:
        raise InputError(f"A map {replacement} starts in the stream and must end there too.")
    if replacement.is_jump and source.layer > target.layer:
        raise InputError(f"A jump {replacement} runs backwards: expected a target at or after its source.")


def _parts(replacement: Replacement) -> list[tuple[int, str]]:
    """Parts of the model that are replaced, as ``(block, sub-module)``; a whole block is ``(block, "")``.

    A map over no blocks replaces the place before a block, ``(block, "h")``, which a jump over both sides
    of it replaces too.
    """
    source, blocks = replacement.source, replacement.blocks
    if not replacement.is_jump:
        return [(source.layer, source.kind.removesuffix("_in"))]
    if not blocks:
        return [(source.layer, STREAM)]
    return [(block, "") for block in blocks] + [(block, STREAM) for block in blocks[1:]]


def _clashes(part: tuple[int, str], taken: Sequence[tuple[int, str]]) -> bool:
    block, name = part
    for taken_block, taken_name in taken:
        whole = "" in (name, taken_name) and STREAM not in (name, taken_name)
        if block == taken_block and (name == taken_name or whole):
            return True
    return False


def _part_name(part: tuple[int, str]) -> str:
    block, name = part
    if name == STREAM:
        return f"layer {block} of the stream"
    return f"{name} of block {block}" if name else f"block {block}, or a part of it,"


def _require_where(replacement: Replacement) -> None:
    where = replacement.where
    if isinstance(where, Tensor):
        positions = where.ndim == 1 and not where.is_floating_point() and where.dtype != torch.bool
        per_token = where.ndim == 2 and where.dtype == torch.bool and where.shape[1] > 0
        if not per_token and not (positions and bool((where >= 0).all())):
            raise InputError(
                f"'where' of {replacement} is a tensor of {where.dtype} and shape {tuple(where.shape)}. "
                "Expected a position, from 0, for each sentence, or a truth value for each token of each "
                "sentence."
            )
    elif where not in ("all", "not-first"):
        raise InputError(
            f"'where' of {replacement} is {where!r}. Expected 'all', 'not-first', or a tensor of positions "
            "or of truth values."
        )
    if replacement.is_jump and (isinstance(where, Tensor) or where != "all"):
        raise InputError(f"A jump {replacement} is over all tokens: its blocks are not computed for any.")


def _require_width(replacement: Replacement, d_model: int) -> None:
    if not isinstance(replacement.function, LinearMap):
        return
    weight, bias = replacement.function.weight, replacement.function.bias
    if tuple(weight.shape) != (d_model, d_model) or (bias is not None and tuple(bias.shape) != (d_model,)):
        raise InputError(
            f"The map {replacement} has the shape {tuple(weight.shape)}, and the vectors of this model have "
            f"{d_model} coordinates. Was it fitted on another model?"
        )
    for part in (weight, bias):
        if part is not None and not bool(part.isfinite().all()):
            raise InputError(
                f"The map {replacement} holds numbers that are not finite, and so would be all that is read "
                "behind it. Fit it anew, on vectors that are finite."
            )


def _require_fitted_on(model: TransformerBridge, replacements: Sequence[Replacement]) -> None:
    origins: dict[tuple[Any, ...], Provenance] = {}
    for replacement in replacements:
        provenance = getattr(replacement.function, "provenance", Provenance())
        if provenance.model is not None:
            origins[provenance.model.key] = provenance
    if origins:
        identity = ModelIdentity.from_model(model, hash_unembedding=False)
        for provenance in origins.values():
            provenance.require_same(identity.of_weights, ours="the maps")


def _require_same_changes(model: TransformerBridge, replacements: Sequence[Replacement]) -> None:
    """Refuse maps that were fitted on a changed model where these changes do not hold."""
    for replacement in replacements:
        provenance = getattr(replacement.function, "provenance", Provenance())
        fitted_with = set((provenance.model and provenance.model.changes) or ())
        beside = {describe_replacement(other) for other in replacements if other is not replacement}
        missing = sorted(fitted_with - {*changes_of(model), *beside} if fitted_with else ())
        if missing:
            raise InputError(
                f"The map {replacement} was fitted on a model with {describe_changes(missing)}, which this "
                "model is without. Put the map in where the same changes hold, or fit it on the plain model."
            )
