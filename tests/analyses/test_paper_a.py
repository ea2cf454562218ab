"""Every analysis runs on small models and leaves its table, its provenance and its figure."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from analysing import (
    LENSES,
    LINEARITY,
    N_PATCHED,
    N_TRAIN,
    N_VALIDATION,
    OF_FFNS,
    PATCHED,
    PRUNING,
    SCRIPTS,
    SINKS,
    assert_figure,
    assert_table,
    read,
    run,
    sizes,
)
from conftest import N_LAYERS
from independent import assert_judged
from paper_a.predictions import top_predictions
from paper_a_by_hand import PAIRS, fitted
from sklearn.metrics import r2_score

import matlens
from matlens import collect, make_examples
from matlens.data.readers import is_masked

OF_NO_MODEL = ("small_bert", "small_gpts", "small_wikilm", "compatibility")  # these make models of their own
# With tests of their own.
ELSEWHERE = (
    LENSES,
    LINEARITY,
    PRUNING,
    "linearity_training",
    "linearity_damage",
    "lens_causal",
    "lens_budgets",
)
TABLES = [name for name in SCRIPTS if name not in (*OF_NO_MODEL, *ELSEWHERE, *OF_FFNS)]
FIGURES = [name for name in TABLES if name not in ("all_positions", "plausibility", "sample_sizes")]
BOTH_KINDS = ("plausibility",)
CASES = [(name, "bert" if name == "paper_a_fig5_masked" else SINKS) for name in TABLES]
CASES += [(name, "bert") for name in BOTH_KINDS]
# What belongs into the column "layer", where that is not every layer but the last.
LAYERS = {
    "paper_a_fig9_early_exit": {1, 2, 3}, "paper_a_table1_tokens": {0, 1, 3}, "submodule_positions": {0, 2},
}  # fmt: skip


@pytest.mark.parametrize(("name", "model"), CASES)
def test_it_runs_on_a_small_model(name, model, finished):
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
    if name in PATCHED:
        counts = table[table["metric"] != "r2"]["n"]  # which some take on all but sinks
        assert N_PATCHED in set(counts) <= {N_PATCHED, N_VALIDATION}
    figures = [path.name for path in sorted(out.glob(f"{name}*.p*"))]
    assert bool(figures) == (name in FIGURES)
    for figure in {Path(figure).stem for figure in figures}:
        assert_figure(out, figure)


# What the tables hold: they agree with the plain model


def test_r2_is_that_of_least_squares_for_every_pair(finished, by_hand):
    table, study = read(finished, "paper_a_fig2_r2"), by_hand()
    assert len(table) == 2 * len(PAIRS)
    for row in table.itertuples():
        assert row.value == pytest.approx(study.r2(row.method, row.layer, row.target), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "name", ["paper_a_fig4_next_token", "paper_a_fig7_models", "paper_a_fig6_alternation"]
)
def test_predictions_are_those_of_the_plain_model(name, finished, by_hand):
    table = read(finished, name)
    n = N_PATCHED if name == "paper_a_fig6_alternation" else None
    models = list(table["model"].unique())
    assert len(models) == (2 if name == "paper_a_fig7_models" else 1)
    for model in models:
        study = by_hand(Path(model).name)
        assert_judged(table[table["model"] == model], study.judge(study.layers(), n), nats=2e-3)


def test_schemes_are_those_of_blocks_jumped_over_by_hand(finished, by_hand):
    table, study = read(finished, "paper_a_fig6_alternation"), by_hand()
    jumps = {("R2", kept): study.best_jumps(kept) for kept in range(N_LAYERS + 1)} | {
        ("WRR, blocks first", 1): [(1, 3)], ("WRR, blocks first", 2): [(2, 3)],
        ("WRR, mat first", 1): [(0, 2)], ("WRR, mat first", 2): [(0, 1)],
    }  # fmt: skip
    rows, without = ~study.validation.sink, study.mat_without_sinks
    for kept in range(N_LAYERS + 1):
        jumps["R2, scored without sinks", kept] = study.best_jumps(kept, rows=rows)
        jumps["R2 without sinks", kept] = study.best_jumps(kept, without, rows)
    vectors = {
        key: study.scheme(of_key, N_PATCHED, without_sinks=key[0] == "R2 without sinks")
        for key, of_key in jumps.items()
    }
    assert_judged(table, study.judge(vectors, N_PATCHED), nats=2e-3)


def test_masked_predictions_are_those_of_the_plain_model(finished, by_hand):
    table, study = read(finished, "paper_a_fig5_masked", "bert"), by_hand("bert")
    assert_judged(table, study.judge(study.layers()), nats=2e-3)
    assert set(zip(table["method"], table["layer"], strict=True)) == set(study.layers())


def test_submodules_are_those_replaced_by_hand(finished, by_hand):
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


def test_positions_of_stand_ins_are_those_replaced_by_hand(finished, by_hand):
    table, study = read(finished, "submodule_positions"), by_hand()
    vectors = {("mat", layer): study.mapped(layer)[:N_PATCHED] for layer in (0, 2)}
    for method, fit, place in itertools.product(
        ("mat_ffn", "mat_ln1_ln2"),
        ("all", "not-first", "not-sink"),
        ("all", "not-first", "not-sink", "predicted"),
    ):
        for layer in (0, 2):
            name = f"{method}, fit {fit}, replace {place}"
            vectors[name, layer] = study.submodules(method, fit, place, layer, N_PATCHED)
    assert_judged(table, study.judge(vectors, N_PATCHED), nats=2e-3)
    assert set(zip(table["method"], table["layer"], strict=True)) == set(vectors)


def test_exits_are_those_of_the_plain_models_confidence(finished, by_hand, corpora, capsys):
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


def test_maps_of_each_corpus_are_least_squares_on_it(finished, by_hand):
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


def test_maps_of_all_positions_are_least_squares_on_all(finished, by_hand):
    table, study = read(finished, "all_positions"), by_hand()
    last = study.train.all_tokens(f"h.{N_LAYERS}")
    vectors = {}
    for layer in range(N_LAYERS):
        h = study.validation.h(layer)
        weight = fitted(study.train.all_tokens(f"h.{layer}"), last)
        vectors["mat, all", layer] = (h.double() @ weight.T).float()
        vectors["mat, sampled", layer] = study.mapped(layer)
    for (method, layer), h in vectors.items():
        (row,) = table[
            (table["method"] == method) & (table["layer"] == layer) & (table["metric"] == "r2")
        ].itertuples()
        assert row.value == pytest.approx(r2_score(study.truth.numpy(), h.numpy()), rel=1e-3, abs=1e-4)
    assert_judged(table[table["metric"] != "r2"], study.judge(vectors), nats=2e-3)


# What the tables hold: they agree with one another


def test_corpora_that_share_sentences_are_refused(corpora, model_folder, tmp_path, capsys):
    """In another order they are split differently: maps of one would be evaluated on what they saw."""
    lines = (corpora / "words.txt").read_text().splitlines()
    (tmp_path / "backwards.txt").write_text("\n".join(lines[::-1]))
    options = ["--model", model_folder("llama"), "--corpus", corpora / "words.txt", *sizes()]
    with pytest.raises(SystemExit):
        run("paper_a_sec5_corpora", *options, "--corpus", tmp_path / "backwards.txt", "--out", tmp_path / "a")
    assert "corpora must not share sentences" in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "a").rglob("*.csv"))
    (tmp_path / "twin.txt").write_text("\n".join(lines))  # split alike, so that no sentence is on both sides
    run("paper_a_sec5_corpora", *options, "--corpus", tmp_path / "twin.txt", "--out", tmp_path / "b")
    origin = json.loads((tmp_path / "b" / "paper_a_sec5_corpora.json").read_text())
    shared = origin["validation_sentences_fitted_on"]
    assert {n for of_fit in shared.values() for n in of_fit.values()} == {0}


def test_three_corpora_are_a_matrix(corpora, model_folder, tmp_path):
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


def test_tokens_of_the_sheet_are_those_of_the_maps(finished, collected, corpora):
    _, part = matlens.load_corpus(str(corpora / "words.txt")).split(
        n_train=N_TRAIN, n_validation=N_VALIDATION
    )
    examples = make_examples(collected.model, part, seed=0, sample_special=False).head(8)
    drawn = collect(collected.model, examples, progress=False)
    expected = top_predictions(collected.readout, collected.maps(), drawn, range(N_LAYERS + 1))
    assert_table(finished("plausibility", SINKS) / "plausibility.csv", expected)


def test_the_small_bert_learns_and_can_be_analysed(corpora, plain_model, model_folder, tmp_path, capsys):
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
        examples = matlens.make_examples(model, lines, sample_special=False)
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
