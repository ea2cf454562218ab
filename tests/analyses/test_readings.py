"""All readings of the exit rule, each example tested once, against a loop over the parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from exits.comparison import compare_readings
from exits.outcomes import evaluate_exits
from rule_by_hand import layer_left
from traces import make_clusters, make_trace

from matlens.ffn.rule import active_clusters


def test_every_reading_tests_every_example_once():
    """Candidates that agree with the final token from a layer on that the clusters tell, at 1 of 3 layers."""
    generator, n, n_layers = np.random.default_rng(0), 60, 3
    made = generator.integers(0, n_layers, n)
    after = torch.from_numpy(
        np.where(np.arange(n_layers) >= made[:, None], 7, generator.integers(0, 7, (n, 3)))
    )
    by_ffn = np.arange(n) % 3 > 0  # of the others attention has brought the token up
    before = torch.from_numpy(np.where(np.arange(n_layers) >= made[:, None] + by_ffn[:, None], 7, 8))
    trace = make_trace(before, after, torch.zeros(n, n_layers), k=2)
    index = generator.integers(0, 4, (n, n_layers, 2))
    index[np.arange(n), made, 0] = 5
    trace.index["dominant"] = torch.from_numpy(index)
    identity = trace.provenance.identity
    vectors, pairs = (make_clusters(np.arange(18) // size, identity) for size in (1, 2))
    table = compare_readings(trace, [vectors, pairs], seed=3)
    reading = ["clusters", "overlap", "others", "events"]
    assert len(table.drop_duplicates(reading)) == len(table) == 2 * 2 * 3 * 2
    assert set(table["n"]) == {n}
    parts = np.array_split(np.random.default_rng(3).permutation(n), 10)
    right = (after == 7).numpy()
    for row in table.to_dict("records"):
        active = active_clusters(trace, vectors if row["clusters"] == 18 else pairs)
        made_at = made if row["events"] == "FFN and attention" else np.where(by_ffn, made, -1)
        hits, chances, variances, saved, left = 0, 0.0, 0.0, 0, 0
        for part in parts:
            rest = [i for i in range(n) if i not in part]
            known = [active[i].tolist() for i in rest]
            leaves = [
                layer_left(active[i].tolist(), known, made_at[rest].tolist(), row["others"], row["overlap"])
                for i in part
            ]
            evaluated = evaluate_exits(np.array(leaves), right[part])
            hits += sum(right[i, layer] for i, layer in zip(part, leaves, strict=True))
            saved += sum((2 - layer) * right[i, layer] for i, layer in zip(part, leaves, strict=True))
            left += sum(layer < 2 for layer in leaves)
            chances += len(part) * evaluated.chance
            variances += (len(part) * evaluated.chance_sd) ** 2
        assert row["accuracy"] == pytest.approx(hits / n)
        assert (row["exited"], row["saved"]) == pytest.approx((left / n, saved / hits))
        assert (row["chance"], row["chance_sd"]) == pytest.approx((chances / n, variances**0.5 / n))
        assert row["above"] == pytest.approx((hits - chances) / n)
        z = abs(row["above"]) / row["chance_sd"] if row["chance_sd"] else 0
        assert row["p"] == pytest.approx(math.erfc(z / 2**0.5))
    published = table[(table["others"] == "later") & (table["overlap"] == "sets")].iloc[0]
    assert published["exited"] > 0.3
    assert published["p"] < 1e-3
