"""Parts of a model that a map can replace: norms, attention, FFNs, blocks, jumps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from matlens.errors import check_int, checked
from matlens.models.layout import ModelLayout
from matlens.models.sites import STREAM, Site
from matlens.patching.replacements import Replacement, Where
from matlens.patching.submodules import submodule_pairs

JUMPS = (2, 4, 8)
WRITING = ("attn", "ffn")  # their output is added to the residual stream, so zeros remove them
BLOCK = "block"
_KINDS = ("ln1", "attn", "ln2", "ffn")


@checked
@dataclass(frozen=True)
class Part:
    """A part of a model, from one site to another.

    Attributes
    ----------
    kind
        ``ln1``, ``attn``, ``ln2``, ``ffn``, ``block``, or ``jump n`` over ``n`` blocks.
    layer
        The block, or the first of those that are jumped over.
    source, target
        The sites before and after it.
    """

    kind: str
    layer: int
    source: str
    target: str

    @property
    def name(self) -> str:
        """``block 3``, ``jump 2 from 3``."""
        between = " from " if self.kind.startswith("jump") else " "
        return f"{self.kind}{between}{self.layer}"

    @property
    def ends(self) -> tuple[str, str]:
        """The source and the target."""
        return self.source, self.target

    @property
    def end(self) -> int:
        """The layer after the part."""
        return Site.parse(self.target).layer if self.source.startswith(f"{STREAM}.") else self.layer + 1

    @property
    def writes(self) -> bool:
        """Whether its output is added to the residual stream."""
        return self.kind in WRITING

    def removed(self, where: Where) -> Replacement:
        """The part removed: attention and FFN write zeros, norms and blocks return their input."""
        function = torch.zeros_like if self.writes else _unchanged
        return Replacement(function, Site.parse(self.source), Site.parse(self.target), where)


def _unchanged(h: Tensor) -> Tensor:
    return h


@checked
def model_parts(layout: ModelLayout, *, jumps: Sequence[int] = JUMPS) -> list[Part]:
    """All parts of a model, block by block: sub-modules, the block, and jumps from it.

    If the wiring of the blocks is unknown, only blocks and jumps.
    """
    spans = [check_int(jump, "each of the jumps", min=2) for jump in dict.fromkeys(jumps)]
    parts = []
    for source, target in submodule_pairs(layout) if layout.kinds else ():
        site = Site.parse(source)
        kind = site.kind.removesuffix("_in").removesuffix("_post")
        parts.append(Part(kind, site.layer, source, target))
    for n_blocks, layer in itertools.product((1, *spans), range(layout.n_layers)):
        if layer + n_blocks <= layout.n_layers:
            kind = BLOCK if n_blocks == 1 else f"jump {n_blocks}"
            parts.append(Part(kind, layer, f"{STREAM}.{layer}", f"{STREAM}.{layer + n_blocks}"))
    order = [*_KINDS, BLOCK, *(f"jump {span}" for span in spans)]
    return sorted(parts, key=lambda part: (part.layer, order.index(part.kind)))
