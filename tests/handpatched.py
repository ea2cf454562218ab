"""Hugging Face models patched by hand, without matlens: what patched passes are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from conftest import (
    D_MODEL,
    LAYERS,
    N_LAYERS,
    RESIDUAL_MULTIPLIER,
    SCALED_SITES,
    SITE_MODULES,
    WIRING_OF,
    listening,
)
from torch import Tensor

# Where the heads' outputs enter the matrix that joins them; written by hand from the models' source.
JOINS = {
    "gpt2": "attn.c_proj", "llama": "self_attn.o_proj", "neox": "attention.dense", "gptj": "attn.out_proj",
    "bert": "attention.output.dense", "gemma2": "self_attn.o_proj", "gemma3": "self_attn.o_proj",
    "granite": "self_attn.o_proj", "olmo2": "self_attn.o_proj", "llama-sinks": "self_attn.o_proj",
}  # fmt: skip
Function = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@torch.no_grad()  # weights that inference mode converts could not be trained any more
def run(
    name: str, model: Any, functions: Sequence[tuple[str, Function]], sentence: Sequence[int]
) -> dict[str, Tensor]:
    """Vectors at every site of one sentence, and ``"logits"``, in float64.

    A function is given what stands at its site and at the sites before, and gives what stands there instead.
    """
    layers, final_norm = (model.get_submodule(path) for path in LAYERS[name])
    kinds = SITE_MODULES.get(name, {}) | ({"z": (JOINS[name], "in")} if name in JOINS else {})

    def put(site: str, value: Tensor) -> Tensor:
        multiplier = RESIDUAL_MULTIPLIER if site.split(".")[0] in SCALED_SITES.get(name, ()) else 1
        seen[site] *= multiplier
        for at, function in functions:
            if at == site:
                seen[site] = function(seen[site], seen).to(value)
                value = seen[site] / multiplier
        return value

    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # grouped products have no float64
    try:
        with listening(layers, final_norm, kinds, put) as seen:
            seen["logits"] = model.double()(torch.tensor([list(sentence)])).logits
    finally:
        model.float()
    return {site: value[0] for site, value in seen.items()}


class Part(NamedTuple):
    """What is replaced and by which weights.

    ``where`` is a word, a position for each sentence, or truth values for the tokens that each starts with.
    """

    source: str
    target: str
    weight: Tensor
    bias: Tensor | None = None
    where: str | tuple[int, ...] | tuple[tuple[bool, ...], ...] = "all"

    def apply(self, h: Tensor) -> Tensor:
        mapped = h @ self.weight.to(h).T
        return mapped if self.bias is None else mapped + self.bias.to(h)

    @property
    def blocks(self) -> range:
        """Blocks that are not computed."""
        (kind, first), (target, last) = ends(self)
        return range(first, last) if kind == target == "h" and self.where == "all" else range(0)


def ends(part: Part) -> list[tuple[str, int]]:
    return [(kind, int(layer)) for kind, layer in (site.split(".") for site in (part.source, part.target))]


def part(
    source: str, target: str, seed: int = 0, *, bias: bool = True, where: Any = "all", d_in: int = D_MODEL
) -> Part:
    """A part with random weights that keep vectors about as long as they are."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(D_MODEL, d_in, generator=generator) / d_in**0.5
    return Part(source, target, weight, torch.randn(D_MODEL, generator=generator) if bias else None, where)


def jump_part(first: int, last: int, seed: int = 0, *, bias: bool = True) -> Part:
    return part(f"h.{first}", f"h.{last}", seed, bias=bias)


def submodule_part(name: str, layer: int, seed: int = 0, *, bias: bool = True, where: Any = "all") -> Part:
    return part(f"{name}_in.{layer}", f"{name}_out.{layer}", seed, bias=bias, where=where)


def submodules(name: str) -> list[str]:
    """Sub-modules of a block that have an input and an output."""
    kinds = SITE_MODULES.get(name, {})
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


def function_of(name: str, replaced: Part, sentence: int) -> tuple[str, Function]:
    """At which site of one sentence of a batch a part is written, and what is put there."""
    kind, layer = ends(replaced)[1]
    site, before = replaced.target, None
    if kind == "mid" and WIRING_OF[name] != "post-norm":  # a sum, which no module returns
        normed = WIRING_OF[name] in ("extra-norm", "output-norm")
        site, before = f"{'ln1_post_out' if normed else 'attn_out'}.{layer}", f"h.{layer}"

    def write(value: Tensor, seen: Mapping[str, Tensor]) -> Tensor:
        instead = replaced.apply(seen[replaced.source]) - (0 if before is None else seen[before])
        return torch.where(_chosen(replaced.where, sentence, value.shape[1])[:, None], instead, value)

    return site, write


def hand_vectors(
    name: str, model: Any, parts: Sequence[Part], sentences: Sequence[Sequence[int]]
) -> list[dict[str, Tensor]]:
    """Vectors of every site that is left, and ``"logits"``, of each sentence alone and without padding."""
    skipped = {layer for replaced in parts for layer in replaced.blocks}
    inside = {f"h.{layer}" for replaced in parts for layer in replaced.blocks[1:]}
    inside |= {f"{kind}.{layer}" for kind in SITE_MODULES.get(name, {}) for layer in skipped}
    inside |= {f"z.{layer}" for layer in range(N_LAYERS)}
    # A jump onto a layer comes before what is mapped at that layer.
    in_order = sorted(parts, key=lambda replaced: replaced.source == replaced.target)
    return [
        {
            site: value
            for site, value in run(
                name, model, [function_of(name, replaced, s) for replaced in in_order], sentence
            ).items()
            if site not in inside
        }
        for s, sentence in enumerate(sentences)
    ]
