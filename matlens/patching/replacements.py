"""What can be replaced in a model by a map, and what stands in for it.

A map says by its two sites what it replaces: one from ``h.4`` to ``h.10`` stands for the blocks 4 to 9, one
from ``attn_in.3`` to ``attn_out.3`` for the attention of block 3, one between any others for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens.errors import InputError, checked, short
from matlens.linear.maps import LinearMap, tensor_digest
from matlens.linear.mapsets import MapSet
from matlens.models.changes import function_name
from matlens.models.sites import STREAM, Site

Where = Literal["all", "not-first", "last"] | Int[Tensor, " batch"] | Bool[Tensor, "batch longest"]
Function = Callable[[Float[Tensor, "... d_model"]], Float[Tensor, "... d_model"]]


@checked
@dataclass(frozen=True, eq=False)
class Replacement:
    """A part of a model and what stands in for it.

    Attributes
    ----------
    function
        What stands in: vectors at ``source`` to vectors at ``target``, such as a `LinearMap`.
    source, target
        Two layers of the stream for a jump over the blocks between them; the input and the output of one
        sub-module, such as ``ffn_in.3`` and ``ffn_out.3``; or any two sites of which a pass comes to the
        second later, such as ``blocks.3.attn.hook_z`` and ``h.5``.
    where
        At which tokens: ``"all"``; ``"not-first"``, all but the first of each sentence, which many models
        use as an attention sink; ``"last"``, the last of each sentence, or of the prompt where ``generate``
        goes on from a cache; one position for each sentence, ``[batch]``; or a truth value for each
        token of each sentence, ``[batch, longest]``, such as ``~find_sinks(...)``, where tokens past its
        end are meant. Tokens are counted from the sentence's own first; padding is none of them. Blocks are
        skipped where all tokens are meant; at some tokens only what leaves the blocks is replaced, and the
        other tokens attend to what the blocks make of these.
    heads
        Which heads are replaced, counted from 0, where the target has several (``blocks.3.attn.hook_z``); by
        default all. The function gives the vectors of all heads, and those of the others are left.
    """

    function: Function
    source: Site
    target: Site
    where: Where = "all"
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.where, str) and bool((self.where < 0).any()):  # padding is at position -1
            raise InputError(f"The positions of {self} must be at least 0, got {int(self.where.min())}.")

    @classmethod
    def from_map(
        cls, linear: LinearMap, *, where: Where = "all", heads: Sequence[int] | None = None
    ) -> Replacement:
        """Replace the part of a model that lies between the sites of a map."""
        chosen = None if heads is None else tuple(heads)
        return cls(linear, Site.read(linear.source), Site.read(linear.target), where, chosen)

    @property
    def is_jump(self) -> bool:
        """Whether whole blocks are replaced, and so not computed."""
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
        """Blocks that are skipped; none where everything is computed."""
        return range(self.source.layer, self.target.layer) if self.is_jump else range(0)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


@checked
def jump(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """``mat`` from layer ``first`` of the stream to layer ``last``, over the blocks between (Eq. 1).

    Negative layers count from the end of the maps' model.
    """
    return [Replacement.from_map(maps[first, last], where=where)]


@checked
def mat_attn(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """Attention replaced by ``A_attn`` in the blocks from layer ``first`` to ``last`` (appendix A)."""
    return stand_ins(maps, ("attn",), first, last, where=where)


@checked
def mat_ffn(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """FFN replaced by ``A_ffn`` in the blocks from layer ``first`` to ``last`` (appendix A)."""
    return stand_ins(maps, ("ffn",), first, last, where=where)


@checked
def mat_ln1_ln2(maps: MapSet, first: int, last: int, *, where: Where = "all") -> list[Replacement]:
    """Both norms replaced in the blocks from layer ``first`` to ``last``, attention and FFN kept.

    In blocks with one norm (GPT-J) only that one; norms after attention and FFN are kept (Gemma), unless
    there are no others (OLMo-2).
    """
    return stand_ins(maps, norm_names(maps), first, last, where=where)


def norm_names(maps: MapSet) -> tuple[str, ...]:
    """The norms that ``mat_ln1_ln2`` replaces in blocks that such maps are of."""
    there = {Site.read(source).kind for source, _ in maps}
    if "ln1_post_in" in there and "ln1_in" not in there:
        return ("ln1_post", "ln2_post")
    return ("ln1", "ln2") if "ln2_in" in there else ("ln1",)


@checked
def stand_ins(
    maps: MapSet, names: Sequence[str], first: int, last: int, *, where: Where = "all"
) -> list[Replacement]:
    """Replace the named sub-modules in the blocks from layer ``first`` of the stream to layer ``last``.

    Raises
    ------
    InputError
        The range runs backwards.
    KeyError
        There is no map of a sub-module.
    """
    if maps.provenance.model is not None:
        first, last = (maps.provenance.resolve(layer).layer for layer in (first, last))
    if not 0 <= first <= last:
        raise InputError(
            f"Sub-modules from layer {first} to layer {last}: the range runs backwards or starts below 0."
        )
    return [
        Replacement.from_map(maps[f"{name}_in.{layer}", f"{name}_out.{layer}"], where=where)
        for layer in range(first, last)
        for name in names
    ]


def describe_replacement(replacement: Replacement) -> str:
    """What is replaced, by which numbers and at which tokens, as `changes_of` names it."""
    function, where = replacement.function, replacement.where
    by = f"the map {function.digest}" if isinstance(function, LinearMap) else function_name(function)
    at = where if isinstance(where, str) else f"the tokens {tensor_digest(where)}"
    heads = "" if replacement.heads is None else f" in the heads {', '.join(map(str, replacement.heads))}"
    return f"{replacement} replaced by {by} at {at}{heads}"


def stand_in(replacement: Replacement, entered: Tensor, left: Tensor) -> Tensor:
    """What stands in for vectors that leave a part of a model, from those that enter it.

    Raises
    ------
    InputError
        The function gives something else than a vector for each token.
    """
    instead = replacement.function(entered)
    if not isinstance(instead, Tensor) or instead.shape != left.shape:
        raise InputError(
            f"What stands in for {replacement} gives {short(instead)}. Expected a tensor of the shape "
            f"{tuple(left.shape)}, a vector for each token."
        )
    return instead.to(left)
