"""The analyses of paper B run on small models, and their tables agree with one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from analysing import CONTROL, EXITS, SEARCH, SHEETS, Workbench, assert_table, drawn, run
from annotation import concept_sheets, concepts, patterns
from annotation.word_similarity import WordSimilarity
from conftest import N_LAYERS, SINK_TOKENS
from exits.classifiers import RIDGE
from exits.comparison import classifier_sites, compare_exits, compare_readings
from exits.outcomes import summarize_exits
from figures import paper_b
from paper_b_fig4_overlap import norm_overlap
from paper_b_fig6_dominance import dominance
from plain_values import plain_unembedding, plain_values
from sub_updates.events import event_tables

import matlens
from matlens import ffn


@pytest.fixture
def workbench(corpora, model_folder, tmp_path, capsys):
    return Workbench(corpora, model_folder, tmp_path / "out", capsys)


EVENT_TABLES = ("paper_b_table4_events", "paper_b_fig3_scores", "paper_b_table9_saturation")


def test_a_search_gives_the_vector_that_holds_most_words_and_its_tokens(workbench, small_model, plain_model):
    options = ["--words", "w2 w7 w31", "--words", "w40", "--top", 12, "--shown", 4, "--prompt", "w4 w40 w11"]
    workbench.run(SEARCH, "gpt2", *options)
    table, plain, tokenizer = workbench.table(SEARCH), plain_model("gpt2"), small_model("gpt2").tokenizer
    e = plain_unembedding(plain)
    tops = {
        f"L{layer}D{i}": [
            tokenizer.convert_ids_to_tokens(token) or f"<{token}>"
            for token in (e @ v).topk(12).indices.tolist()
        ]
        for layer in range(N_LAYERS)
        for i, v in enumerate(plain_values("gpt2", plain, layer))
    }
    assert table["search"].tolist() == ["w2 w7 w31", "w40"]
    for row in table.itertuples():
        held = {value: len(set(row.search.split()) & set(top)) for value, top in tops.items()}
        assert held[row.value] == row.words == max(held.values()) > 0
        assert row.tokens.split(", ") == tops[row.value][:4]
    model = small_model("gpt2")
    run = ffn.Updates.run(model, matlens.make_prompts(model, ["w4 w40 w11"]), progress=False)
    expected = run.table(ffn.Projection.from_model(model), k=1, n_tokens=4)
    assert_table(workbench.out / "paper_b_sec4_updates.csv", expected.assign(prompt="w4 w40 w11"))


def test_filled_sheets_of_concepts_give_shares_figure_and_agreement(workbench, tmp_path):
    workbench.run(SHEETS, "gpt2", "--per-layer", 2, "--top", 6)
    sheets, key = workbench.out / f"{SHEETS}_sheets", workbench.table(SHEETS, keep_default_na=False)
    assert key.groupby(["kind", "layer"])["item"].nunique().tolist() == [2] * 9
    assert sorted(path.name for path in sheets.iterdir()) == ["patterns.csv", "sheet.html", "tokens.csv"]
    filled = {tmp_path / "anna": "0123456", tmp_path / "ben": "3456789"}
    for folder, digits in filled.items():  # tokens that end in some digits are one pattern, semantic
        folder.mkdir()
        tokens, listed = (pd.read_csv(sheets / f"{name}.csv", dtype=str) for name in ("tokens", "patterns"))
        tokens["patterns"] = np.where(tokens["token"].str.strip("‹›").str[-1:].isin([*digits]), "1", "")
        listed.loc[listed["pattern"] == "1", "class"] = "semantic"
        tokens.to_csv(folder / "tokens.csv", index=False)
        listed.to_csv(folder / "patterns.csv", index=False)
    run(SHEETS, *(part for folder in filled for part in ("--filled", folder)), "--out", workbench.out)
    read = [concept_sheets.read_concept_sheets(folder, key) for folder in filled]
    assert_table(workbench.out / f"{SHEETS}_shares.csv", concepts.tally_concepts(key, read))
    assert_table(workbench.out / f"{SHEETS}_agreement.csv", concepts.annotator_agreement(key, read))
    assert workbench.origin(f"{SHEETS}_shares")["annotators"] == ["anna", "ben"]
    workbench.assert_figure(f"{SHEETS}_shares")


# What the tables hold is what the library gives for the options; its own tests compare that with loops


@pytest.fixture
def job(workbench, small_model):
    """The model and the examples of a script's job of so many sentences."""

    def of(model: str, sentences: int) -> tuple[Any, Any, Any]:
        loaded = small_model(model)
        _, part = matlens.load_corpus(str(workbench.words)).split(n_train=1, n_validation=sentences)
        return loaded, matlens.make_examples(loaded, part)

    return of


def test_tables_of_events_are_those_of_the_trace(workbench, job, monkeypatch):
    figures = drawn(monkeypatch, paper_b, "events_figure", "layers_figure", "saturation_figure")
    workbench.run("paper_b_fig3_events", "llama-sinks", "--sentences", 60, "--dominant", 3)
    model, examples = job("llama-sinks", 60)
    trace = ffn.Trace.run(model, examples, k=3, progress=False)
    at_sinks = examples.tokens[examples.offsets[:-1] + examples.positions]
    assert trace.sinks.tolist() == np.isin(at_sinks, SINK_TOKENS).tolist()
    assert 0 < int(trace.sinks.sum()) < 30
    tables = event_tables(trace, model)
    for name, table in zip(EVENT_TABLES, (tables.events, tables.scores, tables.saturation), strict=True):
        assert_table(workbench.out / f"{name}.csv", table)
    assert workbench.origin(EVENT_TABLES[0])["n_sinks"] == int(trace.sinks.sum())
    of_figures = tables.events, tables.scores[tables.scores["read"] == "score"], tables.saturation
    for (table,), expected in zip(figures.values(), of_figures, strict=True):
        pd.testing.assert_frame_equal(table, expected)


def test_overlap_and_dominance_are_those_of_the_options(workbench, job, monkeypatch):
    figures = drawn(monkeypatch, paper_b, "shares_by_layer")
    workbench.run("paper_b_fig4_overlap", "gpt2", "--random", 9, "--top", 5)
    workbench.run("paper_b_fig6_dominance", "gpt2", "--sentences", 12, "--dominant", 4)
    model, examples = job("gpt2", 12)
    assert_table(workbench.out / "paper_b_fig4_overlap.csv", norm_overlap(model, n_random=9, k=5))
    assert_table(workbench.out / "paper_b_fig6_dominance.csv", dominance(model, examples, k=4))
    of_overlap, of_dominance = figures["shares_by_layer"]
    assert of_overlap["method"].tolist() == ["values", "random"] * N_LAYERS
    assert set(of_dominance["metric"]) == {"share"}
    assert set(of_dominance["method"]) == {"dominant", "random"}


def test_ways_of_leaving_early_are_those_of_the_options(workbench, job):
    options = [
        "--sentences", 40, "--dominant", 3, "--clusters", 20, "--splits", 2, "--folds", 2, "--fewest", 2,
        "--strength", 0.01, "--ridge-only", "--also-clusters", 30,
    ]  # fmt: skip
    workbench.run(EXITS, "gpt2", *options)
    model, examples = job("gpt2", 40)
    trace = ffn.Trace.run(model, examples, k=3, progress=False)
    clusters = [ffn.Clusters.fit(ffn.ValueVectors(model), n) for n in (20, 30)]
    comparison = compare_exits(
        model, trace, clusters[0],
        matlens.collect(model, examples, classifier_sites(model), progress=False),
        seeds=2, folds=2, fewest=2, strengths=[0.01], kinds=[RIDGE],
    )  # fmt: skip
    expected = summarize_exits(comparison.evaluated, N_LAYERS)
    table = workbench.table(EXITS)
    pd.testing.assert_frame_equal(table[list(expected)], expected, check_dtype=False)
    assert workbench.origin(EXITS)["penalties"] == comparison.penalties
    readings, expected = workbench.table("paper_b_sec6_readings"), compare_readings(trace, clusters)
    pd.testing.assert_frame_equal(readings[list(expected)], expected, check_dtype=False)


def test_concepts_that_are_found_are_those_of_the_search(workbench, job):
    name = "paper_b_table1_concept_vectors"
    workbench.run(name, "llama", "--top", 20, "--vectors", 3, "--per-layer", 2)
    model, words = job("llama", 2)[0], matlens.load_corpus(str(workbench.words))
    similarity = WordSimilarity.fit(words.sentences, seed=0)
    searched = patterns.search_concepts(model, similarity, k=20)
    table = patterns.pattern_shares(searched, str(model.cfg.model_name), words.name, k=20)
    assert_table(workbench.out / f"{name}.csv", table)
    best = [
        patterns.distinct_concepts(searched[method], n=3, per_layer=2).assign(method=method)
        for method in ("values", "random")
    ]
    assert_table(workbench.out / f"{name}_vectors.csv", pd.concat(best))


def test_control_is_compared_under_the_options_that_are_given(workbench, tmp_path):
    (tmp_path / "prompts.txt").write_text("w1 w2 w3\nw4\nw5 w6 w7 w8\n")
    (tmp_path / "banned.txt").write_text("w9\nw10 w11\n")
    workbench.run(
        CONTROL, "gpt2", "--prompts", tmp_path / "prompts.txt", "--banned", tmp_path / "banned.txt",
        "--word", "w2", "--n", 3, "--windows", 5, "--window", 12, "--announce", "threat",
        "--value", 0.5, "--value", 4, "--vector", "L-1D2", "--samples", 2,
    )  # fmt: skip
    table, origin = workbench.table(CONTROL), workbench.origin(CONTROL)
    control = {"picked, 1 vectors": 1, "words, 3 vectors": 3, "graded, 3 vectors": 3}
    assert {method: len(names) for method, names in origin["vectors"].items()} == control
    assert origin["vectors"]["picked, 1 vectors"] == [f"L{N_LAYERS - 1}D2"]
    toxic = table[table["metric"] == "toxic"]
    counted = toxic.groupby("method", sort=False).size().to_dict()
    assert counted == {"unchanged": 1, **dict.fromkeys(control, 2), "Self-Debiasing": 1, "WordFilter": 1}
    texts = workbench.table(f"{CONTROL}_texts")
    assert len(texts) == 9 * 3 * 2
    same = (texts["method"] == "words, 3 vectors") & (texts["coefficient"] == 4)
    row = toxic[(toxic["method"] == "words, 3 vectors") & (toxic["coefficient"] == 4)].iloc[0]
    assert row["value"] == pytest.approx((texts[same]["toxicity"] >= 0.5).mean())
    workbench.assert_figure(CONTROL)
