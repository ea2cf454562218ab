"""The atlas and its scores are those of NumPy, SciPy and plain models patched by hand."""

from __future__ import annotations

import itertools
from typing import Any

import handpatched
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import D_MODEL, WORDS, plain_vectors
from handpatched import hand_vectors
from linearity import atlas_summary
from scipy import stats
from scipy.linalg import subspace_angles
from scipy.spatial import procrustes
from sklearn.metrics import r2_score

from matlens import InputError, linearity
from matlens.activations import find_sinks
from matlens.data import Corpus, Examples, make_windows
from matlens.linear.least_squares import LeastSquares
from matlens.linearity import atlas
from matlens.linearity.parts import JUMPS, Part, model_parts
from matlens.linearity.ranking import GROUPS, first_parts, spearman
from matlens.linearity.scores import PartSums, fit_scores, held_out_scores
from matlens.models import ModelLayout
from matlens.models.identity import Provenance

SIZE = 16


def corpus(seed: int, n: int) -> Corpus:
    generator = np.random.default_rng(seed)
    words = (" ".join(generator.choice(WORDS, SIZE)) for _ in range(n))
    return Corpus("text", tuple(words), n, 0, 0, 0)


@pytest.fixture(scope="module")
def texts(small_model):
    def of_model(name: str) -> tuple[Examples, Examples]:
        model = small_model(name)
        return (
            make_windows(model, corpus(1, 12), size=SIZE, targets=True),
            make_windows(model, corpus(2, 4), size=SIZE, targets=True),
        )

    return of_model


@pytest.fixture(scope="module")
def tables(small_model, texts):
    known: dict[str, pd.DataFrame] = {}

    def of_model(name: str) -> pd.DataFrame:
        if name not in known:
            known[name] = linearity.linearity_atlas(small_model(name), *texts(name), progress=False)
        return known[name]

    return of_model


def sentences_of(text: Examples) -> list[torch.Tensor]:
    offsets = text.offsets
    return [torch.from_numpy(text.tokens[a:b]) for a, b in itertools.pairwise(offsets)]


def fit_by_hand(name: str, plain: Any, model: Any, text: Examples, ends: tuple[str, str], tokens: str) -> Any:
    x, y = (
        torch.cat([plain_vectors(name, plain, tokens[None])[site][0] for tokens in sentences_of(text)])
        for site in ends
    )
    if tokens == "no sinks":
        sinks = find_sinks(model, text, progress=False)
        kept = torch.cat([~row[:length] for row, length in zip(sinks, text.lengths.tolist(), strict=True)])
        x, y = x[kept], y[kept]
    ones = torch.cat([x, torch.ones(len(x), 1)], 1).double().numpy()
    solution = np.linalg.lstsq(ones, y.double().numpy(), rcond=1e-6)[0]
    return torch.from_numpy(solution[:-1].T).float(), torch.from_numpy(solution[-1]).float()


def read_by_hand(name: str, plain: Any, text: Examples, parts: list[Any]) -> tuple[list[Any], list[Any]]:
    """Losses and likeliest tokens at the positions of each sentence."""
    losses, likeliest = [], []
    for s, vectors in enumerate(hand_vectors(name, plain, parts, [x.tolist() for x in sentences_of(text)])):
        chosen = text.sentences == s
        log_p = vectors["logits"].log_softmax(-1)[text.positions[chosen]]
        losses.append(-log_p[range(len(log_p)), text.targets[chosen]].double().numpy())
        likeliest.append(log_p.argmax(1).numpy())
    return losses, likeliest


ENDS = {
    "ffn": ("ffn_in.1", "ffn_out.1"), "attn": ("attn_in.1", "attn_out.1"), "ln1": ("ln1_in.1", "ln1_out.1"),
    "block": ("h.1", "h.2"), "jump 2": ("h.1", "h.3"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tokens"), [("bert", "all"), ("gptj", "all"), ("llama-sinks", "no sinks")])
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("method", ["map", "removed"])
def test_costs_are_those_of_a_model_patched_by_hand(
    name, tokens, kind, method, small_model, plain_model, texts, tables
):
    if tokens == "no sinks" and kind not in ("ffn", "attn", "ln1"):
        kind = "ffn"  # by hand, blocks are replaced at all tokens alone
    (fitted, evaluated), plain = texts(name), plain_model(name)
    where: Any = "all"
    if tokens == "no sinks" and method == "map":
        sinks = find_sinks(small_model(name), evaluated, progress=False)
        assert 0 < int(sinks.sum()) < sinks.numel() / 2
        where = tuple(map(tuple, (~sinks).tolist()))
    if method == "map":
        weight, bias = fit_by_hand(name, plain, small_model(name), fitted, ENDS[kind], tokens)
    else:
        weight, bias = torch.eye(D_MODEL) * (kind not in ("ffn", "attn")), None
    part = handpatched.Part(*ENDS[kind], weight, bias, where)
    ours, theirs = (read_by_hand(name, plain, evaluated, parts) for parts in ([part], []))
    table = tables(name)
    rows = table[
        (table["kind"] == kind) & (table["layer"] == 1) & (table["method"] == method)
        & (table["tokens"] == (tokens if method == "map" else "all"))
    ].set_index("metric")  # fmt: skip
    difference = np.concatenate(ours[0]) - np.concatenate(theirs[0])
    assert rows.loc["loss increase", "value"] == pytest.approx(
        difference.mean(), abs=0.02 * np.abs(difference).max()
    )
    same = np.concatenate(ours[1]) == np.concatenate(theirs[1])
    assert rows.loc["agreement", "value"] == pytest.approx(same.mean())
    assert np.abs(difference).max() > 1e-5


def test_what_was_broken_off_goes_on(small_model, texts, tables, tmp_path, monkeypatch):
    whole = tables("llama")
    run, calls = atlas.run_variants, []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*arguments, **options)

    monkeypatch.setattr(atlas, "run_variants", failing)
    asked = small_model("llama"), *texts("llama")
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(atlas.time, "process_time", lambda: next(clock) ** 2)
    with pytest.raises(KeyboardInterrupt):
        linearity.linearity_atlas(*asked, folder=tmp_path / "atlas", progress=False)
    table = linearity.linearity_atlas(*asked, folder=tmp_path / "atlas", progress=False)
    # Scores and one layer until 20 squared; from 30 squared on two layers and what is replaced together.
    assert linearity.atlas_seconds(tmp_path / "atlas") == 20**2 + 60**2 - 30**2
    assert len(calls) == 1 + 3 + len(GROUPS)  # the first layer is not run again
    pd.testing.assert_frame_equal(table, whole)
    again = linearity.linearity_atlas(*asked, folder=tmp_path / "atlas", progress=False)
    assert len(calls) == 1 + 3 + len(GROUPS)
    pd.testing.assert_frame_equal(again, table)
    with pytest.raises(InputError, match="belongs to another job"):
        linearity.linearity_atlas(*asked, folder=tmp_path / "atlas", jumps=[2], progress=False)
    second = linearity.linearity_atlas(*asked, every=2, jumps=[3], progress=False)
    assert set(second["kind"]) & {"jump 2", "jump 3"} == {"jump 3"}
    alone, ours = (
        each[each["layer"].notna() & (each["layer"] % 2 == 0) & ~each["kind"].str.startswith("jump")]
        for each in (whole, second)
    )
    alone, ours = (each.reset_index(drop=True) for each in (alone, ours))
    pd.testing.assert_frame_equal(ours, alone)


def test_a_rise_that_is_infinite_has_no_interval():
    texts = np.array([0, 0, 1, 1])
    whole = np.array([1.0, 2.0, 3.0, 4.0])
    assert atlas.loss_increase(np.array([1.0, np.inf, 3.0, 4.0]), whole, texts)[:2] == pytest.approx(
        (np.inf, np.nan), nan_ok=True
    )
    usual = atlas.loss_increase(whole + np.array([0.5, 0.5, 1.5, 1.5]), whole, texts)
    assert usual.value == pytest.approx(1)
    assert usual.low < 1 < usual.high
    assert usual.n == 2


def test_the_first_parts_are_replaced_together(small_model, plain_model, texts, tables):
    table, (fitted, evaluated), plain = tables("llama"), texts("llama"), plain_model("llama")
    first = first_parts(table, group="ffn")
    parts = []
    for _, layer in first:
        ends = f"ffn_in.{layer}", f"ffn_out.{layer}"
        parts.append(handpatched.Part(*ends, *fit_by_hand("llama", plain, None, fitted, ends, "all")))
    ours, theirs = (read_by_hand("llama", plain, evaluated, of_parts) for of_parts in (parts, []))
    row = table[(table["kind"] == "together: ffn") & (table["metric"] == "loss increase")].iloc[0]
    expected = (np.concatenate(ours[0]) - np.concatenate(theirs[0])).mean()
    assert row["value"] == pytest.approx(expected, abs=2e-4)
    assert row["parts"] == ", ".join(f"{kind} {layer}" for kind, layer in first)


ALL = ["ln1", "attn", "ln2", "ffn", "block", "jump 2"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("bert", ALL), ("olmo2", ALL), ("gptj", [kind for kind in ALL if kind != "ln2"]), ("bloom", ALL[4:])],
)
def test_every_part_is_there(name, kinds, small_model):
    layout = ModelLayout.from_model(small_model(name))
    parts = model_parts(layout)
    assert JUMPS == (2, 4, 8)  # definitions, section 10
    assert [part.kind for part in parts if part.layer == 0] == kinds
    assert [part.kind for part in parts if part.layer == 2] == kinds[:-1]
    jump = next(part for part in parts if part.kind == "jump 2")
    assert (jump.source, jump.target, jump.end) == ("h.0", "h.2", 2)
    assert [part.kind for part in parts if part.layer == 0 and part.writes] == [
        kind for kind in ("attn", "ffn") if kind in kinds
    ]
    assert Part("ffn", 1, "ffn_in.1", "ffn_out.1").end == 2
    with pytest.raises(InputError, match="each of the jumps"):
        model_parts(layout, jumps=[1])


def atlas_table(n_layers: int = 8) -> pd.DataFrame:
    """A table in which NBL's bound tells the rise of a map exactly, and r2 in part."""
    generator, rows = np.random.default_rng(3), list[dict[str, Any]]()
    for kind in ("attn", "ffn", "block"):
        for layer in range(n_layers):
            rise = float(generator.exponential())
            numbers = {
                ("map", "loss increase"): rise, ("removed", "loss increase"): rise + generator.exponential(),
                ("map", "nbl bound"): 10 * rise, ("map", "r2"): -rise + generator.normal(),
            }  # fmt: skip
            rows += [
                {
                    "model": "m", "corpus": "c", "method": method, "metric": metric, "kind": kind,
                    "layer": layer, "target": layer + 1, "value": value, "tokens": "all", "parts": "",
                }
                for (method, metric), value in numbers.items()
            ]  # fmt: skip
    return pd.DataFrame(rows)


def of_both_kinds_of_tokens() -> pd.DataFrame:
    """Maps of all tokens and of all but sinks, each with values of its own."""
    table = atlas_table()
    table = table[(table["method"] == "map") | (table["metric"] == "loss increase")]
    others = table[table["method"] == "map"].assign(tokens="no sinks")
    shuffled = others["value"].sample(frac=1, random_state=1).to_numpy()
    return pd.concat([table, others.assign(value=shuffled)], ignore_index=True)


def test_scores_of_some_tokens_are_held_against_rises_of_maps_at_these_and_of_leaving_out_at_all():
    table = of_both_kinds_of_tokens()
    ours = linearity.rank_correlations(table, resamples=99).set_index(["tokens", "kind", "method", "metric"])
    wide = table.pivot(index=["kind", "layer"], columns=["tokens", "method", "metric"], values="value")
    seen = set[float]()
    for tokens in ("all", "no sinks"):
        for method, of_rise in (("map", tokens), ("removed", "all")):
            rises = wide[of_rise, method, "loss increase"]
            for score, sign in (("r2", -1), ("nbl bound", 1)):
                expected = sign * stats.spearmanr(wide[tokens, "map", score], rises).statistic
                assert ours.loc[(tokens, "all kinds", method, score), "value"] == pytest.approx(expected)
                seen.add(round(float(expected), 9))
        row = ours.loc[(tokens, "ffn", "map", "r2")]
        assert row["low"] < row["value"] < row["high"]
        assert row["n"] == 8
    assert len(seen) >= 7, "the two kinds of tokens tell nothing apart"
    assert (tokens, "ffn", "map", "procrustes") not in ours.index
    sums = atlas_summary(table).set_index(["tokens", "kind", "method", "metric"])["value"]
    for tokens in ("all", "no sinks"):
        part = table[(table["tokens"] == tokens) & (table["kind"] == "attn") & (table["method"] == "map")]
        rises = part[part["metric"] == "loss increase"].set_index("layer")["value"]
        assert sums[tokens, "attn", "map", "loss increase"] == pytest.approx(rises.mean())
        assert sums[tokens, "attn", "map", "median loss increase"] == pytest.approx(rises.median())


def test_what_is_not_finite_counts_as_the_worst():
    table = atlas_table()
    worst = (table["kind"] == "ffn") & (table["layer"] == 2) & (table["method"] == "map")
    table.loc[worst & table["metric"].isin(["loss increase"]), "value"] = np.inf
    table.loc[worst & table["metric"].isin(["r2"]), "value"] = -np.inf
    finite = table.copy()
    finite.loc[worst & table["metric"].isin(["loss increase"]), "value"] = 1e6
    finite.loc[worst & table["metric"].isin(["r2"]), "value"] = -1e6
    ours, expected = (linearity.rank_correlations(each, resamples=9) for each in (table, finite))
    pd.testing.assert_frame_equal(ours, expected)


def test_an_interval_is_of_resampled_pairs():
    generator = np.random.default_rng(0)
    x = generator.normal(size=60)
    y = x + generator.normal(size=60)
    _, low, high = spearman(x, y, seed=1, resamples=999)
    drawn = generator.integers(60, size=(999, 60))
    expected = np.quantile([stats.spearmanr(x[i], y[i]).statistic for i in drawn], [0.025, 0.975])
    assert (low, high) == pytest.approx(expected, abs=0.03)


def test_the_first_parts_do_not_touch():
    rows = [("ffn", 1, 0.1), ("block", 1, 0.2), ("attn", 1, 0.3), ("block", 2, 0.4), ("attn", 2, 0.5)]
    table = pd.DataFrame(rows, columns=["kind", "layer", "value"]).assign(
        method="map", metric="loss increase", tokens="all", target=3
    )
    assert first_parts(table, group="any") == [("ffn", 1), ("attn", 1), ("block", 2)]
    assert first_parts(table, group="block") == [("block", 1), ("block", 2)]
    assert first_parts(table, group="attn") == [("attn", 1), ("attn", 2)]
    assert first_parts(table, group="ffn") == [("ffn", 1)]
    assert first_parts(table, group="norms") == []


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
