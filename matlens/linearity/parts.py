"""Parts of a model that a map can replace: norms, attention, FFNs, blocks, jumps."""

from __future__ import annotations

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
    def blocks(self) -> range:
        """The blocks of the part."""
        after = Site.parse(self.target).layer if self.source.startswith(f"{STREAM}.") else self.layer + 1
        return range(self.layer, after)

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

    Where the wiring of its blocks is not known, there are only blocks and jumps.
    """
    spans = [check_int(jump, "each of the jumps", min=2) for jump in dict.fromkeys(jumps)]
    pairs: dict[tuple[str, int], tuple[str, str]] = {}
    for source, target in submodule_pairs(layout) if layout.kinds else ():
        site = Site.parse(source)
        pairs[site.kind.removesuffix("_in").removesuffix("_post"), site.layer] = source, target
    parts = []
    for layer in range(layout.n_layers):
        for kind in _KINDS:
            if (kind, layer) in pairs:
                parts.append(Part(kind, layer, *pairs[kind, layer]))
        for n_blocks in (1, *spans):
            if layer + n_blocks <= layout.n_layers:
                kind = BLOCK if n_blocks == 1 else f"jump {n_blocks}"
                parts.append(Part(kind, layer, f"{STREAM}.{layer}", f"{STREAM}.{layer + n_blocks}"))
    return parts
