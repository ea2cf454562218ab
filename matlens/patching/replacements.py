"""Replacements of parts of a model by maps, and which of them fit a model and each other.

The sites of a map define what it replaces: from ``h.4`` to ``h.10`` the blocks 4 to 9, from ``attn_in.3`` to
``attn_out.3`` the attention of block 3, between any other two sites the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from matlens.errors import InputError, checked, short
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
from matlens.models.hooks import function_name
from matlens.models.identity import ModelIdentity, Provenance, check_raw
from matlens.models.inputs import probe_inputs
from matlens.models.layout import ModelLayout
from matlens.models.sites import MID, MID_CROSS, STREAM, Site
from matlens.models.weights import tensor_digest

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Where = Literal["all", "not-first", "last"] | Int[Tensor, " batch"] | Bool[Tensor, "batch longest"]
Function = Callable[[Float[Tensor, "... d_model"]], Float[Tensor, "... d_model"]]


@checked
@dataclass(frozen=True, eq=False, init=False)
class Replacement:
    """A part of a model and the function that replaces it.

    Attributes
    ----------
    function
        Computes the vectors at ``target`` from those at ``source``: a `LinearMap`, a matrix
        ``[d_target, d_source]``, an ``nn.Linear``, or any function of ``[batch, token, d_source]``, given
        copies. Matrices and ``nn.Linear`` become a `LinearMap`. Of a known provenance, a map must be of this
        model.
    source, target
        Two layers of the residual stream for a jump over the blocks between them; the input and the output of
        one sub-module, such as ``ffn_in.3`` and ``ffn_out.3``; any two sites of which the second is computed
        later, such as ``blocks.3.attn.hook_z`` and ``h.5``; or twice the same site, to change its vectors.
    where
        The tokens: ``"all"``; ``"not-first"``, all but the first of each sentence, which many models use as
        an attention sink; ``"last"``, the last of each sentence, or of its prompt in ``generate``; one
        position per sentence, ``[batch]``; or a Boolean mask ``[batch, longest]``, such as
        ``~find_sinks(...)``, which includes tokens past its end. Tokens are counted from the sentence's own
        first; padding is excluded. In passes of your own that continue a cache, ``"last"`` is the last token
        of the first of them inside the context. Blocks are skipped if all tokens are meant; otherwise only
        their outputs at these tokens are replaced.
    heads
        Heads to replace, from 0, if the target has several (``blocks.3.attn.hook_z``); by default all. The
        function returns the vectors of all heads.

    Examples
    --------
    >>> steering = Replacement(lambda h: h + 4 * direction, "h.12", "h.12", where="not-first")
    >>> with matlens.patched(model, [steering]):
    ...     model.generate("The weather today is")
    """

    function: Function
    source: Site
    target: Site
    where: Where = "all"
    heads: tuple[int, ...] | None = None

    def __init__(
        self,
        function: Function | Float[Tensor, "d_target d_source"],
        source: str | int | Site,
        target: str | int | Site,
        where: Where = "all",
        heads: Sequence[int] | None = None,
    ) -> None:
        source, target = Site.parse(source), Site.parse(target)
        if type(function) is nn.Linear:
            function = LinearMap(function.weight, function.bias, str(source), str(target))
        elif isinstance(function, Tensor):
            function = LinearMap(function, None, str(source), str(target))
        chosen = None if heads is None else tuple(heads)
        vars(self).update(function=function, source=source, target=target, where=where, heads=chosen)
        if not isinstance(where, str) and bool((where < 0).any()):  # padding is at position -1
            raise InputError(f"The positions of {self} must be at least 0, got {int(where.min())}.")

    @classmethod
    def from_map(
        cls, linear: LinearMap, *, where: Where = "all", heads: Sequence[int] | None = None
    ) -> Replacement:
        """Replace everything between the sites of a map."""
        return cls(linear, linear.source, linear.target, where, heads)

    @property
    def is_jump(self) -> bool:
        """Whether whole blocks are replaced, and so skipped."""
        return self.source.kind == self.target.kind == STREAM and self.is_everywhere

    @property
    def is_everywhere(self) -> bool:
        """Whether all tokens are replaced."""
        return isinstance(self.where, str) and self.where == "all"

    @property
    def is_submodule(self) -> bool:
        """Whether a sub-module is replaced, from its input to its output."""
        name, _, end = self.source.kind.rpartition("_")
        return end == "in" and self.target == Site(f"{name}_out", self.source.layer)

    @property
    def blocks(self) -> range:
        """Blocks that are skipped."""
        return range(self.source.layer, self.target.layer) if self.is_jump else range(0)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


@checked
def jump(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """``mat`` from layer ``first`` to layer ``last``, over the blocks between (Eq. 1)."""
    return [Replacement.from_map(maps[first, last], where=where)]


@checked
def mat_attn(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """Replace attention by ``A_attn`` in blocks from layer ``first`` to ``last``."""
    return replace_submodules(maps, ("attn",), first, last, where=where)


@checked
def mat_ffn(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """FFN replaced by ``A_ffn`` in the blocks from layer ``first`` to ``last`` (appendix A)."""
    return replace_submodules(maps, ("ffn",), first, last, where=where)


@checked
def mat_ln1_ln2(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """Both norms replaced in the blocks from layer ``first`` to ``last``.

    Blocks with one norm (GPT-J): only that one. Norms after attention and FFN (Gemma) are not replaced,
    unless there are no others (OLMo-2).
    """
    return replace_submodules(maps, norm_names(maps), first, last, where=where)


def norm_names(maps: MapSet) -> tuple[str, ...]:
    """The norms that ``mat_ln1_ln2`` replaces by a set of maps."""
    kinds = {Site.parse(source).kind for source, _ in maps}
    if "ln1_post_in" in kinds and "ln1_in" not in kinds:
        return ("ln1_post", "ln2_post")
    return ("ln1", "ln2") if "ln2_in" in kinds else ("ln1",)


@checked
def replace_submodules(
    maps: MapSet, names: Sequence[str], first: int, last: int, *, where: Where = "all"
) -> list[Replacement]:
    """Replace the named sub-modules in the blocks from layer ``first`` to layer ``last``."""
    if maps.provenance.model is not None:
        first, last = (maps.provenance.resolve(layer).layer for layer in (first, last))
    if not 0 <= first <= last:
        raise InputError(f"first and last must be layers with 0 <= first <= last, got {first} and {last}.")
    return [
        Replacement.from_map(maps[f"{name}_in.{layer}", f"{name}_out.{layer}"], where=where)
        for layer in range(first, last)
        for name in names
    ]


def describe_replacement(replacement: Replacement) -> str:
    """Sites, weights and tokens of the replacement, as in `active_hooks`."""
    function, where = replacement.function, replacement.where
    if isinstance(function, LinearMap):
        transferred_from = function.provenance.details.get("transferred_from")
        by = f"the map {function.digest}" + (f" of {transferred_from['model']}" if transferred_from else "")
    else:
        by = function_name(function)
    at = where if isinstance(where, str) else f"the tokens {tensor_digest(where)}"
    heads = "" if replacement.heads is None else f" in the heads {', '.join(map(str, replacement.heads))}"
    return f"{replacement} replaced by {by} at {at}{heads}"


def replaced_vectors(replacement: Replacement, entered: Tensor, left: Tensor) -> Tensor:
    """The function's vectors for those that enter a part, in the shape and precision of those that leave."""
    function = replacement.function
    # A function of the user may work in place, and the model still needs these vectors.
    instead = function(entered if isinstance(function, LinearMap) else entered.clone())
    if not isinstance(instead, Tensor) or instead.shape != left.shape:
        raise InputError(
            f"The function of {replacement} must return a tensor of shape {tuple(left.shape)}, got "
            f"{short(instead)}."
        )
    return instead.to(left)


def resolve_replacements(
    model: TransformerBridge,
    replacements: Sequence[Replacement],
    active: Sequence[Replacement] = (),
    *,
    identity: ModelIdentity | None = None,
    strict: bool = True,
) -> list[Replacement]:
    """Resolve the sites of replacements; refuses those that do not fit the model or each other.

    ``active`` are replacements already in the model. ``identity`` is the model's, if known.
    """
    check_raw(model)
    layout = ModelLayout.from_model(model)
    resolved: list[Replacement] = []
    for replacement in _on_model(model, replacements, identity, strict):
        source, target = layout.resolve(replacement.source), layout.resolve(replacement.target)
        replacement = replace(replacement, source=source, target=target)
        _check_heads(replacement, layout)
        _check_order(replacement, layout)
        _check_shape(replacement, layout)
        _check_finite(replacement)
        if shared := find_overlap(layout, replacement, [*active, *resolved]):
            raise InputError(
                f"The replacement {replacement} overlaps another: {shared} is replaced or controlled already."
            )
        _check_effect(model, layout, replacement)
        resolved.append(replacement)
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
    """The two moments of a pass between which a replacement overwrites everything that is written."""
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
    if first > last:
        raise InputError(
            f"The replacement {replacement} runs backwards. The target must be computed after the source."
        )


def _check_shape(replacement: Replacement, layout: ModelLayout) -> None:
    if isinstance(replacement.function, LinearMap):
        expected = layout.width(replacement.target), layout.width(replacement.source)
        if replacement.function.shape != expected:
            raise InputError(
                f"The map of {replacement} must have the shape {expected}, got {replacement.function.shape}."
            )


_EFFECTIVE: WeakKeyDictionary[Any, set[Site]] = WeakKeyDictionary()


def _check_effect(model: TransformerBridge, layout: ModelLayout, replacement: Replacement) -> None:
    """Refuse to write at a hook that the model does not read: some only show values."""
    target, known = replacement.target, _EFFECTIVE.setdefault(model, set())
    if replacement.is_submodule or target.kind == STREAM or target in known:
        return

    def disturb(value: Tensor, hook: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value)
        return value + noise * (value.float().std() + 1).to(value.dtype)

    probe, _ = probe_inputs(model)
    try:
        with torch.no_grad():
            before = model(probe)
            with model.hooks(fwd_hooks=[(layout.written_at(target)[0], disturb)]):
                after = model(probe)
    except InputError:  # active replacements are for another batch
        return
    if torch.equal(before, after):
        raise InputError(
            f"The replacement {replacement} would change nothing: this model does not use the value at "
            f"{target}."
        )
    known.add(target)


def _check_heads(replacement: Replacement, layout: ModelLayout) -> None:
    if replacement.heads is None:
        return
    shape = layout.hooks[layout.hook(replacement.target)].shape
    if len(shape) != 2:
        raise InputError(
            f"heads must be None for {replacement}, whose target has no heads. Use a site such as z.3."
        )
    heads = sorted(set(replacement.heads))
    if not heads or len(heads) < len(replacement.heads) or not 0 <= heads[0] <= heads[-1] < shape[0]:
        raise InputError(
            f"heads must be different integers from 0 to {shape[0] - 1}, got {short(replacement.heads)}."
        )


def _check_finite(replacement: Replacement) -> None:
    if isinstance(replacement.function, LinearMap):
        for part in replacement.function.parts.values():
            if not bool(part.isfinite().all()):
                raise InputError(f"The map {replacement} has weights that are not finite.")


def _on_model(
    model: TransformerBridge,
    replacements: Sequence[Replacement],
    identity: ModelIdentity | None,
    strict: bool,
) -> list[Replacement]:
    """The replacements with maps on this model's device, those of known provenance by `Provenance.on`."""
    known: dict[tuple[Any, ...], Provenance] = {}
    placed = []
    for replacement in replacements:
        function = replacement.function
        if isinstance(function, LinearMap) and (origin := function.provenance.model) is not None:
            identity = identity or ModelIdentity.from_model(model)
            if origin.key not in known:  # warns once per model
                known[origin.key] = function.provenance.on(identity, ours="the maps", strict=strict)
            if known[origin.key].identity.key != origin.key:
                function = replace(function, provenance=known[origin.key])
        if isinstance(function, LinearMap):
            replacement = replace(replacement, function=function.to(model.cfg.device))
        placed.append(replacement)
    return placed
