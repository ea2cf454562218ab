"""Hugging Face models patched by hand, without any of matlens' code: what patched passes are compared with.

A part of a model is named by two sites and replaced by a matrix. Whole blocks are replaced by giving their
modules another `forward`; sub-modules by torch hooks on the modules that `conftest.SITE_MODULES` lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from conftest import (
    D_MODEL,
    LAYERS,
    N_LAYERS,
    RESIDUAL_MULTIPLIER,
    SCALED_SITES,
    SITE_MODULES,
    plain_vectors,
)
from torch import Tensor

TUPLES = (  # whose blocks give more than vectors
    "gptj", "bloom", "falcon-alibi", "falcon-alibi-multi-query", "falcon-new", "falcon-new-one-norm",
)  # fmt: skip


class Part(NamedTuple):
    """What is replaced and by which numbers.

    ``where`` is a word, a position for each sentence, or truth values for the tokens that each starts with.
    """

    source: str
    target: str
    weight: Tensor
    bias: Tensor | None = None
    where: str | tuple[int, ...] | tuple[tuple[bool, ...], ...] = "all"

    def apply(self, h: Tensor) -> Tensor:
        mapped = h.to(self.weight.dtype) @ self.weight.T
        return (mapped if self.bias is None else mapped + self.bias).to(h.dtype)

    @property
    def blocks(self) -> range:
        """Blocks that are not computed."""
        (kind, first), (_, last) = ends(self)
        return range(first, last) if kind == "h" else range(0)


def ends(part: Part) -> list[tuple[str, int]]:
    return [(kind, int(layer)) for kind, layer in (site.split(".") for site in (part.source, part.target))]


def part(source: str, target: str, seed: int = 0, *, bias: bool = True, where: Any = "all") -> Part:
    """A part with random numbers that keep vectors about as long as they are."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(D_MODEL, D_MODEL, generator=generator) / D_MODEL**0.5
    return Part(source, target, weight, torch.randn(D_MODEL, generator=generator) if bias else None, where)


def jump_part(first: int, last: int, seed: int = 0, *, bias: bool = True) -> Part:
    return part(f"h.{first}", f"h.{last}", seed, bias=bias)


def submodule_part(name: str, layer: int, seed: int = 0, *, bias: bool = True, where: Any = "all") -> Part:
    return part(f"{name}_in.{layer}", f"{name}_out.{layer}", seed, bias=bias, where=where)


def submodules(name: str) -> list[str]:
    """Sub-modules of a block that have an input and an output."""
    kinds = SITE_MODULES[name]
    return [kind[:-3] for kind in kinds if kind.endswith("_in") and f"{kind[:-3]}_out" in kinds]


def _chosen(where: str | tuple[Any, ...], sentence: int, length: int) -> Tensor:
    """Which tokens of one sentence are meant."""
    tokens = torch.arange(length)
    if isinstance(where, str):
        return tokens >= {"all": 0, "not-first": 1, "last": length - 1}[where]
    meant = where[sentence]
    if isinstance(meant, tuple):
        return torch.tensor([meant[token] if token < len(meant) else True for token in range(length)])
    return tokens == meant


@contextmanager
def patched_by_hand(name: str, model: Any, parts: Sequence[Part], sentence: int = 0) -> Iterator[None]:
    """Put the parts into a plain model that is then given one sentence, of this number in its batch."""
    layers, final_norm = (model.get_submodule(path) for path in LAYERS[name])
    handles: list[Any] = []

    def replace_blocks(replaced: Part) -> None:
        for layer in replaced.blocks:

            def forward(h: Tensor, *_: Any, first: bool = layer == replaced.blocks[0], **__: Any) -> Any:
                h = replaced.apply(h) if first else h
                return [h] if name == "gpt1" else (h, None) if name in TUPLES else h

            layers[layer].forward = forward

    def map_between_blocks(replaced: Part, layer: int) -> None:
        before = layers[layer] if layer < N_LAYERS else final_norm
        handles.append(before.register_forward_pre_hook(lambda _, args: (replaced.apply(args[0]), *args[1:])))

    def replace_submodule(replaced: Part, layer: int) -> None:
        (path_in, side_in), (path_out, side_out) = (
            SITE_MODULES[name][site.split(".")[0]] for site in (replaced.source, replaced.target)
        )
        assert (side_in, side_out) == ("in", "out")
        given: list[Tensor] = []

        def before(_: Any, args: Any, kwargs: Any) -> None:
            given[:] = [args[0] if args else kwargs["hidden_states"]]

        def after(_: Any, __: Any, output: Any) -> Any:
            whole = output[0] if isinstance(output, tuple | list) else output
            chosen = _chosen(replaced.where, sentence, whole.shape[1])[:, None]
            scaled = replaced.target.split(".")[0] in SCALED_SITES.get(name, ())
            instead = replaced.apply(given[0]) / (RESIDUAL_MULTIPLIER if scaled else 1)
            whole = torch.where(chosen, instead, whole)
            return type(output)([whole, *output[1:]]) if isinstance(output, tuple | list) else whole

        block = layers[layer]
        handles.append(block.get_submodule(path_in).register_forward_pre_hook(before, with_kwargs=True))
        handles.append(block.get_submodule(path_out).register_forward_hook(after))

    try:
        for replaced in parts:
            (kind, first), (_, last) = ends(replaced)
            if kind != "h":
                replace_submodule(replaced, first)
            elif first < last:
                replace_blocks(replaced)
            else:
                map_between_blocks(replaced, first)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for replaced in parts:
            for layer in replaced.blocks:
                vars(layers[layer]).pop("forward", None)


def hand_vectors(
    name: str, model: Any, parts: Sequence[Part], sentences: Sequence[Sequence[int]]
) -> list[dict[str, Tensor]]:
    """Vectors of every site that is left, and ``"logits"``, of each sentence alone and without padding."""
    skipped = {layer for replaced in parts for layer in replaced.blocks}
    inside = {f"h.{layer}" for replaced in parts for layer in replaced.blocks[1:]}
    inside |= {f"{kind}.{layer}" for kind in SITE_MODULES.get(name, {}) for layer in skipped}
    sentence_vectors = []
    for s, sentence in enumerate(sentences):
        with patched_by_hand(name, model, parts, s):
            seen = plain_vectors(name, model, torch.tensor([list(sentence)]))
        sentence_vectors.append({site: value[0] for site, value in seen.items() if site not in inside})
    return sentence_vectors
