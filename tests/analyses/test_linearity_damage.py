"""Scores that predict damage: each is a derivative of a plain model in float64, by finite differences."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from analysing import assert_figure, run
from conftest import SINK_TOKENS, plain_vectors
from linearity_damage import comparisons, residual_scores, windows_without
from scipy import stats
from torch import Tensor

import matlens
from matlens.data import Examples, make_windows
from matlens.linearity import linearity_atlas

NAME, MODEL = "linearity_damage", "llama-sinks"
WINDOW, FITTED, EVALUATED, SCORED, SAMPLES = 16, 40, 4, 5, 200
STEP = 1e-2  # of a finite difference: the plain model computes norms and softmax in float32
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

    def __init__(
        self, plain: Any, ends: tuple[str, str], module: str, end: int, *, without_sinks: bool
    ) -> None:
        self.model, self.ends, self.end = copy.deepcopy(plain).double(), ends, end
        self.module, self.without_sinks = self.model.get_submodule(module), without_sinks

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

    def moved(self, text: Tensor, change: Tensor) -> dict[str, Tensor]:
        """Vectors and logits with something added to the part's output, ``[variant, place, d]``."""

        def add(module: Any, inputs: Any, output: Any) -> Any:
            return (output[0] + change, *output[1:]) if isinstance(output, tuple) else output + change

        handle = self.module.register_forward_hook(add)
        try:
            return plain_vectors(MODEL, self.model, text.expand(len(change), -1))
        finally:
            handle.remove()

    def slopes(self, text: Tensor, directions: Tensor, of: str) -> Tensor:
        """Derivatives along directions ``[variant, place, d]``."""
        up, down = (self.moved(text, sign * STEP * directions)[of] for sign in (1, -1))
        return (up - down) / (2 * STEP)

    def scores(self, scored: Examples) -> dict[str, float]:
        """All scores, per token that has a target."""
        total: dict[str, float] = dict.fromkeys(EXACT, 0.0)
        total |= {"fisher": 0.0, "fisher by token": 0.0, "last layer": 0.0, "gradient norm": 0.0}
        for number, text in enumerate(texts_of(scored)):
            here = scored.sentences == number
            at, targets = torch.from_numpy(scored.positions[here]), torch.from_numpy(scored.targets[here])
            residual, last = self.residual(text), f"h.{len(self.model.model.layers)}"
            vectors = plain_vectors(MODEL, self.model, text)
            p, size = vectors["logits"][0, at].softmax(-1), residual.square().sum(-1)
            stream = vectors[f"h.{self.end}"][0].square().sum(-1)

            def variance(slopes: Tensor, p: Tensor = p, at: Tensor = at) -> Tensor:
                mean = (p * slopes[:, at]).sum(-1)
                return (p * (slopes[:, at] - mean[..., None]).square()).sum((1, 2))

            slope = self.slopes(text, residual[None], "logits")
            of_text = slope[0, at, targets] - (p * slope[0, at]).sum(-1)
            total["first order"] -= float(of_text.sum())
            total["fisher of the text"] += float(of_text.sum()) ** 2 / 2
            total["residual norm"] += float(size.sum())
            total["relative residual"] += float((size / stream).sum())
            total["fisher"] += float(variance(slope)) / 2
            places = torch.eye(len(text))[..., None]
            total["fisher by token"] += (
                float(variance(self.slopes(text, places * residual, "logits")).sum()) / 2
            )
            of_last = self.slopes(text, residual[None], last)[0, at].square().sum(-1)
            total["last layer"] += float((of_last / vectors[last][0, at].square().sum(-1)).sum()) / 2
            for place, length in enumerate(size):
                units = torch.zeros(residual.shape[1], *residual.shape)
                units[:, place] = torch.eye(residual.shape[1])
                total["gradient norm"] += (
                    float(length * variance(self.slopes(text, units, "logits")).sum()) / 2
                )
        return {score: value / len(scored.targets) for score, value in total.items()}


@pytest.mark.parametrize(
    ("kind", "layer", "ends", "module", "tokens"),
    [
        ("attn", 1, ("attn_in.1", "attn_out.1"), "self_attn", "all"),
        ("ffn", 0, ("ffn_in.0", "ffn_out.0"), "mlp", "no sinks"),
        ("jump 2", 0, ("h.0", "h.2"), "", "all"),
    ],
)  # fmt: skip
def test_scores_are_derivatives_by_hand(kind, layer, ends, module, tokens, examples, scores, plain_model):
    fitted, evaluated, every = examples
    end = int(ends[1][-1]) if kind in ("block", "jump 2") else layer + 1
    path = f"model.layers.{end - 1}" + (f".{module}" if module else "")
    by_hand = ByHand(plain_model(MODEL), ends, path, end, without_sinks=tokens == "no sinks")
    by_hand.fit(texts_of(fitted))
    expected = by_hand.scores(windows_without(every, evaluated, SCORED))
    rows = scores[(scores["kind"] == kind) & (scores["layer"] == layer) & (scores["tokens"] == tokens)]
    ours = rows.set_index("metric")["value"].to_dict()
    assert ours["first order + fisher"] == pytest.approx(ours["first order"] + ours["fisher"])
    for score, value in expected.items():
        assert ours[score] == pytest.approx(value, rel=2e-3 if score in EXACT else 0.15), score


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
    ours, theirs, all_of_them = (
        {tuple(text.tolist()) for text in texts_of(each)} for each in (scored, evaluated, every)
    )
    assert len(ours) == SCORED
    assert ours < all_of_them - theirs
    assert len(windows_without(every, evaluated, 10**6)) == len(every) - len(evaluated)


def test_correlations_are_of_the_atlas_and_the_scores(out, scores, examples, small_model):
    assert_figure(out, NAME)
    found = pd.read_csv(out / f"{NAME}.csv").set_index(["tokens", "kind", "metric"])
    atlas = linearity_atlas(small_model(MODEL), *examples[:2], progress=False)
    table = pd.concat([atlas, scores], ignore_index=True)
    table = table[(table["method"] == "map") & table["layer"].notna()]
    for tokens in ("all", "no sinks"):
        wide = table[table["tokens"] == tokens].pivot(
            index=["kind", "layer"], columns="metric", values="value"
        )
        by_score = {}
        for score, sign in (("fisher", 1), ("nbl bound", 1), ("r2", -1), ("first order", 1)):
            by_score[score] = sign * stats.spearmanr(wide[score], wide["loss increase"]).statistic
            assert found.loc[(tokens, "all kinds", score), "value"] == pytest.approx(by_score[score])
        lead = found.loc[(tokens, "all kinds", "fisher - nbl bound")]
        assert lead["value"] == pytest.approx(by_score["fisher"] - by_score["nbl bound"])
        assert lead["low"] < lead["value"] < lead["high"]
        large = wide[wide["loss increase"] > 0.02]
        if len(large):
            ratio = (large["fisher"] / large["loss increase"]).median()
            assert found.loc[(tokens, "all kinds", "fisher / loss increase"), "value"] == pytest.approx(ratio)
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
        ceiling = (
            pd.DataFrame(comparisons(pd.DataFrame(rows), seed=0)).set_index("metric").loc["noise ceiling"]
        )
        r = 1 / np.sqrt(1 + noise**2)  # of normal variables
        assert ceiling["value"] == pytest.approx(6 / np.pi * np.arcsin(r / 2), abs=0.03)
        assert ceiling["low"] < ceiling["value"] < ceiling["high"]
