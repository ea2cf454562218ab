"""How alike two matrices of a layer are, with what two halves of the data agree in as the ceiling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, checked
from matlens.io.tables import result_row, result_table
from matlens.lens.lens import Lens
from matlens.metrics import Estimate
from matlens.numerics.precision import in_float64


@checked
def matrix_cosine(first: Float[Tensor, "n d"], second: Float[Tensor, "n d"]) -> float:
    """Cosine of two matrices as long vectors; NaN where one is 0.

    Raises
    ------
    InputError
        They differ in shape.
    """
    if first.shape != second.shape:
        raise InputError(
            f"Matrices of the shapes {tuple(first.shape)} and {tuple(second.shape)} cannot be compared. "
            "Expected the same shape."
        )
    a, b = in_float64(first).flatten(), in_float64(second).flatten()
    return float((a @ b) / (a.norm() * b.norm()))


@checked
def cosine_table(
    lenses: Mapping[str, Lens], halves: Mapping[str, tuple[Lens, Lens]] | None = None
) -> pd.DataFrame:
    """Cosines of the lenses' matrices, layer by layer, and of two halves of each where these are given.

    A row of the method ``"mat and jacobian"`` is the cosine of their matrices; ``"halves of jacobian"``
    is that of two fits on half of the data each; and ``"ceiling of mat and jacobian"`` is the most that the
    first could be were both the same but for what such halves differ in: the geometric mean of both lenses'
    reliability, ``2 c / (1 + c)`` for a cosine ``c`` of halves (Spearman and Brown). Only lenses that map the
    stream as it is are comparable, those without a norm before.

    Parameters
    ----------
    lenses
        Lenses by name.
    halves
        Two fits of a lens on half of its data each, by its name.

    Raises
    ------
    InputError
        There are fewer than two lenses, or one maps standardised vectors; or they share no layer.
    """
    if len(lenses) < 2 or any(lens.norm is not None for lens in lenses.values()):
        raise InputError(
            "Expected two lenses or more that map the stream as it is: one with a norm before its maps has "
            "matrices of another unit."
        )
    first = next(iter(lenses.values()))
    identity, width = first.provenance.identity, first.provenance.identity.d_model
    for lens in lenses.values():
        first.provenance.check_same(lens.provenance.identity, ours="the first lens", theirs="another lens")
    halves = halves or {}
    rows: list[dict[str, Any]] = []

    def add(method: str, layer: int, value: float) -> None:
        estimate = Estimate(value, float("nan"), float("nan"), width * width)
        rows.append(
            result_row(
                "lens_cosine", model=identity.name, corpus=first.provenance.corpus, method=method,
                layer=layer, target=identity.n_layers, metric="cosine", estimate=estimate,
            )
        )  # fmt: skip

    shared = sorted(set.intersection(*(set(lens.layers) for lens in lenses.values())))
    if not shared:
        raise InputError("The lenses have no layer in common. Expected one or more.")
    names = list(lenses)
    for layer in shared:
        matrices = {name: lens.maps[layer].matrix(width) for name, lens in lenses.items()}
        reliability = {}
        for name, pair in halves.items():
            c = matrix_cosine(*(half.maps[layer].matrix(width) for half in pair))
            reliability[name] = 2 * c / (1 + c) if c > 0 else 0.0
            add(f"halves of {name}", layer, c)
        for i, name in enumerate(names):
            for other in names[i + 1 :]:
                add(f"{name} and {other}", layer, matrix_cosine(matrices[name], matrices[other]))
                if name in reliability and other in reliability:
                    ceiling = (reliability[name] * reliability[other]) ** 0.5
                    add(f"ceiling of {name} and {other}", layer, ceiling)
    return result_table(rows)
