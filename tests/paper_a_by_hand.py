"""The numbers of paper A's analyses from the plain model: LAPACK, scikit-learn and blocks replaced by hand.

Of matlens only the sentences and the sampled positions are taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import handpatched
import torch
from conftest import N_LAYERS, SINK_TOKENS
from handpatched import Part
from independent import judged_by_hand, make_readout
from sklearn.metrics import r2_score
from torch import Tensor

import matlens
from matlens.activations import Activations

SUBMODULES = {"mat_attn": ("attn",), "mat_ffn": ("ffn",), "mat_ln1_ln2": ("ln1", "ln2")}
PAIRS = [(a, b) for a in range(N_LAYERS) for b in range(a + 1, N_LAYERS + 1)]


class Sentences:
    """Sentences as a plain model reads them, and its vectors of every site at their positions, in float64."""

    def __init__(self, name: str, plain: Any, examples: Any) -> None:
        ends = zip(examples.offsets[:-1], examples.offsets[1:], strict=True)
        self.tokens: list[list[int]] = [examples.tokens[start:end].tolist() for start, end in ends]
        self.positions: list[int] = examples.positions.tolist()
        self.every = [handpatched.run(name, plain, [], tokens) for tokens in self.tokens]
        self.at = {site: self.pick(self.every, site) for site in self.every[0]}
        self.sink = torch.tensor(
            [t[i] in SINK_TOKENS for t, i in zip(self.tokens, self.positions, strict=True)]
        )
        self.first = torch.tensor(self.positions) == 0

    def pick(self, vectors: Sequence[Mapping[str, Tensor]], site: str) -> Tensor:
        """Vectors of a site at the position of each of the first sentences."""
        return torch.stack([seen[site][i] for seen, i in zip(vectors, self.positions, strict=False)])

    def h(self, layer: int) -> Tensor:
        return self.at[f"h.{layer}"]

    @property
    def counts(self) -> dict[str, int]:
        """What a record says of the sinks at the positions."""
        masks = {"sinks": self.sink, "first_sinks": self.sink & self.first, "first_tokens": self.first}
        masks["later_sinks"] = self.sink & ~self.first
        return {f"n_{name}": int(mask.sum()) for name, mask in masks.items()}


def fitted(x: Tensor, y: Tensor) -> Tensor:
    """The weight of least squares."""
    return torch.linalg.lstsq(x, y, driver="gelsd").solution.T


class StudyByHand:
    """A model with sinks on a corpus split as the analyses split it."""

    def __init__(self, name: str, model: Any, plain: Any, corpus: Path, sizes: tuple[int, int]) -> None:
        self.name, self.model, self.plain = name, model, plain
        self.parts = matlens.load_corpus(str(corpus)).split(n_train=sizes[0], n_validation=sizes[1], seed=0)
        self.train, self.validation = (
            Sentences(name, plain, matlens.make_examples(model, part, seed=0)) for part in self.parts
        )
        self.mat, self.mat_without_sinks = (
            {(a, b): fitted(self.train.h(a)[rows], self.train.h(b)[rows]) for a, b in PAIRS}
            for rows in (slice(None), ~self.train.sink)
        )
        self.truth = self.validation.h(N_LAYERS)

    def mapped_by_run(
        self, folder: Path, vectors: Activations | None = None
    ) -> dict[tuple[str, int], Tensor]:
        """What the maps of a run make of vectors, by default the validation sentences'.

        Maps of BERT are compared by their fit: its norms leave one direction with nothing but rounding
        errors, which coefficients of thousands enlarge.
        """
        (stored,) = folder.glob("studies/*/maps")
        maps, last = matlens.MapSet.load(stored), self.train.h(N_LAYERS)
        vectors = Activations.load(stored.parent / "validation") if vectors is None else vectors
        for layer in range(N_LAYERS):
            h, weight = self.train.h(layer), maps[layer, N_LAYERS].weight.double()
            errors = [float((last - h @ each.T).norm()) for each in (weight, fitted(h, last))]
            assert errors[0] < 1.05 * errors[1]
        return {("mat", layer): maps[layer, N_LAYERS](vectors[layer]) for layer in range(N_LAYERS)}

    def judge(self, substitutes: dict[Any, Tensor], n: int | None = None) -> dict[Any, list[float]]:
        return judged_by_hand(self.plain, self.truth[:n], {key: h[:n] for key, h in substitutes.items()})

    def mapped(self, layer: int, h: Tensor | None = None) -> Tensor:
        h = self.validation.h(layer) if h is None else h
        return h @ self.mat[layer, N_LAYERS].T if layer < N_LAYERS else h

    def r2(self, method: str, a: int, b: int, rows: Any = slice(None), weights: Any = None) -> float:
        h, truth = self.validation.h(a)[rows], self.validation.h(b)[rows]
        return float(r2_score(truth, h @ (weights or self.mat)[a, b].T if method == "mat" else h))

    def layers(self) -> dict[tuple[str, int], Tensor]:
        """What stands for ``h^L`` by every method and layer."""
        every = range(N_LAYERS + 1)
        return {("mat", n): self.mapped(n) for n in every} | {("id", n): self.validation.h(n) for n in every}

    # Patched runs

    def patched(self, parts: Sequence[Part], n: int) -> Tensor:
        vectors = handpatched.hand_vectors(self.name, self.plain, parts, self.validation.tokens[:n])
        return self.validation.pick(vectors, f"h.{N_LAYERS}")

    def scheme(self, jumps: Sequence[tuple[int, int]], n: int, *, without_sinks: bool = False) -> Tensor:
        weights = self.mat_without_sinks if without_sinks else self.mat
        where: Any = self.not_sinks if without_sinks else "all"
        return self.patched([Part(f"h.{a}", f"h.{b}", weights[a, b], where=where) for a, b in jumps], n)

    @property
    def not_sinks(self) -> tuple[tuple[bool, ...], ...]:
        """Which tokens of each validation sentence are not sinks."""
        return tuple(tuple(token not in SINK_TOKENS for token in read) for read in self.validation.tokens)

    def best_jumps(self, kept: int, weights: Any = None, rows: Any = slice(None)) -> list[tuple[int, int]]:
        """Of all ways through the layers that run so many blocks, the one of greatest product of r2."""
        r2 = {pair: self.r2("mat", *pair, rows, weights) for pair in PAIRS}
        ways = []
        for n in range(N_LAYERS):
            for inner in itertools.combinations(range(1, N_LAYERS), n):
                segments = list(itertools.pairwise((0, *inner, N_LAYERS)))
                ways += [segments[0::2], segments[1::2]]
        of_kept = [jumps for jumps in ways if N_LAYERS - sum(b - a for a, b in jumps) == kept]
        return max(of_kept, key=lambda jumps: math.prod(r2[pair] for pair in jumps))

    def submodules(
        self, method: str, tokens: str, place: str, layer: int, n: int, last: int = N_LAYERS
    ) -> Tensor:
        """Stand-ins fitted on some tokens, in the place of sub-modules at some tokens of some blocks."""
        rows = {"all": slice(None), "not-first": ~self.train.first, "not-sink": ~self.train.sink}[tokens]
        where: Any = {"not-sink": self.not_sinks, "predicted": tuple(self.validation.positions)}
        parts = []
        for part, of_layer in itertools.product(SUBMODULES[method], range(layer, last)):
            ends = f"{part}_in.{of_layer}", f"{part}_out.{of_layer}"
            weight = fitted(*(self.train.at[end][rows] for end in ends))
            parts.append(Part(*ends, weight, where=where.get(place, place)))
        return self.patched(parts, n)

    # Early exit

    def exits(self, method: str, lams: Sequence[float]) -> list[tuple[float, float, float]]:
        """By threshold: mean number of layers, that of layers that are mapped, share of right predictions."""
        readout, positions = make_readout(self.plain), self.validation.positions
        vectors = [h for (m, layer), h in self.layers().items() if m == method and layer > 0]
        with torch.inference_mode():
            top = [readout(h).double().softmax(-1).topk(2) for h in vectors]
            final, mean_length = readout(self.truth).argmax(-1), sum(positions) / len(positions) + 1
        points = []
        for lam in lams:
            limits = [0.9 * lam + 0.1 * math.exp(-4 * i / mean_length) for i in positions]
            left = [
                next((k for k in range(N_LAYERS) if top[k].values[s].diff().item() < -limit), N_LAYERS - 1)
                for s, limit in enumerate(limits)
            ]
            right = [bool(top[k].indices[s, 0] == final[s]) for s, k in enumerate(left)]
            mapped = [min(k + 1, N_LAYERS - 1) for k in left]
            points.append(tuple(sum(each) / len(left) for each in ([k + 1 for k in left], mapped, right)))
        return points
