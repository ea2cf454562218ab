"""Tables of sinks: their norms, where they are, and r2 without them, against numpy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_tokenizer
from identities import make_identity
from sinks import fit_quality_without_sinks, later_sinks, sink_norms
from sklearn.metrics import r2_score

from matlens import LinearMap, MapSet
from matlens.activations.activations import Activations
from matlens.data.examples import Examples
from matlens.models.identity import Provenance

N, D = 60, 8
MODEL = make_identity("small", n_layers=2, d_model=D)
SINKS = torch.zeros(N, dtype=torch.bool)
SINKS[[0, 10, 20, 33]] = True  # three of the first tokens, and one that is the third of its sentence


@pytest.fixture
def samples():
    """Every fifth row is a first token; sinks are long at layer 1, along one coordinate."""
    generator = torch.Generator().manual_seed(0)
    vectors = {f"h.{layer}": torch.randn(N, D, generator=generator) for layer in range(3)}
    vectors["h.1"][SINKS, 2] += 400 * torch.arange(1, 5)
    vectors["h.2"][SINKS] *= 5
    vectors["ffn_out.1"] = torch.zeros(N, D)
    tokens = np.tile(np.arange(6, 12), N)
    places = np.where(np.arange(N) % 5 == 0, 0, 2)
    places[33] = 5
    examples = Examples(tokens, np.arange(N + 1) * 6, places)
    return Activations(vectors, examples, "sampled", Provenance(MODEL, {"corpus": "words"}))


def cell(table: pd.DataFrame, metric: str, method: str, layer: int) -> float:
    rows = table[(table["metric"] == metric) & (table["method"] == method) & (table["layer"] == layer)]
    return float(rows["value"].item())


def test_norms_and_the_largest_dimension(samples):
    table = sink_norms(samples, SINKS)
    sinks, first = SINKS.numpy(), np.arange(N) % 5 == 0
    groups = {"first tokens": first, "sinks": sinks, "others": ~first & ~sinks}
    for layer in range(3):
        h = samples[layer].double().numpy()
        for method, mask in groups.items():
            norms = sorted(np.sqrt((h[mask] ** 2).sum(1)))
            assert cell(table, "median_norm", method, layer) == pytest.approx(norms[(len(norms) - 1) // 2])
        for method, mask in (("all", sinks | True), ("not sinks", ~sinks)):
            variance = np.var(h[mask], axis=0)
            share = cell(table, "largest_dimension", method, layer)
            assert share == pytest.approx(variance.max() / variance.sum())
    assert cell(table, "largest_dimension", "all", 1) > 0.9 > cell(table, "largest_dimension", "all", 0)
    assert table.groupby("method")["n"].first().to_dict() == {
        "all": 60, "first tokens": 12, "not sinks": 56, "others": 47, "sinks": 4
    }  # fmt: skip
    assert set(table["layer"]) == {0, 1, 2}


def test_r2_without_first_tokens_and_without_sinks(samples):
    weight = torch.randn(D, D, generator=torch.Generator().manual_seed(3))
    maps = MapSet([LinearMap(weight, None, "h.0", "h.1")], provenance=Provenance(MODEL))
    table = fit_quality_without_sinks(maps, samples, SINKS)
    h, truth = samples[0].double().numpy(), samples[1].double().numpy()
    for examples, mask in (("not first tokens", samples.places > 0), ("not sinks", ~SINKS.numpy())):
        for method, mapped in (("mat", h @ weight.double().numpy().T), ("id", h)):
            row = table[(table["examples"] == examples) & (table["method"] == method)]
            assert row["value"].item() == pytest.approx(r2_score(truth[mask], mapped[mask]), abs=1e-4)
            assert row["n"].item() == mask.sum()
    assert set(table["experiment"]) == {"sinks_r2"}


def test_sinks_that_are_no_first_tokens_are_listed_with_their_text(samples):
    tokenizer = make_tokenizer()
    (row,) = later_sinks(samples, SINKS, tokenizer).to_dict("records")
    words = [tokenizer.convert_ids_to_tokens(token) for token in range(7, 12)]  # places 1 to 5
    assert (row["position"], row["token"], row["layer"]) == (5, words[-1], 1)
    assert row["text"] == "".join(words)
    norms = samples[1].norm(dim=1)
    assert (row["norm"], row["median_norm"]) == pytest.approx((norms[33].item(), norms.median().item()))
    none = torch.zeros(N, dtype=torch.bool)
    assert list(later_sinks(samples, none, tokenizer)) == list(row)
