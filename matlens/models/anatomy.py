"""How a model's blocks are wired, found by running a few tokens and checking which sums hold."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from matlens.errors import InputError
from matlens.models.changes import changes_of, reading
from matlens.models.sites import (
    COEFFICIENTS,
    FAMILIES,
    STREAM,
    STREAM_HOOKS,
    STREAM_ONLY,
    Family,
    Site,
    block_hook,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@dataclass(frozen=True)
class Anatomy:
    """What sites a model has and which hook carries each.

    Attributes
    ----------
    family
        The wiring of its blocks: ``pre-norm``, ``extra-norm``, ``post-norm``, ``parallel``, or
        ``stream-only`` where no known sum holds and only ``h`` can be trusted.
    kinds
        The kinds of sites inside a block that this model has.
    d_mlp
        Width of ``ffn_post``, 0 where there is none.
    blocks_return_tuples
        Whether a block's module returns its vectors as the first of several values.
    """

    family: Family
    n_layers: int
    d_model: int
    kinds: tuple[str, ...]
    d_mlp: int = 0
    blocks_return_tuples: bool = False

    @classmethod
    def from_model(cls, model: TransformerBridge) -> Anatomy:
        """Find how a model's blocks are wired, by running a few tokens and checking the sums.

        The answer is remembered for as long as the model lives, but not where the model is changed: hooks of
        others can break its sums.
        """
        if model in _KNOWN:
            return _KNOWN[model]
        anatomy = _examine(model)
        if not changes_of(model):
            _KNOWN[model] = anatomy
        return anatomy

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every site of the model, the stream first."""
        stream = [Site(STREAM, layer) for layer in range(self.n_layers + 1)]
        inside = [Site(kind, layer) for kind in self.kinds for layer in range(self.n_layers)]
        return (*stream, *inside)

    @property
    def stream(self) -> tuple[Site, ...]:
        """``h.0 .. h.L``."""
        return self.sites[: self.n_layers + 1]

    def resolve(self, site: str | int | Site) -> Site:
        """Check a site against this model; negative layers count from the end.

        Raises
        ------
        InputError
            The kind or the layer does not exist here; the message names the nearest that does.
        """
        site = Site.parse(site, self.n_layers)
        kinds = (STREAM, *self.kinds)
        if site.kind not in kinds:
            near = difflib.get_close_matches(site.kind, kinds, n=1, cutoff=0.0)[0]
            raise InputError(
                f"This model has no site {site.kind!r} (its blocks are {self.family.name}). "
                f"The nearest is {near!r}; it has {', '.join(kinds)}."
            )
        return site

    def width(self, site: str | int | Site) -> int:
        """How many coordinates a site's vectors have."""
        return self.d_mlp if self.resolve(site).kind == COEFFICIENTS else self.d_model

    def hook(self, site: str | int | Site) -> str:
        """Name of the TransformerLens hook that carries a site's vectors."""
        site = self.resolve(site)
        if site.kind != STREAM:
            return block_hook(site.layer, self.family.hooks[site.kind])
        if site.layer == 0:
            return block_hook(0, STREAM_HOOKS["h"])
        return block_hook(site.layer - 1, STREAM_HOOKS["next"])


_KNOWN: WeakKeyDictionary[Any, Anatomy] = WeakKeyDictionary()


def _examine(model: TransformerBridge) -> Anatomy:
    n_layers, available = model.cfg.n_layers, model.hook_dict
    candidates = {name for family in FAMILIES for name in family.hooks.values()} | {*STREAM_HOOKS.values()}
    seen: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> None:
        seen[hook.name] = value.detach()

    wanted = [block_hook(layer, name) for layer in range(n_layers) for name in sorted(candidates)]
    hooks = [(name, keep) for name in wanted if name in available]
    tokens = torch.arange(1, 9, device=model.cfg.device)[None] % model.cfg.d_vocab
    returned: list[type] = []
    listening = model.blocks[0].register_forward_hook(lambda *call: returned.append(type(call[2])))
    try:
        with torch.inference_mode(), reading(model, hooks):
            model(tokens, return_type=None)
    finally:
        listening.remove()
    as_tuples = issubclass(returned[0], tuple)

    for family in FAMILIES:
        if all(_sums_hold(family, seen, layer) for layer in range(n_layers)):
            there = [
                kind
                for kind, name in family.hooks.items()
                if all(block_hook(layer, name) in seen for layer in range(n_layers))
            ]
            d_mlp = _d_mlp(model, family, seen)
            kinds = tuple(kind for kind in there if kind != COEFFICIENTS or d_mlp)
            return Anatomy(family, n_layers, model.cfg.d_model, kinds, d_mlp, as_tuples)
    return Anatomy(STREAM_ONLY, n_layers, model.cfg.d_model, (), blocks_return_tuples=as_tuples)


def output_layer(model: TransformerBridge, layer: int) -> nn.Module:
    """The linear layer of block ``layer`` that reads ``ffn_post`` and writes ``ffn_out``."""
    return model.blocks[layer].mlp.out.original_component


@torch.inference_mode()
def _d_mlp(model: TransformerBridge, family: Family, seen: Mapping[str, Tensor]) -> int:
    """Width of the coefficients, 0 if a block's FFN output is not its output layer's of them."""
    widths = set()
    for layer in range(model.cfg.n_layers):
        given, written = (
            seen.get(block_hook(layer, family.hooks[kind])) for kind in (COEFFICIENTS, "ffn_out")
        )
        if given is None or written is None or not _adds_up(written, [output_layer(model, layer)(given)]):
            return 0
        widths.add(given.shape[-1])
    return widths.pop() if len(widths) == 1 else 0


def _sums_hold(family: Family, seen: Mapping[str, Tensor], layer: int) -> bool:
    names = {**family.hooks, **STREAM_HOOKS}
    block = {kind: seen.get(block_hook(layer, name)) for kind, name in names.items()}
    for total, parts in family.sums:
        whole, addends = block[total], [block[part] for part in parts]
        if whole is None or any(addend is None for addend in addends):
            if total == "next":
                return False
            continue
        if not _adds_up(whole, [addend for addend in addends if addend is not None]):
            return False
    return True


def _adds_up(whole: Tensor, addends: list[Tensor]) -> bool:
    if any(addend.shape != whole.shape for addend in addends):
        return False
    # Coordinate by coordinate, to the rounding of the addition itself: measured against the largest
    # coordinate of a real stream, a whole sub-module's output would pass for rounding.
    terms = torch.stack([whole, *addends]).double()
    error = (terms[0] - terms[1:].sum(0)).abs()
    slack = 8 * torch.finfo(whole.dtype).eps * terms.abs().sum(0)
    overflown = ~terms.isfinite().all(0)  # tells nothing of the wiring, and is refused where it is read
    return bool(((error <= slack) | overflown).all())
