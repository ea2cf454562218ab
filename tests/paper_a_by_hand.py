"""The numbers of paper A's analyses from the plain model: LAPACK, scikit-learn and blocks replaced by hand.

Of matlens only the sentences and the sampled positions are taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from conftest import N_LAYERS, SINK_TOKENS, plain_vectors
from handpatched import Part, hand_vectors
from independent import judged_by_hand, make_readout
from sklearn.metrics import r2_score
from torch import Tensor

import matlens

SUBMODULES = {"mat_attn": ("attn",), "mat_ffn": ("ffn",), "mat_ln1_ln2": ("ln1", "ln2")}
PAIRS = [(a, b) for a in range(N_LAYERS) for b in range(a + 1, N_LAYERS + 1)]


class Sentences:
    """Sentences as a plain model reads them, and its vectors of every site at their positions."""

    def __init__(self, name: str, plain: Any, examples: Any) -> None:
        ends = zip(examples.offsets[:-1], examples.offsets[1:], strict=True)
        self.tokens: list[list[int]] = [examples.tokens[start:end].tolist() for start, end in ends]
        self.positions: list[int] = examples.positions.tolist()
        self.every = [plain_vectors(name, plain, torch.tensor(tokens)) for tokens in self.tokens]
        self.at = {
            site: torch.stack([seen[site][0, i] for seen, i in zip(self.every, self.positions, strict=True)])
            for site in self.every[0]
        }
        self.sink = torch.tensor(
            [tokens[i] in SINK_TOKENS for tokens, i in zip(self.tokens, self.positions, strict=True)]
        )
        self.first = torch.tensor(self.positions) == 0

    def h(self, layer: int) -> Tensor:
        return self.at[f"h.{layer}"]

    def all_tokens(self, site: str) -> Tensor:
        return torch.cat([seen[site][0] for seen in self.every])


def fitted(x: Tensor, y: Tensor) -> Tensor:
    """The weight of least squares, in float64."""
    return torch.linalg.lstsq(x.double(), y.double(), driver="gelsd").solution.T


class StudyByHand:
    """A model with sinks on a corpus split as the analyses split it."""

    def __init__(self, name: str, model: Any, plain: Any, corpus: Path, sizes: tuple[int, int]) -> None:
        self.name, self.plain = name, plain
        parts = matlens.load_corpus(str(corpus)).split(n_train=sizes[0], n_validation=sizes[1], seed=0)
        self.train, self.validation = (
            Sentences(name, plain, matlens.make_examples(model, part, seed=0)) for part in parts
        )
        self.mat, self.mat_without_sinks = (
            {(a, b): fitted(self.train.h(a)[rows], self.train.h(b)[rows]) for a, b in PAIRS}
            for rows in (slice(None), ~self.train.sink)
        )
        self.truth = self.validation.h(N_LAYERS)

    def judge(self, substitutes: dict[Any, Tensor], n: int | None = None) -> dict[Any, list[float]]:
        return judged_by_hand(self.plain, self.truth[:n], {key: h[:n] for key, h in substitutes.items()})

    def mapped(self, layer: int) -> Tensor:
        h = self.validation.h(layer)
        return (h.double() @ self.mat[layer, N_LAYERS].T).float() if layer < N_LAYERS else h

    def r2(self, method: str, a: int, b: int) -> float:
        h, truth = self.validation.h(a).double(), self.validation.h(b).double()
        return float(r2_score(truth.numpy(), (h @ self.mat[a, b].T if method == "mat" else h).numpy()))

    def layers(self, methods: Sequence[str] = ("mat", "id")) -> dict[tuple[str, int], Tensor]:
        """What stands for ``h^L`` by every method and layer."""
        return {
            (method, layer): self.mapped(layer) if method == "mat" else self.validation.h(layer)
            for method in methods
            for layer in range(N_LAYERS + 1)
        }

    # Patched runs

    def patched(self, parts: Sequence[Part], n: int) -> Tensor:
        vectors = hand_vectors(self.name, self.plain, parts, self.validation.tokens[:n])
        places = self.validation.positions[:n]
        return torch.stack([seen[f"h.{N_LAYERS}"][i] for seen, i in zip(vectors, places, strict=True)])

    def scheme(self, jumps: Sequence[tuple[int, int]], n: int, *, without_sinks: bool = False) -> Tensor:
        weights = self.mat_without_sinks if without_sinks else self.mat
        where: Any = self.not_sinks if without_sinks else "all"
        parts = [Part(f"h.{a}", f"h.{b}", weights[a, b].float(), where=where) for a, b in jumps]
        return self.patched(parts, n)

    @property
    def not_sinks(self) -> tuple[tuple[bool, ...], ...]:
        """Which tokens of each validation sentence are not sinks."""
        return tuple(tuple(token not in SINK_TOKENS for token in read) for read in self.validation.tokens)

    def best_jumps(self, kept: int, weights: Any = None, rows: Any = None) -> list[tuple[int, int]]:
        """Of all ways through the layers that run so many blocks, the one of greatest product of r2."""
        weights, rows = weights or self.mat, slice(None) if rows is None else rows
        h = [self.validation.h(layer)[rows].double() for layer in range(N_LAYERS + 1)]
        r2 = {(a, b): r2_score(h[b].numpy(), (h[a] @ weights[a, b].T).numpy()) for a, b in PAIRS}
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
        rows = {"all": ~self.train.first | True, "not-first": ~self.train.first, "not-sink": ~self.train.sink}
        where: Any = {
            "all": "all",
            "not-first": "not-first",
            "not-sink": self.not_sinks,
            "predicted": tuple(self.validation.positions),
        }[place]
        parts = []
        for part, of_layer in itertools.product(SUBMODULES[method], range(layer, last)):
            ends = f"{part}_in.{of_layer}", f"{part}_out.{of_layer}"
            x, y = (self.train.at[end][rows[tokens]] for end in ends)
            parts.append(Part(*ends, fitted(x, y).float(), where=where))
        return self.patched(parts, n)

    # Early exit

    def exits(self, method: str) -> tuple[list[list[float]], list[list[bool]]]:
        """Confidence of every layer from 1, and whether its prediction is that of the last, by example."""
        readout = make_readout(self.plain)
        with torch.inference_mode():
            final = readout(self.truth).argmax(-1)
            p = [
                readout(h).double().softmax(-1).sort(descending=True)
                for (m, layer), h in self.layers([method]).items()
                if layer > 0 and m == method
            ]
        gaps = torch.stack([sorted_p.values[:, 0] - sorted_p.values[:, 1] for sorted_p in p], 1)
        right = torch.stack([sorted_p.indices[:, 0] == final for sorted_p in p], 1)
        return gaps.tolist(), right.tolist()

    def sweep(self, method: str, lam: float) -> tuple[float, float]:
        """Mean number of layers and share of right predictions at a threshold."""
        gaps, right = self.exits(method)
        mean_length = sum(i + 1 for i in self.validation.positions) / len(self.validation.positions)
        left, hits = [], []
        for of_example, are_right, i in zip(gaps, right, self.validation.positions, strict=True):
            limit = 0.9 * lam + 0.1 * math.exp(-4 * i / mean_length)
            layer = next((k for k, gap in enumerate(of_example, 1) if gap > limit), len(of_example))
            left.append(layer)
            hits.append(are_right[layer - 1])
        return sum(left) / len(left), sum(hits) / len(hits)
