"""Judgements, against a softmax of one token at a time, and what is no prediction at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_head import VOCAB, D, Head, distribution, random
from scipy import stats
from torch import Tensor

from matlens import InputError, Readout
from matlens.lens import judgement
from matlens.lens.judgement import Judgement, as_substitute, judge_predictions, judge_scores

N = 23


def judged_one_by_one(head: Head, truth: Tensor, substitute: Tensor) -> tuple[list[int], list[float]]:
    """Ranks and surprisals, by a softmax of each example."""
    ranks, surprisals = [], []
    for final, h in zip(truth.tolist(), substitute.tolist(), strict=True):
        p, q = distribution(head, final), distribution(head, h)
        t = q.index(max(q))
        ranks.append(1 + sum(other > p[t] for other in p))
        surprisals.append(-math.log(p[t]))
    return ranks, surprisals


@pytest.mark.parametrize("rows", [1, 4, N, 1000])
def test_judge_is_a_softmax_of_the_truth_and_of_every_substitute(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judgement, "_ROWS", rows)
    head, truth = Head(), random(N, D, seed=1)
    given: dict[Any, Tensor] = {"near": truth + random(N, D, seed=2), (2, "far"): random(N, D, seed=3)}
    given["itself"] = truth
    judged = judge_predictions(
        head, truth, {key: as_substitute(h) for key, h in given.items()}, progress=False
    )  # type: ignore[arg-type]
    assert list(judged) == list(given)
    for key, h in given.items():
        ranks, surprisals = judged_one_by_one(head, truth, h)
        assert judged[key].rank.tolist() == ranks
        assert judged[key].surprisal.tolist() == pytest.approx(surprisals, rel=1e-5)
    assert set(judged["itself"].rank.tolist()) == {1}
    assert len(set(judged["near"].rank.tolist())) > 3, "the samples tell nothing apart"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_behind_all_tokens_and_harms_no_other(wrong: float) -> None:
    head, truth = Head(), random(N, D, seed=1)
    whole, broken = truth.clone(), truth.clone()
    broken[[0, 7], [1, 4]] = wrong
    broken[N - 1] = wrong
    lost = torch.zeros(N, dtype=torch.bool)
    lost[[0, 7, N - 1]] = True
    given = {"broken": as_substitute(broken), "whole": as_substitute(whole)}
    judged = judge_predictions(head, truth, given, progress=False)
    for part, of_lost in (("rank", VOCAB + 1), ("surprisal", math.inf)):
        ours, theirs = (getattr(judged[key], part) for key in ("broken", "whole"))
        assert torch.equal(ours[~lost], theirs[~lost])
        assert (ours[lost] == of_lost).all()


def test_a_read_out_of_a_model_judges_what_overflowed(small_model: Callable[[str], Any]) -> None:
    """Read-outs refuse vectors that are not finite; what stand-ins make of a sentence counts as wrong."""
    model = small_model("llama")
    truth = random(N, model.cfg.d_model, seed=1)
    broken = truth.clone()
    broken[3, 2] = math.inf
    judged = judge_predictions(Readout(model), truth, {"x": as_substitute(broken)}, progress=False)["x"]
    assert judged.rank.tolist() == [1] * 3 + [model.cfg.d_vocab + 1] + [1] * (N - 4)
    assert judged.surprisal.isinf().nonzero().tolist() == [[3]]


def test_a_truth_that_is_not_finite_is_refused() -> None:
    truth = random(N, D, seed=1)
    truth[3, 2] = math.inf
    with pytest.raises(InputError, match="vectors at the read-out are not finite"):
        judge_predictions(Head(), truth, {"x": as_substitute(truth)}, progress=False)


@pytest.mark.parametrize("progress", [True, False])
def test_the_bar_is_shown_as_asked(progress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = []

    def bar(parts: list[slice], **options: Any) -> list[slice]:
        hidden.append(options["disable"])
        return parts

    monkeypatch.setattr(judgement, "Bar", bar)
    truth = random(N, D, seed=1)
    judge_predictions(Head(), truth, {"x": as_substitute(truth)}, progress=progress)
    assert hidden == [not progress]


def test_estimates_are_means_with_their_intervals() -> None:
    judged = Judgement(torch.tensor([1, 4, 1, 8, 41]), torch.arange(5.0), torch.tensor([1.0, 2, 4, 8, 16]))
    estimates = judged.estimates()
    values = {key: estimate.value for key, estimate in estimates.items()}
    assert values == {
        ("precision", 1): 0.4, ("precision", 5): pytest.approx(0.6), ("precision", 10): pytest.approx(0.8),
        ("surprisal", None): 2.0, ("kl", None): pytest.approx(6.2),
    }  # fmt: skip
    assert 0 < estimates["precision", 1].low < 0.4 < estimates["precision", 1].high < 1


def test_differences_are_paired() -> None:
    base = torch.linspace(0, 50, 20)
    ours = Judgement(torch.ones(20, dtype=torch.long), base + 1 + 0.1 * torch.sin(base), base)
    theirs = Judgement(torch.tensor([1, 6] * 10), base, base)
    differences = ours.differences(theirs)
    expected = stats.ttest_rel(ours.surprisal.double(), theirs.surprisal.double()).confidence_interval()
    assert differences["surprisal", None].low == pytest.approx(expected.low)
    assert differences["surprisal", None].high == pytest.approx(expected.high)
    assert differences["surprisal", None].high < 1.2  # unpaired, an interval as wide as the spread
    assert differences["precision", 1].value == 0.5
    assert theirs.differences(ours)["precision", 1].value == -0.5
    assert differences["kl", None].value == 0
    with pytest.raises(InputError, match="same tokens"):
        ours.differences(Judgement(*(part[:3] for part in theirs)))


def test_scores_that_are_not_finite_count_as_wrong_with_an_infinite_divergence() -> None:
    head, truth = Head(), random(N, D, seed=1)
    scores = head.logits(random(N, D, seed=2))
    scores[4, 0], scores[9] = math.nan, math.inf
    judged = judge_scores(head, truth, {"x": lambda part: scores[part]}, progress=False)["x"]
    lost = torch.zeros(N, dtype=torch.bool)
    lost[[4, 9]] = True
    assert judged.divergence is not None
    assert torch.equal(judged.divergence.isinf(), lost)
    assert torch.equal(judged.surprisal.isinf(), lost)
    assert torch.equal(judged.rank > VOCAB, lost)
    estimates = judged.estimates()
    assert estimates["kl", None].value == math.inf
    assert math.isnan(estimates["kl", None].low)


def test_divergences_are_left_out_where_nobody_asks_for_them() -> None:
    head, truth = Head(), random(N, D, seed=1)
    judged = judge_predictions(head, truth, {"x": as_substitute(truth)}, progress=False)["x"]
    assert judged.divergence is None
    assert list(judged.estimates()) == [
        ("precision", 1),
        ("precision", 5),
        ("precision", 10),
        ("surprisal", None),
    ]


@pytest.mark.refused
def test_what_cannot_be_judged_is_refused() -> None:
    head, truth = Head(), random(N, D, seed=1)
    with pytest.raises(InputError, match="nothing to judge"):
        judge_scores(head, truth, {})
    with pytest.raises(InputError, match=f"{VOCAB} tokens"):
        judge_scores(head, truth, {"x": lambda part: torch.zeros(len(truth[part]), VOCAB - 1)})
