"""The dominant sub-updates of every feed-forward layer at every token of a prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from matlens.errors import InputError, check_int, checked
from matlens.ffn.projection import Projection
from matlens.ffn.updates import DOMINANT, Updates
from matlens.parallel import Bar
from matlens.plots.page_trajectory import UpdateCells


@checked
@torch.inference_mode()
def dominant_cells(
    updates: Updates,
    projection: Projection,
    followed: Int[Tensor, " followed"],
    *,
    k: int = DOMINANT,
    n_promoted: int = 5,
    proceed: Callable[[], None] | None = None,
    progress: bool = True,
) -> UpdateCells:
    """Take the updates of all layers apart, and sum up what each part does to the followed tokens.

    Parameters
    ----------
    updates
        What the FFNs of all layers write at the tokens of a prompt.
    projection
        How vectors are read. It has to be linear: effects of parts add up to that of the whole.
    followed
        Tokens whose scores are followed.
    k
        How many sub-updates of each FFN and token are kept.
    n_promoted
        How many tokens that each promotes.
    proceed
        Called before each layer; what it raises ends the work.
    progress
        Whether to show a bar over the layers.

    Raises
    ------
    InputError
        The projection is not linear, updates of a layer are missing, or ``k`` or ``n_promoted`` is less than
        1 or more than there are.
    """
    values, n_layers = updates.values, updates.values.n_layers
    projection.check_same(values.identity)
    check_int(k, "k", min=1, max=values.d_mlp)
    check_int(n_promoted, "n_promoted", min=1, max=len(projection.unembedding))
    d_vocab = len(projection.unembedding)
    if len(followed) and not 0 <= int(followed.min()) <= int(followed.max()) < d_vocab:
        raise InputError(f"The followed tokens are not all in the vocabulary, which has 0 to {d_vocab - 1}.")
    if updates.layers != list(range(n_layers)):
        raise InputError("Updates of all layers are needed: Updates.run(model, examples) collects them.")
    words = Projection(projection.unembedding[followed], projection.tokenizer, projection.norm)
    check_linear(words)
    parts: dict[str, list[np.ndarray]] = {}
    n_ways = 0
    for layer in Bar(range(n_layers), desc="sub-updates", unit="layer", disable=not progress):
        if proceed is not None:
            proceed()
        vectors, m, scale = values.layer(layer), updates.coefficients(layer), updates.scales(layer)
        index = updates.dominant(layer, k)
        coefficient = m.gather(1, index)
        code, way = torch.unique(2 * index + (coefficient < 0), return_inverse=True)
        sign = 1 - 2 * (code % 2)
        pointing = sign[:, None] * vectors[code // 2]
        of_layer = {
            "way": way + n_ways,
            "coefficient": coefficient,
            "share": updates.shares(layer).gather(1, index),
            "scale": scale,
            "rest": scale[:, None] * (m.scatter(1, index, 0) @ words.scores(vectors).to(m.device)),
            "bias": words.scores(values.bias(layer)),
            "layer": torch.full_like(code, layer),
            "index": code // 2,
            "negative": code % 2,
            "promoted": projection.top(pointing, n_promoted).ids,
            "static": words.scores(pointing),
        }
        n_ways += len(code)
        for name, numbers in of_layer.items():
            parts.setdefault(name, []).append(numbers.cpu().numpy())
    by_cell = {
        name: np.stack(parts.pop(name)) for name in ("way", "coefficient", "share", "scale", "rest", "bias")
    }
    return UpdateCells(
        **by_cell, **{name: np.concatenate(p) for name, p in parts.items()}, d_mlp=values.d_mlp
    )


def check_linear(projection: Projection) -> None:
    """Refuse a projection through the whole final norm, after which parts do not add up.

    Raises
    ------
    InputError
        It is one.
    """
    probe = torch.linspace(-1, 2, projection.unembedding.shape[1])
    once, twice = projection.scores(probe), projection.scores(2 * probe)
    if not torch.allclose(2 * once, twice, rtol=1e-4, atol=1e-4 * float(once.abs().max())):
        raise InputError(
            "Read through the final norm, the effects of sub-updates do not add up. Expected "
            "Projection.from_model or Projection.through_head ('plain' or 'head')."
        )
