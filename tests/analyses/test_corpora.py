"""Maps of several fits are least squares on what each was fitted on, judged on what each is tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import N_LAYERS
from judged_by_hand import assert_judged, judged_by_hand
from paper_a import fit_equally_many, transfer_losses, transfer_means, transfer_quality
from plain_streams import corpus, mapped, plain_stream
from sklearn.metrics import r2_score

from matlens import Readout, collect, make_examples

Models = Callable[[str], Any]


def test_maps_of_each_corpus_are_fitted_on_as_many_and_tested_on_each(
    small_model: Models, plain_model: Models
) -> None:
    model, plain, n = small_model("llama"), plain_model("llama"), {"news": 70, "wiki": 90}
    parts = {
        name: (corpus(name, size, seed), corpus(name, 20 + seed, seed + 10))
        for seed, (name, size) in enumerate(n.items())
    }
    examples = {name: tuple(make_examples(model, part) for part in both) for name, both in parts.items()}
    train = {name: collect(model, both[0], progress=False) for name, both in examples.items()}
    tested = {name: collect(model, both[1], progress=False) for name, both in examples.items()}
    maps = fit_equally_many(train)
    table = transfer_quality(Readout(model), maps, tested)
    streams = {name: [plain_stream("llama", plain, part) for part in both] for name, both in examples.items()}
    first: dict[tuple[str, str], list[float]] = {}
    for here, (_, test) in streams.items():
        substitutes = {}
        for there, (fitted, _) in streams.items():
            assert maps[there].provenance.data is not None
            equal = [h[:70] for h in fitted]
            for layer in range(N_LAYERS):
                substitutes[f"mat of {there}", layer] = mapped(equal, test, layer)
        judged = judged_by_hand(plain, test[-1], substitutes)
        of_corpus = table[table["corpus"] == here]
        assert_judged(of_corpus[of_corpus["metric"] != "r2"], judged)
        assert len(of_corpus) == 5 * len(judged)
        for row in of_corpus[of_corpus["metric"] == "r2"].itertuples():
            h = substitutes[row.method, row.layer]
            assert row.value == pytest.approx(r2_score(test[-1].numpy(), h.numpy()), abs=1e-4)
        for there in streams:
            first[here, there] = [judged[f"mat of {there}", layer][0] for layer in range(N_LAYERS)]
    assert set(table["experiment"]) == {"paper_a_sec5_corpora"}
    means = transfer_means(table)
    assert list(means.columns) == list(table.columns)
    assert len(means) == 4 * 5
    for row in means.itertuples():
        same = (table["corpus"] == row.corpus) & (table["method"] == row.method)
        same &= (table["metric"] == row.metric) & (
            table["k"].isna() if row.k is pd.NA else table["k"] == row.k
        )
        assert row.value == pytest.approx(np.mean(table[same]["value"]))
        assert row.n == len(tested[row.corpus].examples)
        assert pd.isna(row.layer)
    losses = transfer_losses(table).set_index(["corpus", "method"])
    assert len(losses) == 4
    for (here, there), shares in first.items():
        row, same = losses.loc[(here, f"mat of {there}")], first[here, here]
        assert row["precision"] == pytest.approx(np.mean(shares))
        assert row["difference"] == pytest.approx(np.mean(shares) - np.mean(same))
        relative = [(a - b) / b for a, b in zip(shares, same, strict=True)]
        assert row["relative"] == pytest.approx(np.mean(relative))


def test_at_all_positions_as_many_tokens_of_each_corpus_count(
    small_model: Models, plain_model: Models
) -> None:
    model, plain = small_model("llama"), plain_model("llama")
    examples = {name: make_examples(model, corpus(name, n, n)) for name, n in (("long", 40), ("short", 12))}
    collected = {
        name: collect(model, part, positions="all", progress=False) for name, part in examples.items()
    }
    equal = len(examples["short"].tokens)
    assert 40 < equal < len(examples["long"].tokens)
    maps = fit_equally_many(collected, every=2)
    for name, part in examples.items():
        assert list(maps[name]) == [("h.0", "h.3"), ("h.2", "h.3")]
        assert maps[name].provenance.to_json()["n_fitted"] == equal
        stream = [h[:equal] for h in plain_stream("llama", plain, part, "all")]
        for layer in (0, 2):
            weight = torch.linalg.lstsq(stream[layer], stream[-1], driver="gelsd").solution.T
            assert torch.allclose(maps[name][layer, 3].weight.double(), weight, rtol=1e-3, atol=1e-3)


def test_what_is_lost_can_be_followed_by_eye() -> None:
    """Surprisal and the other k say nothing here; a gain is positive."""
    rows = [("a", "mat of a", layer, "precision", 1, value) for layer, value in ((0, 0.5), (1, 1.0))] + [
        ("a", "mat of b", layer, "precision", 1, value) for layer, value in ((0, 0.6), (1, 0.5))
    ]
    rows += [(*row[:4], 5, 0.9) for row in rows] + [(*row[:3], "surprisal", np.nan, 3.0) for row in rows]
    table = pd.DataFrame(rows, columns=["corpus", "method", "layer", "metric", "k", "value"])
    losses = transfer_losses(table).set_index("method")
    assert losses["precision"].to_dict() == pytest.approx({"mat of a": 0.75, "mat of b": 0.55})
    assert losses["difference"].to_dict() == pytest.approx({"mat of a": 0, "mat of b": -0.2})
    assert losses["relative"].to_dict() == pytest.approx({"mat of a": 0, "mat of b": (0.2 - 0.5) / 2})
