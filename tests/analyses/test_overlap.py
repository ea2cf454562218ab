"""The overlap of lists and its tables are those counted from the plain model's lists (Figure 4)."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import N_LAYERS
from paper_b_fig4_overlap import norm_overlap
from plain_values import D_MLP, plain_norm, plain_unembedding, plain_values
from scipy import stats

from matlens.ffn.values import ValueVectors

K = 7


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_overlap_is_that_of_the_plain_models_lists(name, small_model, plain_model):
    model, plain = small_model(name), plain_model(name)
    table = norm_overlap(model, n_random=20, k=K, seed=2)
    counts = table.dropna(subset="layer").groupby("method")["n"].unique().explode().to_dict()
    assert counts == {"values": D_MLP[name], "random": 20, "difference": D_MLP[name] + 20}
    drawn = [ValueVectors(model).random(layer, 20, seed=2) for layer in range(N_LAYERS)]
    real = [plain_values(name, plain, layer) for layer in range(N_LAYERS)]
    e = plain_unembedding(plain)
    overlaps: dict[tuple[str, int], np.ndarray] = {}
    for method, vectors in (("values", real), ("random", drawn)):
        for layer, of_layer in enumerate(vectors):
            first = (of_layer @ e.T).topk(K).indices.tolist()
            second = (plain_norm(name, plain, of_layer) @ e.T).topk(K).indices.tolist()
            each = [len({*a} & {*b}) / len({*a} | {*b}) for a, b in zip(first, second, strict=True)]
            overlaps[method, layer] = np.array(each)
            (row,) = table[(table["method"] == method) & (table["layer"] == layer)].itertuples()
            assert row.value == pytest.approx(sum(each) / len(each))
            assert row.low <= row.value <= row.high
    by_cell = table.set_index(["method", "metric", "layer"]).sort_index()
    for layer in range(N_LAYERS):
        ours, theirs = overlaps["values", layer], overlaps["random", layer]
        row = by_cell.loc[("difference", "iou", layer)]
        assert row["value"] == pytest.approx(ours.mean() - theirs.mean(), abs=1e-6)
        sizes = np.array([len(ours), len(theirs)])
        parts = np.array([ours.var(ddof=1), theirs.var(ddof=1)]) / sizes  # as Welch has it
        half = 0.0
        if parts.sum() > 0:
            freedom = parts.sum() ** 2 / (parts**2 / (sizes - 1)).sum()
            half = stats.t.ppf(0.975, freedom) * parts.sum() ** 0.5
        expected = (row["value"] - half, row["value"] + half)
        assert (row["low"], row["high"]) == pytest.approx(expected, abs=1e-5)
        pairs = np.sign(np.subtract.outer(ours, theirs))
        above = by_cell.loc[("difference", "above", layer), "value"]
        assert above == pytest.approx((pairs + 1).mean() / 2)
        assert (by_cell.loc[("difference", "p", layer), "value"] < 0.05) == (
            stats.mannwhitneyu(ours, theirs).pvalue < 0.05
        )
    overall = table[table["layer"].isna()].set_index(["method", "metric"])["value"]
    means = {
        method: [overlaps[method, layer].mean() for layer in range(N_LAYERS)]
        for method in ("values", "random")
    }
    for method, of_layers in means.items():
        assert overall[method, "iou"] == pytest.approx(np.mean(of_layers), abs=1e-6)
    assert overall["difference", "p"] == pytest.approx(stats.wilcoxon(*means.values()).pvalue)
