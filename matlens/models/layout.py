"""How a model's blocks are wired and what its hooks carry, found by running a few tokens."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from matlens.errors import InputError, checked
from matlens.models.changes import changes_of
from matlens.models.families.mixtures import Mixture, attached
from matlens.models.families.vision import is_visual, places_of_image, probe_images
from matlens.models.hooks import reading
from matlens.models.sites import (
    COEFFICIENTS,
    MID,
    MID_CROSS,
    MID_HOOK,
    MIXTURE_HOOK,
    STREAM,
    STREAM_HOOKS,
    STREAM_ONLY,
    WIRINGS,
    Site,
    Wiring,
    block_hook,
)
from matlens.numerics import in_float64

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


class Hook(NamedTuple):
    """A hook point of TransformerLens, and what it carries in a pass.

    Attributes
    ----------
    name, names
        Its own name, and all names by which TransformerLens knows it.
    order
        When it fires: the number of hooks that fire before it; -1 if it does not fire.
    shape
        What it carries for a token, ``(width,)`` or ``(heads, width)``; ``()`` where that is no vector.
    carries
        What it carries, in words.
    """

    name: str
    names: tuple[str, ...]
    order: int
    shape: tuple[int, ...]
    carries: str


@checked
@dataclass(frozen=True)
class ModelLayout:
    """What sites a model has and which hook carries each.

    Attributes
    ----------
    wiring
        The wiring of its blocks: ``pre-norm``, ``scaled`` (pre-norm, with both outputs multiplied by a
        number before they are added: Granite), ``extra-norm``, ``output-norm`` (norms only behind attention
        and FFN, before the addition: OLMo-2), ``post-norm``, ``parallel``, ``cross-attention`` (the decoder
        of an encoder-decoder: T5), or ``stream-only`` where no known sum holds and only ``h`` can be trusted.
    kinds
        The kinds of sites inside a block that this model has.
    d_mlp
        Width of ``ffn_post``, 0 where there is none.
    blocks_return_tuples, n_returned
        Whether a block's module returns its vectors as the first of several values, and of how many.
    hooks
        Every hook of the model, by each of its names.
    """

    wiring: Wiring
    n_layers: int
    d_model: int
    kinds: tuple[str, ...]
    d_mlp: int = 0
    blocks_return_tuples: bool = False
    n_returned: int = 1
    hooks: Mapping[str, Hook] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_model(cls, model: TransformerBridge) -> ModelLayout:
        """Find how a model's blocks are wired, by running a few tokens and checking the sums.

        The answer is remembered for as long as the model lives, but not where the model is changed: hooks of
        others can break its sums. Where hooks are turned on in ``model.cfg`` it is asked for anew.
        """
        switches = tuple(getattr(model.cfg, name, None) for name in _SWITCHES)
        if model in _KNOWN and _KNOWN[model][0] == switches:
            return _KNOWN[model][1]
        layout = _examine(model)
        if not changes_of(model):
            _KNOWN[model] = switches, layout
        return layout

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

        A hook that carries one of the model's sites is that site.

        Raises
        ------
        InputError
            The kind, the layer or the hook does not exist here, and the message names the nearest that does;
            or the hook carries no vector for each token.
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
        """How many coordinates a site's vectors have, those of all heads together."""
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

        The stream between attention and FFN is the sum of the stream before and what attention writes: where
        only a norm reads the sum off a hook, writing there would leave the stream as it is.
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
        """When a pass comes to a site: the number of hooks that fire before."""
        return self.hooks[self.hook(site)].order

    def write_order(self, site: str | int | Site) -> int:
        """When a site is written, in the numbers of `order`."""
        return self.hooks[self.written_at(site)[0]].order

    def start_of_block(self, layer: int) -> int:
        """When a pass comes to a block, in the numbers of `order`."""
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
            return Site.read(min(hook.names, key=lambda name: (len(name), name)))
        mid = Site(MID, known.layer)
        return mid if str(site).endswith(MID_HOOK) and self._hook_of(mid) == hook.name else known

    def _hook_of(self, site: Site) -> str | None:
        """Name of the hook of a site inside a block, ``None`` where the model has no such site."""
        return block_hook(site.layer, self.wiring.hooks[site.kind]) if site.kind in self.kinds else None


_KNOWN: WeakKeyDictionary[Any, tuple[tuple[Any, ...], ModelLayout]] = WeakKeyDictionary()
_SWITCHES = ("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in")


def _examine(model: TransformerBridge) -> ModelLayout:
    n_layers = model.cfg.n_layers
    candidates = {name for wiring in WIRINGS for name in wiring.hooks.values()} | {*STREAM_HOOKS.values()}
    mixtures = [mixture(model, layer) for layer in range(n_layers)]
    wirings = [_of_mixtures(wiring) for wiring in WIRINGS] if any(mixtures) else WIRINGS
    candidates |= {MIXTURE_HOOK}
    wanted = {block_hook(layer, name) for layer in range(n_layers) for name in candidates}
    probe, places = probe_inputs(model)
    seen: dict[str, Tensor] = {}
    fired: dict[str, list[tuple[int, Any]]] = {}
    count = itertools.count()

    def keep(value: Any, hook: Any) -> None:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        fired.setdefault(hook.name, []).append((next(count), shape))
        if hook.name in wanted:
            seen[hook.name] = value.detach()

    points = _points(model)
    returned: list[int | None] = []  # how many values, where they are several

    def count_returned(module: nn.Module, given: Any, value: Any) -> None:
        returned.append(len(value) if isinstance(value, tuple) else None)

    listening = model.blocks[0].register_forward_hook(count_returned)
    try:
        hooks = [(name, keep) for name in _open(model, points)]
        with torch.inference_mode(), reading(model, hooks):
            model(probe, return_type=None)
    except (InputError, torch.OutOfMemoryError):  # these say nothing about what the model is
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise InputError(
            f"{type(model.original_model).__name__} cannot be run by TransformerLens: a pass over "
            f"{places[0]} sentences of {places[1]} tokens ends in {type(error).__name__}: {error}. "
            "Expected a model whose configuration fits its weights, and which reads token ids."
        ) from error
    finally:
        listening.remove()
    by_name = {
        name: hook
        for hook_name, names in points.items()
        for hook in [Hook(hook_name, names, *_carried(fired.get(hook_name, []), places))]
        for name in names
    }
    common: Any = {
        "n_layers": n_layers, "d_model": model.cfg.d_model, "hooks": by_name,
        "blocks_return_tuples": returned[0] is not None, "n_returned": returned[0] or 1,
    }  # fmt: skip
    for wiring in wirings:
        if all(_sums_hold(wiring, seen, layer) for layer in range(n_layers)):
            d_mlp = _d_mlp(model, wiring, seen)
            kinds = tuple(
                kind
                for kind, name in wiring.hooks.items()
                if (kind != COEFFICIENTS or d_mlp)
                and all(block_hook(layer, name) in seen for layer in range(n_layers))
            )
            return ModelLayout(wiring, kinds=kinds, d_mlp=d_mlp, **common)
    return ModelLayout(STREAM_ONLY, kinds=(), **common)


def probe_inputs(model: TransformerBridge) -> tuple[Tensor, tuple[int, int]]:
    """What a model is tried with, tokens or images: how many there are, and how many vectors each has."""
    if is_visual(model):
        images = probe_images(model)
        return images, (len(images), places_of_image(model))
    # A length that tells a batch's axes from all others.
    heads = {getattr(model.cfg, name, None) for name in ("n_heads", "n_key_value_heads", "d_head")}
    length = next(length for length in (7, 5, 11, 13, 9) if length not in heads)
    tokens = torch.arange(1, 3 * length + 1, device=model.cfg.device) % model.cfg.d_vocab
    return tokens.view(3, length), (3, length)


def _points(model: TransformerBridge) -> dict[str, tuple[str, ...]]:
    """All names of each hook point, by its own."""
    names: dict[int, list[str]] = {}
    own_names: dict[int, str] = {}
    for name, point in model.hook_dict.items():
        names.setdefault(id(point), []).append(name)
        own_names[id(point)] = point.name or name
    return {own_names[number]: tuple(dict.fromkeys((own_names[number], *names[number]))) for number in names}


def _open(model: TransformerBridge, points: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Names of the hook points that can be used; others have to be turned on in ``model.cfg``."""
    closed = getattr(model, "_gated_hook_reason", lambda name: None)
    return (name for name in points if closed(name) is None)


def _carried(fired: list[tuple[int, Any]], tokens: tuple[int, ...]) -> tuple[int, tuple[int, ...], str]:
    """Order, shape and description of what a hook carries, of all times that it fired."""
    if not fired:
        return -1, (), "does not fire: this model does not compute it, or it has to be turned on in model.cfg"
    order, shape = fired[-1]
    if len(fired) > 1:
        return order, (), f"fires {len(fired)} times in a pass"
    if isinstance(shape, str):
        return order, (), f"carries a {shape} and no tensor"
    if len(shape) not in (3, 4) or shape[:2] != tokens:
        named = {tokens[0]: "batch", tokens[1]: "token"}
        words = ", ".join(str(named.get(size, size)) for size in shape)
        return order, (), f"carries a tensor [{words}]"
    return order, shape[2:], "carries vectors"


def mixture(model: TransformerBridge, layer: int) -> Mixture | None:
    """The experts of a block's FFN, with a hook for their coefficients; ``None`` where it has none known."""
    from transformer_lens.hook_points import HookPoint

    mlp = getattr(model.blocks[layer], "mlp", None)
    block = getattr(mlp, "original_component", None)
    name, attribute = block_hook(layer, MIXTURE_HOOK), MIXTURE_HOOK.rpartition(".")[2]
    if not isinstance(block, nn.Module):
        return None
    point = model.hook_dict.get(name) or HookPoint()
    experts = attached(block, point)
    if experts is not None and not hasattr(mlp, attribute):
        setattr(mlp, attribute, point)
        point.name = name
        model._hook_registry[name] = point
    return experts


def _of_mixtures(wiring: Wiring) -> Wiring:
    return replace(wiring, hooks={**wiring.hooks, COEFFICIENTS: MIXTURE_HOOK})


def output_layer(model: TransformerBridge, layer: int) -> nn.Module:
    """The linear layer of a block that reads ``ffn_post`` and writes ``ffn_out``."""
    return model.blocks[layer].mlp.out.original_component


def output_multiplier(model: TransformerBridge) -> float:
    """What attention and FFN are multiplied by before they are added to the stream; 1 in most models."""
    return float(getattr(model.blocks[0], "residual_contribution_scale", 1.0))


@torch.inference_mode()
def _d_mlp(model: TransformerBridge, wiring: Wiring, seen: Mapping[str, Tensor]) -> int:
    """Width of the coefficients, 0 if a block's FFN output is not its output layer's of them."""
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
    slack = 8 * torch.finfo(whole.dtype).eps * terms.abs().sum(0)
    overflown = ~terms.isfinite().all(0)  # tells nothing of the wiring, and is refused where it is read
    return bool(((error <= slack) | overflown).all())
