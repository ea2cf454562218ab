"""Time of fitting all pairs relative to its matrix products, and to scikit-learn.

The floor is, for every pair, ``X^T Y`` over the samples and one ``d x d`` product that solves for the
map, in float64 on float64 samples. The papers' code fits pair by pair with scikit-learn's
``LinearRegression``; thirty pairs are timed and scaled. Targets: at most 1.2 times the floor, and at
least 12 times as fast as scikit-learn.
"""

from __future__ import annotations

import itertools
from typing import Annotated

import numpy as np
import torch
import typer
from ratios import Measured, Out, Rounds
from sklearn.linear_model import LinearRegression

from matlens.activations import Activations
from matlens.data import Examples
from matlens.linear import fit_samples
from matlens.models import Provenance

_TIMED = 30


def main(
    layers: Annotated[int, typer.Option(help="L; there are L(L+1)/2 pairs.")] = 30,
    width: Annotated[int, typer.Option(help="d_model.")] = 576,
    samples: Annotated[int, typer.Option(help="Sentences.")] = 4000,
    rounds: Rounds = 2,
    out: Out = None,
) -> None:
    """Measure the ratios for random samples of the shape of SmolLM2's."""
    torch.manual_seed(0)
    vectors = {f"h.{layer}": torch.randn(samples, width) for layer in range(layers + 1)}
    first = np.zeros(samples, dtype=int)
    examples = Examples(first, np.arange(samples + 1), first)  # of one token each
    collected = Activations(vectors, examples, "sampled", Provenance())
    pairs = list(itertools.combinations(vectors, 2))
    double = {site: values.double() for site, values in vectors.items()}
    inverse = torch.randn(width, width, dtype=torch.float64)

    def floor() -> None:
        for source, target in pairs:
            inverse @ (double[source].T @ double[target])

    def ours() -> None:
        for _ in fit_samples(collected, pairs):
            pass

    def scikit_learn() -> None:
        step = max(len(pairs) // _TIMED, 1)
        for source, target in pairs[::step][:_TIMED]:
            LinearRegression(fit_intercept=False).fit(double[source].numpy(), double[target].numpy())

    measured = Measured("fitting", out, pairs=len(pairs), samples=samples, width=width, rounds=rounds)
    measured.time({"floor": floor, "ours": ours, "scikit_learn": scikit_learn}, rounds)
    measured.best["scikit_learn"] *= len(pairs) / min(_TIMED, len(pairs))
    measured.add_times()
    measured.ratio("fitting all pairs / its products", "ours", "floor", max=1.2)
    measured.ratio("scikit-learn pair by pair / fitting", "scikit_learn", "ours", min=12)
    # The limit: fitting that does nothing but its products.
    measured.ratio("scikit-learn pair by pair / the products", "scikit_learn", "floor")
    measured.write()


if __name__ == "__main__":
    typer.run(main)
