"""Every fit without a ridge warns once a call where it has fewer than two samples per dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from identities import make_activations, make_identity

import matlens
from matlens.linear.fitting import fit_samples, fit_stream
from matlens.linear.mapsets import MapSet
from matlens.models.identity import Provenance

D = 12
PAIRS = [("h.0", "h.1"), ("h.0", "h.2"), ("h.1", "h.2")]


def collected(n: int) -> Any:
    vectors = {f"h.{layer}": torch.randn(n, D) for layer in range(3)}
    return make_activations(vectors, Provenance(make_identity(n_layers=2)))


FITS: dict[str, Callable[..., Any]] = {
    "MapSet.fit": lambda samples, **how: MapSet.fit(samples, pairs=PAIRS, progress=False, **how),
    "samples": lambda samples, **how: list(fit_samples(samples, PAIRS, **how)),
    "stream": lambda samples, **how: list(fit_stream([dict(samples)], PAIRS, **how)),
}


@pytest.mark.filterwarnings("error::matlens.InputWarning")
@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_a_fit_warns_once_where_samples_are_too_few(fit):
    with pytest.warns(matlens.InputWarning, match=rf"{2 * D - 1}.*ridge") as caught:
        fit(collected(2 * D - 1))
    assert len(caught) == 1
    assert caught[0].filename == __file__  # where the user's own code is
    fit(collected(2 * D))
    fit(collected(D - 2), ridge=1.0)
    with pytest.warns(matlens.InputWarning):
        fit(collected(2 * D), rows=torch.arange(2 * D) > 0)
