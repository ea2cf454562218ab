"""The stream of the plain model on small corpora, and least squares on it, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from conftest import N_LAYERS, WORDS, plain_vectors
from torch import Tensor

from matlens.data.corpus import Corpus
from matlens.data.examples import Examples


def corpus(name: str, n: int, seed: int) -> Corpus:
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, int(rng.integers(4, 9)))) for _ in range(n)]
    return Corpus(name, tuple(texts), n, 0, 0, 0)


def plain_stream(name: str, plain: Any, examples: Examples, positions: str = "sampled") -> list[Tensor]:
    """The stream layer by layer, in float64, sentence by sentence."""
    layers: list[list[Tensor]] = [[] for _ in range(N_LAYERS + 1)]
    ends = zip(examples.offsets[:-1], examples.offsets[1:], examples.positions, strict=True)
    for start, end, position in ends:
        seen = plain_vectors(name, plain, torch.from_numpy(examples.tokens[start:end]))
        chosen = [position] if positions == "sampled" else list(range(end - start))
        for layer, rows in enumerate(layers):
            rows.append(seen[f"h.{layer}"][0, chosen].double())
    return [torch.cat(rows) for rows in layers]


def mapped(train: list[Tensor], test: list[Tensor], layer: int) -> Tensor:
    return test[layer] @ torch.linalg.lstsq(train[layer], train[-1], driver="gelsd").solution
