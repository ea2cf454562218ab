"""Metrics against scikit-learn, scipy and the formulas written out."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from sklearn.metrics import r2_score
from torch import Tensor

from matlens.errors import InputError
from matlens.metrics import difference, mean, proportion, r2, rank, share, surprisal


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# r2


NUMBERS = st.floats(-50, 50, width=32)


@given(st.integers(2, 6).flatmap(lambda n: st.tuples(*[arrays(np.float32, (n, 3), elements=NUMBERS)] * 2)))
def test_r2_is_sklearns_for_any_numbers(samples):
    # On a grid, so that a coordinate is constant or clearly not, in their arithmetic as in ours.
    truth, prediction = (np.round(part * 8) / 8 for part in samples)
    expected = r2_score(truth.astype(np.float64), prediction.astype(np.float64))
    assert r2(torch.from_numpy(prediction), torch.from_numpy(truth)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("value", "n"), [(0.0, 2), (0.1, 3000), (-3e4, 7)])
@pytest.mark.parametrize(("shift", "counts"), [(0.0, 1.0), (0.5, 0.0)])
def test_a_constant_dimension_counts_one_if_met_exactly_and_nothing_if_not(value, n, shift, counts):
    truth = torch.cat([torch.full((n, 1), value), random(n, 1)], 1)
    prediction = truth + torch.tensor([shift, 0.0])
    assert r2(prediction, truth) == (counts + 1) / 2
    assert r2(prediction, truth) == r2_score(truth.double().numpy(), prediction.double().numpy())


def test_r2_is_computed_in_float64():
    # In float32 neither the mean nor the deviations of these would have a digit left.
    truth = random(500, 1).double() * 1e-3 + 4e3
    prediction = truth + 5e-4 * random(500, 1, seed=1).double()
    assert r2(prediction, truth) == pytest.approx(r2_score(truth.numpy(), prediction.numpy()), abs=1e-9)
    half = random(3000, 2).half() + 100
    assert r2(half + 0.5, half) == pytest.approx(
        r2_score(half.double().numpy(), half.double().numpy() + 0.5), abs=1e-9
    )


@pytest.mark.parametrize("n", [0, 1])
def test_r2_of_fewer_than_two_examples_is_refused(n):
    with pytest.raises(InputError, match=f"at least two examples, got {n}"):
        r2(random(n, 3), random(n, 3))


# Rank and surprisal


@given(
    arrays(np.float64, (4, 6), elements=st.integers(-3, 3)),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_rank_counts_the_more_probable_and_lets_ties_share(scores, tokens):
    found = rank(torch.from_numpy(scores), torch.tensor(tokens))
    pairs = zip(scores.tolist(), tokens, strict=True)
    expected = [1 + sum(other > row[token] for other in row) for row, token in pairs]
    assert found.tolist() == expected


def test_a_row_with_nan_and_tokens_of_no_vocabulary_have_no_rank():
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, torch.nan, 2.0]])
    for rows, tokens in ((scores, [0, 1]), (scores[:1], [3]), (scores[:1], [-1])):
        with pytest.raises(InputError):
            rank(rows, torch.tensor(tokens))


def test_surprisal_is_minus_the_logarithm_of_the_probability():
    logits, tokens = random(6, 9).double(), torch.tensor([0, 8, 3, 3, 5, 1])
    found = surprisal(logits.log_softmax(1), tokens)
    for row, token, value in zip(logits.tolist(), tokens.tolist(), found.tolist(), strict=True):
        p = math.exp(row[token]) / sum(math.exp(score) for score in row)
        assert value == pytest.approx(-math.log(p), rel=1e-12)
    assert surprisal(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([1])).item() == pytest.approx(math.log(2))


# How sure we are


@pytest.mark.parametrize(
    ("count", "n"), [(0, 1), (1, 1), (0, 40), (40, 40), (7, 40), (2999, 3000), (1, 3000)]
)
def test_proportion_has_wilsons_interval(count, n):
    hits = torch.arange(n) < count
    found = proportion(hits)
    p, z = count / n, 1.959963984540054
    center = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert found.value == p
    assert found.n == n
    assert found.low == pytest.approx(center - half, abs=1e-12)
    assert found.high == pytest.approx(center + half, abs=1e-12)
    assert 0 <= found.low <= p <= found.high <= 1
    assert proportion(hits.flip(0)) == found


def wilson(p: float, n: float) -> tuple[float, float]:
    """The roots ``q`` of ``(p - q)^2 = z^2 q (1 - q) / n``."""
    z2 = 1.959963984540054**2
    roots = np.roots([1 + z2 / n, -(2 * p + z2 / n), p * p])
    return float(min(roots.real)), float(max(roots.real))


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("hits", [0, 1, 7, 20])
def test_entries_that_are_alike_count_once_and_independent_ones_each(hits, samples):
    one = torch.arange(20) < hits
    alike = share(one.double(), n_entries=20 * samples)
    assert tuple(alike) == pytest.approx(tuple(proportion(one)))
    even = share(torch.full((50,), 0.25), n_entries=200)  # as even as can be
    assert tuple(even) == pytest.approx((0.25, *wilson(0.25, 200), 50))
    assert tuple(share(torch.full((50,), 0.25))) == pytest.approx((0.25, *wilson(0.25, 50), 50))


def test_shares_of_correlated_entries_have_an_effective_sample_size():
    shares = torch.tensor([0.0, 0.5, 0.5, 1.0, 0.75, 0.25])
    p, between = 0.5, float(np.var(shares.numpy()))
    found = share(shares, n_entries=24)
    assert tuple(found) == pytest.approx((p, *wilson(p, p * (1 - p) * 6 / between), 6))
    assert share(shares).low < found.low
    for wrong in ([-0.1, 0.5], [1.5], [math.nan]):
        with pytest.raises(InputError, match="between 0 and 1"):
            share(torch.tensor(wrong))


@pytest.mark.parametrize(("better", "worse", "n"), [(0, 0, 40), (3, 0, 40), (7, 12, 1000), (40, 0, 40)])
def test_paired_differences_of_shares_have_the_interval_of_agresti_and_min(better, worse, n):
    ours, theirs = (torch.zeros(n) for _ in range(2))
    ours[:better], theirs[better : better + worse] = 1, 1
    found = difference(ours, theirs)
    b, c, total = better + 0.5, worse + 0.5, n + 2
    center, spread = (b - c) / total, math.sqrt(b + c - (b - c) ** 2 / total) / total
    low, high = (center + side * 1.959963984540054 * spread for side in (-1, 1))
    expected = ((better - worse) / n, max(low, -1.0), min(high, 1.0), n)
    assert tuple(found) == pytest.approx(expected, rel=1e-9)
    assert found.low < found.value <= found.high
    assert tuple(difference(theirs, ours))[:3] == pytest.approx(
        [-x for x in (found.value, found.high, found.low)]
    )


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=30))
def test_mean_has_students_interval(values):
    found = mean(torch.tensor(values))
    sample = np.asarray(values, dtype=np.float64)
    n, center, spread = len(sample), sample.mean(), sample.std(ddof=1)
    size = np.abs(sample).max() + 1e-30
    assert found.value == pytest.approx(center, rel=1e-12, abs=1e-12 * size)
    assert found.n == n
    if spread < 1e-9 * size:
        assert found.high - found.low <= 1e-7 * size
        return
    low, high = stats.t.interval(0.95, n - 1, loc=center, scale=spread / math.sqrt(n))
    assert found.low == pytest.approx(low, rel=1e-9, abs=1e-9 * size)
    assert found.high == pytest.approx(high, rel=1e-9, abs=1e-9 * size)


@pytest.mark.parametrize("values", [[3.5], [math.inf, 2.0, math.inf, -3.0]])
def test_one_example_and_an_infinite_mean_have_no_interval(values):
    found = mean(torch.tensor(values))
    assert (found.value, found.n) == (values[0], len(values))
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_a_mean_is_computed_in_float64_and_needs_an_example():
    assert mean(torch.full((4096,), 2.5, dtype=torch.float16)) == (2.5, 2.5, 2.5, 4096)
    assert mean(torch.tensor([1e8, 1.0, -1e8])).value == pytest.approx(1 / 3)
    for empty in (lambda: mean(torch.zeros(0)), lambda: proportion(torch.zeros(0, dtype=torch.bool))):
        with pytest.raises(InputError, match="at least one example"):
            empty()
