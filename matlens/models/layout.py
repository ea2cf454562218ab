"""How a model's blocks are wired and what its hooks carry, found by running a few tokens."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from matlens.errors import InputError, check_int, checked
from matlens.models.hooks import active_hooks, reading
from matlens.models.inputs import probe_inputs
from matlens.models.registry import Family, ask
from matlens.models.sites import (
    COEFFICIENTS,
    MID,
    MID_CROSS,
    MID_HOOK,
    MIXTURE_HOOK,
    STREAM,
    STREAM_HOOKS,
    WIRINGS,
    Site,
    Wiring,
    block_hook,
)
from matlens.numerics import in_float64, product_eps, without_autocast

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


class Hook(NamedTuple):
    """A hook point of TransformerLens, and what it carries in a pass.

    ``order`` is the number of hooks that fire before it, -1 if it does not fire; ``shape`` is ``(width,)`` or
    ``(heads, width)``, and ``()`` where it carries no vector per token.
    """

    name: str
    names: tuple[str, ...]
    order: int
    shape: tuple[int, ...]
    carries: str


@checked
@dataclass(frozen=True)
class ModelLayout:
    """The sites of a model and their hooks.

    Attributes
    ----------
    wiring
        How blocks add up: ``pre-norm``, ``scaled`` (outputs multiplied before they are added: Granite),
        ``extra-norm``, ``output-norm`` (norms only after attention and FFN: OLMo-2), ``post-norm``,
        ``parallel``, ``cross-attention`` (decoder of T5), or ``stream-only`` where no known sum holds: only
        ``h`` is known.
    d_mlp
        Width of ``ffn_post``, 0 without one.
    n_returned
        Of how many values in a tuple a block's vectors are the first; 0 if it returns them alone.
    """

    wiring: Wiring
    n_layers: int
    d_model: int
    kinds: tuple[str, ...]
    d_mlp: int = 0
    n_returned: int = 0
    hooks: Mapping[str, Hook] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_model(cls, model: TransformerBridge) -> ModelLayout:
        """Find the wiring from a few tokens; cached for an unmodified model."""
        # Hooks that are turned on in `model.cfg` are found in a new pass.
        switches = tuple(getattr(model.cfg, name, None) for name in _SWITCHES)
        if model in _KNOWN and _KNOWN[model][0] == switches:
            return _KNOWN[model][1]
        layout = _examine(model)
        if not active_hooks(model):
            _KNOWN[model] = switches, layout
        return layout

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """All sites of the model, residual stream first."""
        stream = [Site(STREAM, layer) for layer in range(self.n_layers + 1)]
        inside = [Site(kind, layer) for kind in self.kinds for layer in range(self.n_layers)]
        return (*stream, *inside)

    @property
    def stream(self) -> tuple[Site, ...]:
        """``h.0 .. h.L``."""
        return self.sites[: self.n_layers + 1]

    def resolve(self, site: str | int | Site) -> Site:
        """Check a site against this model; negative layers count from the end.

        A hook that carries one of the model's sites is that site. Raises InputError for a kind, layer or hook
        that the model does not have, and for a hook that does not carry one vector per token.
        """
        site = Site.parse(site, self.n_layers)
        if site.is_hook:
            return self._resolve_hook(site)
        kinds = (STREAM, *self.kinds)
        if site.kind not in kinds:
            near = difflib.get_close_matches(site.kind, kinds, n=1, cutoff=0.0)[0]
            raise InputError(
                f"This model has no site {site.kind!r} (its blocks are {self.wiring.name}). "
                f"The nearest is {near!r}; it has {', '.join(kinds)}."
            )
        return site

    def width(self, site: str | int | Site) -> int:
        """Dimensions of a site's vectors, heads concatenated."""
        site = self.resolve(site)
        if site.is_hook:
            return math.prod(self.hooks[str(site)].shape)
        return self.d_mlp if site.kind == COEFFICIENTS else self.d_model

    def hook(self, site: str | int | Site) -> str:
        """Name of the TransformerLens hook that carries a site's vectors."""
        site = self.resolve(site)
        if site.is_hook:
            return self.hooks[str(site)].name
        if site.kind != STREAM:
            return block_hook(site.layer, self.wiring.hooks[site.kind])
        if site.layer == 0:
            return block_hook(0, STREAM_HOOKS["h"])
        return block_hook(site.layer - 1, STREAM_HOOKS["next"])

    def written_at(self, site: str | int | Site) -> tuple[str, str | None]:
        """The hook at which a site can be written, and one whose vectors are added to what is written there.

        ``mid`` is the stream before plus attention's output: where only a norm reads the sum from a hook,
        writing there would not change the residual stream.
        """
        site = self.resolve(site)
        sums = dict(self.wiring.sums)
        addends = sums.get(site.kind, ()) if site.kind in (MID, MID_CROSS) else ()
        if not addends:
            return self.hook(site), None
        before, last = addends
        hooks = {**self.wiring.hooks, **STREAM_HOOKS}
        return block_hook(site.layer, hooks[last]), block_hook(site.layer, hooks[before])

    def order(self, site: str | int | Site) -> int:
        """Position of a site in the forward pass: the number of hooks that fire before."""
        return self.hooks[self.hook(site)].order

    def write_order(self, site: str | int | Site) -> int:
        """Position at which a site is written, as in `order`."""
        return self.hooks[self.written_at(site)[0]].order

    def start_of_block(self, layer: int) -> int:
        """Position of a block, as in `order`."""
        check_int(layer, "layer", min=0, max=self.n_layers - 1)
        return self.hooks[block_hook(layer, STREAM_HOOKS["h"])].order

    def names(self, site: str | int | Site) -> list[str]:
        """All names of the hook that carries a site's vectors."""
        return sorted(self.hooks[self.hook(site)].names)

    @cached_property
    def _site_of(self) -> dict[str, Site]:
        """The site of a hook's own name; of two that share a hook the first."""
        sites: dict[str, Site] = {}
        for site in self.sites[self.n_layers + 1 :]:
            sites.setdefault(block_hook(site.layer, self.wiring.hooks[site.kind]), site)
        return sites

    def _resolve_hook(self, site: Site) -> Site:
        hook = self.hooks.get(str(site))
        if hook is None:
            near = ", ".join(difflib.get_close_matches(str(site), self.hooks, n=1, cutoff=0.0)) or "none"
            raise InputError(f"This model has no hook {str(site)!r}. The nearest is {near}.")
        if not hook.shape:
            raise InputError(
                f"The hook {str(site)!r} {hook.carries}. Expected one that carries a vector for each token, "
                "[batch, token, width] or [batch, token, head, width], once in a pass."
            )
        known = self._site_of.get(hook.name)
        if known is None:
            return Site.parse(min(hook.names, key=lambda name: (len(name), name)))
        asks_mid = str(site).endswith(MID_HOOK) and MID in self.kinds
        if asks_mid and block_hook(known.layer, self.wiring.hooks[MID]) == hook.name:
            return Site(MID, known.layer)
        return known


_KNOWN: WeakKeyDictionary[Any, tuple[tuple[Any, ...], ModelLayout]] = WeakKeyDictionary()
_SWITCHES = ("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in")


@without_autocast()
def _examine(model: TransformerBridge) -> ModelLayout:
    layers = range(model.cfg.n_layers)
    wirings: Sequence[Wiring] = WIRINGS
    mixtures = [mixture(model, layer) for layer in layers]  # each gets its hook
    if any(experts is not None for experts in mixtures):
        wirings = [replace(wiring, hooks={**wiring.hooks, COEFFICIENTS: MIXTURE_HOOK}) for wiring in WIRINGS]
    probe, size = probe_inputs(model)
    names, closed = _names(model), getattr(model, "_gated_hook_reason", lambda name: None)
    candidates = {*STREAM_HOOKS.values(), *(name for wiring in wirings for name in wiring.hooks.values())}
    stored = {block_hook(layer, name) for layer in layers for name in candidates}
    seen: dict[str, Tensor] = {}
    fired: dict[str, list[tuple[int, Any]]] = {}
    count = itertools.count()
    returned: list[int] = []

    def keep(value: Any, hook: Any) -> None:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        fired.setdefault(hook.name, []).append((next(count), shape))
        if hook.name in stored:
            seen[hook.name] = value.detach()

    def count_returned(module: nn.Module, args: Any, value: Any) -> None:
        returned.append(len(value) if isinstance(value, tuple) else 0)

    listening = model.blocks[0].register_forward_hook(count_returned)
    try:
        hooks = [(name, keep) for name in names if closed(name) is None]  # others are turned on in model.cfg
        with torch.no_grad(), reading(model, hooks):
            model(probe, return_type=None)
    finally:
        listening.remove()
    hooks_by_name = {
        name: hook
        for own, others in names.items()
        for hook in [Hook(own, others, *_carried(fired.get(own, []), size))]
        for name in others
    }
    wiring = next(wiring for wiring in wirings if all(_sums_hold(wiring, seen, layer) for layer in layers))
    d_mlp = _d_mlp(model, wiring, seen)
    kinds = tuple(
        kind
        for kind, name in wiring.hooks.items()
        if (kind != COEFFICIENTS or d_mlp) and all(block_hook(layer, name) in seen for layer in layers)
    )
    return ModelLayout(wiring, len(layers), model.cfg.d_model, kinds, d_mlp, returned[0], hooks_by_name)


def mixture(model: TransformerBridge, layer: int) -> Any | None:
    """The experts of a block's FFN, with a hook for their coefficients; None without known experts."""
    return ask(Family.experts, model, layer)


def _names(model: TransformerBridge) -> dict[str, tuple[str, ...]]:
    """All names of each hook point, by its own."""
    own: dict[int, str] = {}
    names: dict[int, list[str]] = {}
    for name, point in model.hook_dict.items():
        own.setdefault(id(point), point.name or name)
        names.setdefault(id(point), [own[id(point)]]).append(name)
    return {own[number]: tuple(dict.fromkeys(names[number])) for number in names}


def _carried(fired: list[tuple[int, Any]], size: tuple[int, int]) -> tuple[int, tuple[int, ...], str]:
    """Order, shape and description of a hook, over all its calls."""
    if not fired:
        return -1, (), "does not fire: this model does not compute it, or it has to be turned on in model.cfg"
    order, shape = fired[-1]
    if len(fired) > 1:
        return order, (), f"fires {len(fired)} times in a pass"
    if isinstance(shape, str) or len(shape) not in (3, 4) or shape[:2] != size:
        return order, (), f"carries {shape if isinstance(shape, str) else f'a tensor {[*shape]}'}"
    return order, shape[2:], "carries vectors"


def output_layer(model: TransformerBridge, layer: int) -> nn.Module:
    """The linear layer of a block that reads ``ffn_post`` and writes ``ffn_out``."""
    return model.blocks[layer].mlp.out.original_component


def output_multiplier(model: TransformerBridge) -> float:
    """Residual multiplier of attention and FFN outputs; 1 in most models."""
    return float(getattr(model.blocks[0], "residual_contribution_scale", 1.0))


@torch.no_grad()
def _d_mlp(model: TransformerBridge, wiring: Wiring, seen: Mapping[str, Tensor]) -> int:
    """Width of the coefficients, 0 if a block's FFN output is not its output layer's of them."""
    if "ffn_out" not in wiring.hooks:
        return 0
    widths, multiplier = set(), output_multiplier(model)
    for layer in range(model.cfg.n_layers):
        given, written = (
            seen.get(block_hook(layer, wiring.hooks[kind])) for kind in (COEFFICIENTS, "ffn_out")
        )
        if given is None or written is None:
            return 0
        experts = mixture(model, layer)
        if experts is None and not _adds_up(written, [multiplier * output_layer(model, layer)(given)]):
            return 0
        if experts is not None and not experts.adds_up(given, written, multiplier):
            return 0
        widths.add(given.shape[-1])
    return widths.pop() if len(widths) == 1 else 0


def _sums_hold(wiring: Wiring, seen: Mapping[str, Tensor], layer: int) -> bool:
    names = {**wiring.hooks, **STREAM_HOOKS}
    block = {kind: seen.get(block_hook(layer, name)) for kind, name in names.items()}
    for total, parts in wiring.sums:
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
    terms = in_float64(torch.stack([whole, *(addend.to(whole.device) for addend in addends)]))
    error = (terms[0] - terms[1:].sum(0)).abs()
    slack = 8 * product_eps(whole.dtype) * terms.abs().sum(0)
    overflown = ~terms.isfinite().all(0)  # tells nothing of the wiring, and is refused where it is read
    return bool(((error <= slack) | overflown).all())
