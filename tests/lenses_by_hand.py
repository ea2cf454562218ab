"""What Hugging Face in float64 says of a llama's stream, and lenses of an analysis by their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from conftest import D_MODEL, WORDS
from torch import Tensor

from matlens import Lens

Mapped = Callable[[Tensor], Tensor]


def load_in_float64(folder: Path) -> Any:
    """The plain model."""
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(folder).eval().double()


def tokens_of(corpus: Any) -> list[list[int]]:
    return [[WORDS.index(word) + 2 for word in text.split()] for text in corpus.sentences]


def stream(plain: Any, texts: list[list[int]]) -> list[list[Tensor]]:
    """The stream at every layer of each text; the last before the norm."""
    layers: list[list[Tensor]] = []
    for ids in texts:
        seen: list[Tensor] = []
        handle = plain.model.norm.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0][0]))
        with torch.no_grad():
            hidden = plain(torch.tensor([ids]), output_hidden_states=True).hidden_states
        handle.remove()
        layers.append([*(each[0] for each in hidden[:-1]), seen[0]])
    return layers


def saved_lens(out: Path, analysis: str, name: str, layer: int) -> tuple[Mapped, Tensor, float]:
    """What a lens of a run makes of vectors, its matrix, and the factor on its logits."""
    (folder,) = out.glob(f"studies/*/{analysis}/lens-{name}")
    lens = Lens.load(folder)
    linear, norm = lens.maps[layer], lens.norm
    assert linear is not None
    weight, bias = linear.weight.double(), torch.zeros(D_MODEL) if linear.bias is None else linear.bias

    def mapped(h: Tensor) -> Tensor:
        h = h if norm is None else h / (h.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        return h @ weight.T + bias.double()

    return mapped, weight, lens.scales.get(layer, 1.0)


def closed_forms(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The solutions of least squares, without and with an intercept as the last row."""
    ones = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    return torch.linalg.lstsq(x, y).solution, torch.linalg.lstsq(ones, y).solution


def value(rows: pd.DataFrame, missing: dict[str, Any], **cells: Any) -> float:
    """The only value of rows with some cells; cells that are not given are missing."""
    rows, cells = rows.fillna(missing), missing | cells
    (found,) = rows[(rows[list(cells)] == pd.Series(cells)).all(axis=1)]["value"]
    return float(found)
