"""Tables of paper A's scripts and related ones against a plain model by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from analysing import N_PATCHED, N_VALIDATION, PROMPTS, SINKS, read, run, sizes
from conftest import N_LAYERS, WORDS
from independent import assert_judged, make_readout
from paper_a.predictions import prediction_confidence
from paper_a_by_hand import PAIRS, Sentences, fitted
from paper_a_sec5_corpora import fit_equally_many, transfer_losses
from sklearn.metrics import r2_score

import matlens
from matlens import collect, make_examples
from matlens.data import Corpus
from matlens.models import token_texts

SUBMODULES = ("mat_ffn", "mat_ln1_ln2")
LAYERS = range(N_LAYERS)


def test_r2_is_that_of_least_squares_for_every_pair(finished, by_hand):
    table, study = read(finished, "paper_a_fig2_r2"), by_hand()
    assert len(table) == 2 * len(PAIRS)
    for row in table.itertuples():
        assert row.value == pytest.approx(study.r2(row.method, row.layer, row.target), rel=1e-4, abs=1e-5)
    sizes = read(finished, "sample_sizes")
    assert sorted({*sizes["n_fitted"]}) == [11, 22, 45, 90]
    for row in sizes.itertuples():
        weight = fitted(*(study.train.h(layer)[: row.n_fitted] for layer in (row.layer, N_LAYERS)))
        predicted = study.validation.h(row.layer) @ weight.T
        assert row.value == pytest.approx(r2_score(study.truth, predicted), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "models", "n"),
    [
        ("paper_a_fig4_next_token", [SINKS], N_VALIDATION),
        ("paper_a_fig5_masked", ["bert"], N_VALIDATION),
        ("paper_a_fig6_alternation", [SINKS], N_PATCHED),
        ("paper_a_fig7_models", [SINKS, "gpt2"], N_VALIDATION),
    ],
)
def test_predictions_are_those_of_the_plain_model(name, models, n, finished, by_hand):
    table = read(finished, name, models[0])
    assert [Path(model).name for model in table["model"].unique()] == models
    for model, rows in table.groupby("model"):
        study = by_hand(Path(str(model)).name)
        vectors = study.layers()
        if study.name == "bert":
            vectors |= study.mapped_by_run(finished(name, study.name))
        assert_judged(rows, study.judge(vectors, n), nats=2e-3)
        assert {*rows["n"]} == {n}


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


@pytest.mark.parametrize("name", ["paper_a_fig10_submodules", "submodule_positions", "submodule_alone"])
def test_submodules_are_those_replaced_by_hand(name, finished, by_hand):
    table, study = read(finished, name), by_hand()
    cases = {}  # how many sentences, and what replaces which sub-modules where
    if name == "paper_a_fig10_submodules":
        for layer in LAYERS:
            cases["mat_attn", layer] = "mat_attn", "all", "all", layer, N_VALIDATION
            for method in SUBMODULES:
                cases[method, layer] = method, "all", "all", layer, N_PATCHED
                cases[f"{method} without sinks", layer] = method, "not-sink", "not-sink", layer, N_PATCHED
    elif name == "submodule_positions":
        fits = ("all", "not-first", "not-sink")
        for method, fit, place, layer in itertools.product(SUBMODULES, fits, (*fits, "predicted"), (0, 2)):
            cases[f"{method}, fit {fit}, replace {place}", layer] = method, fit, place, layer, N_PATCHED
    else:
        for layer, (label, fit) in itertools.product(LAYERS, (("", "all"), (" without sinks", "not-sink"))):
            cases[f"mat_ffn{label}", layer] = "mat_ffn", fit, fit, layer, N_PATCHED, layer + 1
    vectors = {key: study.submodules(*case) for key, case in cases.items()}
    if name != "submodule_alone":
        of_mat = LAYERS if name == "paper_a_fig10_submodules" else (0, 2)
        n = N_VALIDATION if name == "paper_a_fig10_submodules" else N_PATCHED
        vectors |= {("mat", layer): study.mapped(layer)[:n] for layer in of_mat}
    for key, h in vectors.items():
        assert_judged(table, study.judge({key: h}, len(h)), nats=5e-5)
    assert set(zip(table["method"], table["layer"], strict=True)) == set(vectors)


def test_maps_of_each_corpus_are_least_squares_on_it(finished, by_hand):
    table = read(finished, "paper_a_sec5_corpora")
    studies = {corpus: by_hand(SINKS, Path(corpus).stem) for corpus in table["corpus"].unique()}
    assert len(studies) == 2
    for tested, study in studies.items():
        vectors = {
            (f"mat of {of}", layer): other.mapped(layer, study.validation.h(layer))
            for of, other in studies.items()
            for layer in LAYERS
        }
        of_tested = table[table["corpus"] == tested]
        assert_judged(of_tested[of_tested["metric"] != "r2"], study.judge(vectors), nats=2e-3)
        for row in of_tested[of_tested["metric"] == "r2"].itertuples():
            expected = r2_score(study.truth, vectors[row.method, row.layer])
            assert row.value == pytest.approx(expected, rel=1e-3, abs=1e-4)
    means, losses = (
        read(finished, "paper_a_sec5_corpora", table="paper_a_sec5_matrix"),
        transfer_losses(table),
    )
    wide = table[table["k"] == 1].pivot(index="layer", columns=["corpus", "method"], values="value")
    for loss in losses.itertuples():
        here, same = wide[loss.corpus, loss.method], wide[loss.corpus, f"mat of {loss.corpus}"]
        expected = [here.mean(), (here - same).mean(), ((here - same) / same).mean()]
        assert [loss.precision, loss.difference, loss.relative] == pytest.approx(expected)
        (mean,) = means[
            (means["corpus"] == loss.corpus) & (means["method"] == loss.method) & (means["k"] == 1)
        ]["value"]
        assert mean == pytest.approx(here.mean())
    assert len(losses) == 4


def test_corpora_that_share_sentences_are_refused(corpora, model_folder, tmp_path):
    """In another order they are split differently: maps of one would be evaluated on what they saw."""
    lines = (corpora / "words.txt").read_text().splitlines()
    (tmp_path / "backwards.txt").write_text("\n".join(lines[::-1]))
    options = ["--model", model_folder("llama"), "--corpus", corpora / "words.txt", *sizes()]
    with pytest.raises(SystemExit):
        run("paper_a_sec5_corpora", *options, "--corpus", tmp_path / "backwards.txt", "--out", tmp_path)
    assert not list(tmp_path.rglob("*.csv"))


def test_three_corpora_are_a_matrix_of_all_tokens_from_some_layers(corpora, model_folder, tmp_path):
    chosen = [part for name in ("words", "others", "few") for part in ("--corpus", corpora / f"{name}.txt")]
    options = ["--model", model_folder("llama"), *chosen, *sizes(), "--positions", "all", "--every", 2]
    run("paper_a_sec5_corpora", *options, "--out", tmp_path)
    means = pd.read_csv(tmp_path / "paper_a_sec5_matrix.csv")
    assert means[means["k"] == 1].pivot(index="method", columns="corpus", values="value").shape == (3, 3)
    assert {*pd.read_csv(tmp_path / "paper_a_sec5_corpora.csv")["layer"]} == {0, 2}
    assert json.loads((tmp_path / "paper_a_sec5_matrix.json").read_text())["n_fitted"] > 45  # tokens


def test_at_all_positions_as_many_tokens_of_each_corpus_count(small_model, plain_model):
    model, rng, examples = small_model("llama"), np.random.default_rng(0), {}
    for name, n in (("long", 40), ("short", 12)):
        texts = tuple(" ".join(rng.choice(WORDS, int(rng.integers(4, 9)))) for _ in range(n))
        examples[name] = make_examples(model, Corpus(name, texts, n, 0, 0, 0))
    equal = len(examples["short"].tokens)
    assert 40 < equal < len(examples["long"].tokens)
    samples = {name: collect(model, part, positions="all", progress=False) for name, part in examples.items()}
    for name, maps in fit_equally_many(samples, every=2).items():
        assert list(maps) == [("h.0", "h.3"), ("h.2", "h.3")]
        every = Sentences("llama", plain_model("llama"), examples[name]).every
        x, y, last = (torch.cat([seen[f"h.{layer}"] for seen in every])[:equal] for layer in (0, 2, 3))
        for layer, source in ((0, x), (2, y)):
            weight = maps[layer, 3].weight.double()
            torch.testing.assert_close(weight, fitted(source, last), rtol=1e-3, atol=1e-3)


def test_maps_of_all_positions_are_least_squares_on_all(finished, by_hand):
    table, study = read(finished, "all_positions"), by_hand()
    vectors = {("mat, sampled", layer): study.mapped(layer) for layer in LAYERS}
    *inputs, last = (torch.cat([seen[f"h.{n}"] for seen in study.train.every]) for n in range(N_LAYERS + 1))
    for layer, x in enumerate(inputs):
        vectors["mat, all", layer] = study.validation.h(layer) @ fitted(x, last).T
    r2 = table[table["metric"] == "r2"].set_index(["method", "layer"])["value"].astype(float)
    assert r2.to_dict() == pytest.approx(
        {key: r2_score(study.truth, h) for key, h in vectors.items()}, rel=1e-3, abs=1e-4
    )
    assert_judged(table[table["metric"] != "r2"], study.judge(vectors), nats=2e-3)


# Top tokens


@pytest.mark.parametrize(
    ("name", "model"),
    [("plausibility", SINKS), ("plausibility", "bert"), ("paper_a_table1_tokens", SINKS)],
)
def test_top_tokens_are_the_largest_of_a_softmax_of_the_plain_models_head(name, model, finished, by_hand):
    out = finished(name, model)
    study, tokenizer, expected = by_hand(model), by_hand(model).model.tokenizer, []
    if name == "plausibility":
        examples = make_examples(study.model, study.parts[1], seed=0, sample_special=False).head(8)
        layers = range(N_LAYERS + 1)
    else:
        examples, layers = matlens.make_prompts(study.model, PROMPTS), (0, 1, 3)
    given, head = Sentences(model, study.plain, examples), make_readout(study.plain)
    mapped = {("mat", layer): study.mapped(layer, given.h(layer)) for layer in layers}
    if model == "bert":
        mapped |= study.mapped_by_run(out, collect(study.model, examples, progress=False))
    for layer in layers:
        ways = {"id": given.h(layer), "mat": mapped["mat", layer]}
        for method in list(ways) if layer < N_LAYERS else ["id"]:
            with torch.no_grad():
                top = head(ways[method]).softmax(-1).topk(5)
            for i, (ids, position) in enumerate(zip(given.tokens, given.positions, strict=True)):
                read_by = ids if model == "bert" else ids[: position + 1]
                words = [
                    word
                    for word in tokenizer.convert_ids_to_tokens(read_by)
                    if word not in ("[CLS]", "[SEP]")
                ]
                for rank in range(5):
                    [token] = token_texts(tokenizer, [int(top.indices[i, rank])])
                    expected.append(
                        (" ".join(words), method, layer, rank + 1, token, float(top.values[i, rank]))
                    )
    table = pd.read_csv(out / f"{name}.csv", keep_default_na=False)
    wanted = pd.DataFrame(expected, columns=list(table))
    pd.testing.assert_frame_equal(table, wanted, check_exact=False, rtol=1e-4)
    assert table["token"].nunique() > 5, "the layers tell nothing apart"
    best = wanted[(wanted["layer"] == N_LAYERS) & (wanted["rank"] == 1)]["probability"]
    assert prediction_confidence(study.model, examples).tolist() == pytest.approx(best.tolist(), rel=1e-4)


# Sinks


def test_sinks_are_measured_by_layer_and_left_out_of_r2(finished, by_hand):
    out, study = finished("sinks", SINKS), by_hand()
    table, train = read(finished, "sinks").set_index(["metric", "method", "layer"]), study.train
    groups = {"first tokens": train.first, "sinks": train.sink, "others": ~train.first & ~train.sink}
    for layer in range(N_LAYERS + 1):
        h = train.h(layer).numpy()
        for name, mask in groups.items():
            norms, row = sorted(np.sqrt((h[mask] ** 2).sum(1))), table.loc["median_norm", name, layer]
            assert (row["value"], row["n"]) == pytest.approx((norms[(len(norms) - 1) // 2], len(norms)))
        for name, mask in (("all", train.sink | True), ("not sinks", ~train.sink)):
            variance, row = np.var(h[mask], axis=0), table.loc["largest_dimension", name, layer]
            assert row["value"] == pytest.approx(variance.max() / variance.sum(), rel=1e-5)
    assert len(table) == 5 * (N_LAYERS + 1)
    r2 = read(finished, "sinks", table="sinks_r2")
    masks = {"not first tokens": ~study.validation.first, "not sinks": ~study.validation.sink}
    assert len(r2) == 2 * 2 * len(PAIRS)
    for row in r2.itertuples():
        expected = study.r2(row.method, row.layer, row.target, masks[row.examples])
        assert row.value == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert row.n == masks[row.examples].sum()
    tokenizer, norms = (
        study.model.tokenizer,
        torch.stack([train.h(n).norm(dim=1) for n in range(N_LAYERS + 1)]),
    )
    medians, later = norms.median(dim=1).values, []
    for i in (train.sink & ~train.first).nonzero().flatten().tolist():
        place, at = train.positions[i], int((norms[:, i] / medians).argmax())
        words = tokenizer.convert_ids_to_tokens(train.tokens[i][max(0, place - 4) : place + 1])
        later.append((place, words[-1], "".join(words), at, float(norms[at, i]), float(medians[at])))
    found = read(finished, "sinks", table="sinks_later")
    pd.testing.assert_frame_equal(found, pd.DataFrame(later, columns=list(found)), rtol=1e-4)
    for name, part in (("sinks", train), ("sinks_later", train), ("sinks_r2", study.validation)):
        assert json.loads((out / f"{name}.json").read_text())["sinks"] == part.counts
    assert min(train.counts["n_later_sinks"], train.counts["n_first_sinks"]) > 0
