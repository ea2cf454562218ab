"""What small models carry at their sites, patched or not, and what patching leaves behind."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from conftest import N_LAYERS, assert_near
from handpatched import Part
from torch import Tensor

from matlens import LinearMap, Site
from matlens import patched as patched
from matlens.models.layout import ModelLayout
from matlens.patching import run_variants as run_variants
from matlens.patching.replacements import Replacement

SENTENCES = [[7, 3, 41, 12, 12, 59, 30, 22, 8, 17], [5, 33, 2, 50], [44], [19, 4, 4, 26, 51, 9, 10]]
LENGTHS = [len(sentence) for sentence in SENTENCES]
RANGES = [(a, b) for a in range(N_LAYERS + 1) for b in range(a, N_LAYERS + 1)]
Models = Callable[[str], Any]
Vectors = list[dict[str, Tensor]]


def linear(part: Part, **more: Any) -> LinearMap:
    return LinearMap(part.weight, part.bias, part.source, part.target, **more)


def replacement(part: Part) -> Replacement:
    where: Any = part.where if isinstance(part.where, str) else torch.tensor(part.where)
    return Replacement.from_map(linear(part), where=where)


def padded(sentences: Sequence[Sequence[int]], side: str = "right") -> tuple[Tensor, Tensor]:
    """Tokens and mask of a batch."""
    tokens = torch.ones(len(sentences), max(map(len, sentences)), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, sentence in enumerate(sentences):
        columns = slice(len(sentence)) if side == "right" else slice(-len(sentence), None)
        tokens[row, columns], mask[row, columns] = torch.tensor(sentence), 1
    return tokens, mask


@torch.inference_mode()
def vectors(model: Any, sentences: Sequence[Sequence[int]] = SENTENCES, side: str = "right") -> Vectors:
    """What matlens' sites carry, and the logits, at each sentence's own tokens in a batch of them."""
    tokens, mask = padded(sentences, side)
    seen: dict[str, Tensor] = {}

    layout = ModelLayout.from_model(model)

    def keep(site: Site) -> tuple[str, Any]:
        return layout.hook(site), lambda value, hook: seen.update({str(site): value.clone()})

    with model.hooks(fwd_hooks=[keep(site) for site in layout.sites]):
        seen["logits"] = model(tokens, attention_mask=mask)
    return [{site: value[s][mask[s] == 1] for site, value in seen.items()} for s in range(len(sentences))]


def assert_same(ours: Vectors, theirs: Vectors, tolerance: float = 1e-5) -> None:
    """The same sites with the same vectors: what is not computed fires no hook."""
    for our, their in zip(ours, theirs, strict=True):
        assert set(our) == set(their)
        for site in our:
            assert_near(our[site], their[site], tolerance)


def differ(ours: Vectors, theirs: Vectors) -> bool:
    """Whether logits are others, by more than rounding."""
    return all(
        float((a["logits"] - b["logits"]).abs().max()) > 1e-3 * float(b["logits"].abs().max())
        for a, b in zip(ours, theirs, strict=True)
    )


def hook_counts(model: Any) -> list[int]:
    """How many hooks hang on every hook point and on every module, TransformerLens' and torch's."""
    points = [len(point.fwd_hooks) + len(point.bwd_hooks) for point in model.hook_dict.values()]
    both = [*model.modules(), *model.original_model.modules()]
    return points + [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in both]


def state(model: Any) -> tuple[Any, ...]:
    """All that patching could leave behind."""
    logits = [sites["logits"] for sites in vectors(model)]  # first, as the first pass marks the bridge
    attributes = [set(vars(module)) for module in model.modules()]
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    return hook_counts(model), attributes, tensors, logits


def assert_as_before(model: Any, before: tuple[Any, ...]) -> None:
    """The same hooks, attributes, weights and logits as when `state` looked."""
    counts, attributes, tensors, logits = state(model)
    assert (counts, attributes) == before[:2]
    assert not any("forward" in vars(block) for block in model.blocks)
    assert set(tensors) == set(before[2])
    assert all(torch.equal(value, before[2][key]) for key, value in tensors.items())
    assert all(torch.equal(now, then) for now, then in zip(logits, before[3], strict=True))


@contextlib.contextmanager
def counting(model: Any) -> Iterator[list[int]]:
    """How often each of the plain blocks inside the bridge runs."""
    counts = [0] * N_LAYERS

    def count(layer: int, *_: Any) -> None:
        counts[layer] += 1

    count.__module__ = "transformers"  # not taken for a user's hook
    hooks = [functools.partial(count, layer) for layer in range(N_LAYERS)]
    handles = [
        block.original_component.register_forward_pre_hook(hook)
        for block, hook in zip(model.blocks, hooks, strict=True)
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
