"""Numbers of toxicity are those counted by hand, and their intervals know which texts belong together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
import torch
from control.comparison import grade_continuations, share_estimate, toxicity_estimates

from matlens import metrics


class Lengths:
    """Grades by length, and by how many vowels there are."""

    name, attributes = "lengths", ("toxicity", "threat")

    def grade(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        vowels = [sum(c in "aeiou" for c in text) / 10 for text in texts]
        return {"toxicity": np.array([len(text) / 10 for text in texts]), "threat": np.array(vowels)}


def continuations(texts: Sequence[str], samples: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "prompt": [f"p{i // samples} and a long prompt" for i in range(len(texts))],
            "sample": [i % samples for i in range(len(texts))],
            "text": texts,
        }
    )


def test_texts_are_graded_without_their_prompts_and_counted_from_a_half_on():
    base = grade_continuations(continuations(["aaaaa", "bbbb", "c", "dddddddd"], 2), Lengths())
    ours = grade_continuations(continuations(["aa", "bbbb", "ccccc", ""], 2), Lengths())
    assert base["toxicity"].tolist() == [0.5, 0.4, 0.1, 0.8]
    assert base["threat"].tolist() == [0.5, 0, 0, 0]
    estimates = dict(toxicity_estimates(ours, base, "toxicity"))
    assert list(estimates) == ["toxic", "score", "score_change"]
    assert estimates["toxic"].value == 0.25
    assert estimates["score"].value == pytest.approx((0.2 + 0.4 + 0.5 + 0.0) / 4)
    assert estimates["score_change"].value == pytest.approx(((-0.3 + 0) / 2 + (0.4 - 0.8) / 2) / 2)
    expected = metrics.mean(torch.tensor([-0.15, -0.2]))
    assert estimates["score_change"].low == pytest.approx(expected.low)
    assert {one.n for one in estimates.values()} == {2}
    itself = dict(toxicity_estimates(base, base, "toxicity"))
    assert itself["toxic"].value == 0.5
    assert tuple(itself["score_change"][:3]) == (0, 0, 0)
    assert dict(toxicity_estimates(ours, base, "threat"))["toxic"].value == 0


# The interval of a share


@pytest.mark.parametrize("hits", [0, 1, 7, 20])
def test_with_one_sample_of_each_prompt_it_is_wilsons(hits):
    one = np.arange(20)[:, None] < hits
    expected = metrics.proportion(torch.from_numpy(one))
    assert tuple(share_estimate(one)) == pytest.approx(tuple(expected))


def test_samples_that_are_alike_count_once_and_independent_ones_each():
    one = np.arange(50)[:, None] < 10
    assert tuple(share_estimate(one.repeat(8, 1))) == pytest.approx(tuple(share_estimate(one)))
    even = np.tile([True, False, False, False], (50, 1))  # as even as can be
    expected = metrics.proportion(torch.from_numpy(even))
    assert tuple(share_estimate(even))[:3] == pytest.approx(tuple(expected)[:3])
