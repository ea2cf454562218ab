"""Scores that predict damage: each follows from a Jacobian of the plain model, computed in float64."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from analysing import assert_figure, run
from conftest import D_MODEL, LAYERS, N_LAYERS, SINK_TOKENS, SITE_MODULES, listening, plain_vectors
from linearity_damage import comparisons, residual_scores, windows_without
from scipy import stats
from torch import Tensor

import matlens
from matlens.data import Examples, make_windows
from matlens.linearity import linearity_atlas

NAME, MODEL = "linearity_damage", "llama-sinks"
WINDOW, FITTED, EVALUATED, SCORED, SAMPLES = 16, 40, 4, 5, 200
EXACT = ("first order", "fisher of the text", "residual norm", "relative residual")


@pytest.fixture(scope="module")
def examples(corpora, small_model):
    """Windows to fit on, to evaluate on, and all of the second part."""
    train, validation = matlens.load_corpus(str(corpora / "words.txt")).split(n_train=90, n_validation=30)
    return [
        make_windows(small_model(MODEL), part, size=WINDOW, max_windows=n, targets=True)
        for part, n in ((train, FITTED), (validation, EVALUATED), (validation, None))
    ]


@pytest.fixture(scope="module")
def out(corpora, model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("damage")
    run(
        NAME, "--model", model_folder(MODEL), "--corpus", corpora / "words.txt", "--train", 90, "--val", 30,
        "--window", WINDOW, "--windows", FITTED, "--eval-windows", EVALUATED, "--score-windows", SCORED,
        "--samples", SAMPLES, "--device", "cpu", "--out", out,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def scores(out):
    (found,) = [json.loads(each.read_text()) for each in out.rglob("scores.json") if NAME in each.parent.name]
    return pd.DataFrame(found["content"]["rows"])


def texts_of(examples: Examples) -> list[Tensor]:
    return [torch.from_numpy(part) for part in np.split(examples.tokens, examples.offsets[1:-1])]


class ByHand:
    """A plain model in float64 on some texts, and one of its parts."""

    def __init__(self, plain: Any, ends: tuple[str, str], end: int, *, without_sinks: bool) -> None:
        self.model, self.ends, self.end = copy.deepcopy(plain).double(), ends, end
        self.without_sinks = without_sinks

    def ends_of(self, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Input and output of the part, and the tokens at which it is replaced."""
        vectors = plain_vectors(MODEL, self.model, text)
        replaced = ~torch.isin(text, torch.tensor(SINK_TOKENS)) | torch.tensor(not self.without_sinks)
        return vectors[self.ends[0]][0], vectors[self.ends[1]][0], replaced

    def fit(self, texts: list[Tensor]) -> None:
        x, y = (
            torch.cat(parts)
            for parts in zip(*((x[at], y[at]) for x, y, at in map(self.ends_of, texts)), strict=True)
        )
        ones = torch.cat([x, torch.ones(len(x), 1)], 1)
        self.solution = torch.from_numpy(np.linalg.lstsq(ones.numpy(), y.numpy(), rcond=1e-6)[0])

    def residual(self, text: Tensor) -> Tensor:
        x, y, replaced = self.ends_of(text)
        return (x @ self.solution[:-1] + self.solution[-1] - y) * replaced[:, None]

    def jacobians(self, text: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Of logits and of the last layer at positions, by the part's output: ``[position, v, place, d]``."""
        layers, norm = (self.model.get_submodule(path) for path in LAYERS[MODEL])

        def changed(change: Tensor) -> tuple[Tensor, Tensor]:
            def add(site: str, value: Tensor) -> Tensor:
                return value + change if site == self.ends[1] else value

            with listening(layers, norm, SITE_MODULES[MODEL], add) as seen:
                logits = self.model(text[None]).logits
            return logits[0, at], seen[f"h.{N_LAYERS}"][0, at]

        found: Any = torch.autograd.functional.jacobian(changed, torch.zeros(len(text), D_MODEL).double())
        return found

    def scores(self, scored: Examples) -> pd.Series:
        """All scores, per token that has a target."""
        total = Counter[str]()
        for number, text in enumerate(texts_of(scored)):
            here = scored.sentences == number
            at, targets = torch.from_numpy(scored.positions[here]), torch.from_numpy(scored.targets[here])
            vectors, residual = plain_vectors(MODEL, self.model, text), self.residual(text)
            p, size = vectors["logits"][0, at].softmax(-1), residual.square().sum(-1)
            of_logits, of_last = self.jacobians(text, at)

            def variance(slopes: Tensor, p: Tensor = p) -> Tensor:  # of ``[..., position, v]``
                mean = (p * slopes).sum(-1, keepdim=True)
                return (p * (slopes - mean).square()).sum((-2, -1))

            slope, last = ((each * residual).sum((2, 3)) for each in (of_logits, of_last))
            of_text = (slope[range(len(at)), targets] - (p * slope).sum(-1)).sum()
            by_token = (of_logits * residual).sum(3).permute(2, 0, 1)
            units = variance(of_logits.permute(2, 3, 0, 1)).sum(1)
            streams = [vectors[f"h.{n}"][0].square().sum(-1) for n in (self.end, N_LAYERS)]
            found = {
                "first order": -of_text, "fisher of the text": of_text**2 / 2, "residual norm": size.sum(),
                "relative residual": (size / streams[0]).sum(), "fisher": variance(slope) / 2,
                "fisher by token": variance(by_token).sum() / 2, "gradient norm": (size * units).sum() / 2,
                "last layer": (last.square().sum(-1) / streams[1][at]).sum() / 2,
            }  # fmt: skip
            total.update({score: float(value) for score, value in found.items()})
        return pd.Series(total) / len(scored.targets)


@pytest.mark.parametrize(
    ("kind", "layer", "ends", "tokens"),
    [
        ("attn", 1, ("attn_in.1", "attn_out.1"), "all"),
        ("ffn", 0, ("ffn_in.0", "ffn_out.0"), "no sinks"),
        ("jump 2", 0, ("h.0", "h.2"), "all"),
    ],
)
def test_scores_are_derivatives_by_hand(kind, layer, ends, tokens, examples, scores, plain_model):
    fitted, evaluated, every = examples
    end = 2 if kind == "jump 2" else layer + 1
    by_hand = ByHand(plain_model(MODEL), ends, end, without_sinks=tokens == "no sinks")
    by_hand.fit(texts_of(fitted))
    expected = by_hand.scores(windows_without(every, evaluated, SCORED))
    rows = scores[(scores["kind"] == kind) & (scores["layer"] == layer) & (scores["tokens"] == tokens)]
    ours = rows.set_index("metric")["value"].to_dict()
    assert ours["first order + fisher"] == pytest.approx(ours["first order"] + ours["fisher"])
    for score, value in expected.items():
        assert ours[score] == pytest.approx(value, rel=1e-4 if score in EXACT else 0.15), score


def test_a_residual_is_squared_after_the_sum_over_a_text():
    generator = np.random.default_rng(0)
    residual = generator.normal(size=(2, 5, 3))
    truth, sampled, last = (generator.normal(1, 0.3, size=(n, 2, 5, 3)) for n in (1, 4, 6))
    stream = generator.normal(size=(2, 5, 3))
    ours = residual_scores(
        torch.from_numpy(residual), [torch.from_numpy(each) for each in (truth, sampled, last)],
        torch.from_numpy(stream),
    )  # fmt: skip
    for score, gradient in (("fisher", sampled), ("fisher of the text", truth), ("last layer", last)):
        by_text = np.einsum("stpd,tpd->st", gradient, residual)
        assert ours[score] == pytest.approx((by_text**2).mean(0).sum() / 2)
    by_token = np.einsum("stpd,tpd->stp", sampled, residual)
    assert ours["fisher by token"] == pytest.approx((by_token**2).mean(0).sum() / 2)
    assert abs(ours["fisher by token"] / ours["fisher"] - 1) > 0.2


def test_no_window_is_both_scored_and_evaluated(examples):
    _, evaluated, every = examples
    scored = windows_without(every, evaluated, SCORED)
    ours, theirs = ({text.numpy().tobytes() for text in texts_of(each)} for each in (scored, evaluated))
    assert (len(ours), ours & theirs) == (SCORED, set())
    assert len(windows_without(every, evaluated, 10**6)) == len(every) - len(evaluated)


def test_correlations_are_of_the_atlas_and_the_scores(out, scores, examples, small_model):
    assert_figure(out, NAME)
    found = pd.read_csv(out / f"{NAME}.csv").query("kind == 'all kinds'").set_index(["tokens", "metric"])
    atlas = linearity_atlas(small_model(MODEL), *examples[:2], progress=False)
    table = pd.concat([atlas, scores]).query("method == 'map' and layer.notna()")
    for tokens, rows in table.groupby("tokens"):
        wide = rows.pivot(index=["kind", "layer"], columns="metric", values="value")
        signs = {"fisher": 1, "nbl bound": 1, "r2": -1, "first order": 1}
        expected = {s: sign * stats.spearmanr(wide[s], wide["loss increase"])[0] for s, sign in signs.items()}
        expected["fisher - nbl bound"] = expected["fisher"] - expected["nbl bound"]
        large = wide[wide["loss increase"] > 0.02]
        if len(large):
            expected["fisher / loss increase"] = (large["fisher"] / large["loss increase"]).median()
        assert found.loc[tokens]["value"][[*expected]].to_dict() == pytest.approx(expected)
        lead = found.loc[(tokens, "fisher - nbl bound")]
        assert lead["low"] < lead["value"] < lead["high"]
        assert lead["n"] == len(wide) == 17


def test_the_noise_ceiling_is_what_the_truth_reaches_in_noise():
    generator, n = np.random.default_rng(0), 200
    truth = generator.normal(size=n)
    for noise in (0.1, 1.0):
        rows = [
            {"kind": "ffn", "layer": i, "tokens": "all", "method": "map", "metric": metric, "value": truth[i],
             "low": truth[i] - 1.96 * noise, "high": truth[i] + 1.96 * noise, "model": "m", "corpus": "c"}
            for metric in ("loss increase", "fisher", "nbl bound") for i in range(n)
        ]  # fmt: skip
        rows = pd.DataFrame(comparisons(pd.DataFrame(rows), seed=0))
        ceiling = rows.set_index("metric").loc["noise ceiling"]
        r = 1 / np.sqrt(1 + noise**2)  # of normal variables
        assert ceiling["value"] == pytest.approx(6 / np.pi * np.arcsin(r / 2), abs=0.03)
        assert ceiling["low"] < ceiling["value"] < ceiling["high"]
