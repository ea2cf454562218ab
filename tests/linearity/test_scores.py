"""Scores of moments are those of the vectors themselves, by NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from scipy.spatial import procrustes
from sklearn.metrics import r2_score

from matlens import InputError
from matlens.linear.least_squares import LeastSquares
from matlens.linearity.parts import Part
from matlens.linearity.scores import PartSums, fit_scores, held_out_scores
from matlens.models.identity import Provenance

N, WIDTH = 300, 6


def samples(*, standardised: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """A part that is neither linear nor far from it, with one coordinate far larger than the others."""
    generator = np.random.default_rng(2)
    x = generator.normal(size=(N, WIDTH)) * np.array([9, 3, 1, 1, 0.1, 1]) + 2
    y = np.tanh(x @ generator.normal(size=(WIDTH, WIDTH)) / 5) + generator.normal(size=(N, WIDTH)) / 3 - x / 9
    if standardised:  # as LayerNorm leaves vectors: their coordinates add up to 0
        x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    return x, y


def by_hand(x: np.ndarray, y: np.ndarray, *, added: bool) -> dict[str, float]:
    a, b = (of_side - of_side.mean(0) for of_side in (x, y))
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    error = np.square(b - a @ np.linalg.lstsq(a, b, rcond=None)[0]).sum()
    beside = (x + y if added else y) - (x + y if added else y).mean(0)
    u, s, _ = np.linalg.svd(a, full_matrices=False)
    v, t, _ = np.linalg.svd(beside, full_matrices=False)
    angles = subspace_angles(u[:, s > 1e-9 * s[0]], v[:, t > 1e-9 * t[0]])
    scores = 1 - error, 1 - procrustes(x, y)[2], np.square(np.sin(angles)).sum()
    return dict(zip(("procrustes", "rotation", "nbl bound"), scores, strict=True))


def from_moments(x: np.ndarray, y: np.ndarray, *, added: bool) -> dict[str, float]:
    a, b = torch.from_numpy(x), torch.from_numpy(y)
    moments = LeastSquares(WIDTH, WIDTH)
    for part in (slice(0, 90), slice(90, N)):
        moments.update(a[part], b[part])
    beside = a + b if added else b
    r_y, _ = LeastSquares(WIDTH, 1).update(beside, beside[:, :1]).factors(centred=True)
    return fit_scores(*moments.factors(centred=True), r_y, added=added)


@pytest.mark.parametrize("standardised", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_scores_are_those_of_the_vectors(added, standardised):
    x, y = samples(standardised=standardised)
    ours, expected = from_moments(x, y, added=added), by_hand(x, y, added=added)
    assert ours == pytest.approx(expected, rel=1e-7)
    assert 0.05 < ours["procrustes"] < 0.99
    assert 0.1 < ours["nbl bound"] < WIDTH - 0.1


def test_a_linear_part_is_all_linear():
    x, _ = samples()
    ours = from_moments(x, x @ np.triu(np.ones((WIDTH, WIDTH))) + 3, added=False)
    assert ours["procrustes"] == pytest.approx(1)
    assert ours["nbl bound"] == pytest.approx(0, abs=1e-8)
    turned = x[:, ::-1].copy() * 2 - 1
    assert from_moments(x, turned, added=False)["rotation"] == pytest.approx(1)


def test_scores_on_other_text_are_those_of_sklearn():
    x, y = samples()
    predicted = y + 0.1 * x
    ours = held_out_scores(torch.from_numpy(predicted), torch.from_numpy(y))
    assert ours["r2"] == pytest.approx(r2_score(y, predicted))
    assert ours["r2 of the variance"] == pytest.approx(
        r2_score(y, predicted, multioutput="variance_weighted")
    )


def test_maps_are_of_all_samples_and_of_those_that_are_no_sinks():
    x, y = samples()
    sinks = np.arange(N) % 7 == 0
    y[sinks] *= 50
    parts = [Part("ffn", 0, "ffn_in.0", "ffn_out.0"), Part("block", 0, "h.0", "h.1")]
    after = np.cos(x) + y
    sites = {"ffn_in.0": x, "ffn_out.0": y, "h.0": x, "h.1": after}
    vectors = {site: torch.from_numpy(of_site).float() for site, of_site in sites.items()}
    sums = PartSums(parts, WIDTH)
    for part in (slice(0, 100), slice(100, N)):
        of_part = {site: of_site[part] for site, of_site in vectors.items()}
        sums.update(of_part, torch.from_numpy(sinks[part]))
    solved = {(part.kind, mode): rest for part, mode, *rest in sums.solve(Provenance())}
    assert len(solved) == 4
    for (kind, with_sinks), (linear, scores) in solved.items():
        rows = slice(None) if with_sinks else ~sinks
        ends = ("ffn_in.0", "ffn_out.0") if kind == "ffn" else ("h.0", "h.1")
        source, target = (vectors[site].double().numpy()[rows] for site in ends)
        ones = np.hstack([source, np.ones((len(source), 1))])
        expected = np.linalg.lstsq(ones, target, rcond=None)[0]
        np.testing.assert_allclose(linear.weight.numpy().T, expected[:-1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(linear.bias.numpy(), expected[-1], rtol=1e-4, atol=1e-4)
        assert scores == pytest.approx(by_hand(source, target, added=kind == "ffn"), rel=1e-5)
        assert linear.provenance.n_samples == len(source)


def test_too_few_samples_are_refused():
    sums = PartSums([Part("block", 0, "h.0", "h.1")], WIDTH)
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    sums.update({"h.0": x, "h.1": x}, torch.zeros(WIDTH, dtype=torch.bool))
    with pytest.raises(InputError, match="more than 6 tokens without sinks"):
        list(sums.solve(Provenance()))
