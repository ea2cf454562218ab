"""The analyses of paper B run on small models, and their tables agree with one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import annotation
import control
import exits
import numpy as np
import pandas as pd
import pytest
import sub_updates
import torch
from analysing import (
    CONTROL,
    EXITS,
    OF_FFNS,
    OWN_TABLES,
    SEARCH,
    SENTENCES,
    SHEETS,
    Workbench,
    assert_table,
    drawn,
    refused,
    run,
)
from annotation import WordSimilarity
from conftest import N_LAYERS, SINK_TOKENS
from figures import paper_b
from hand_controlled import controlled_by_hand
from paper_a.predictions import prediction_confidence
from plain_values import plain_unembedding, plain_values
from sub_updates.frequency import TokenFrequency

import matlens
from matlens import ffn
from matlens.data import make_windows


@pytest.fixture
def workbench(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Workbench:
    return Workbench(corpora, model_folder, tmp_path / "out", capsys)


@pytest.mark.parametrize("model", ["gpt2", "bert", "gemma2"])
@pytest.mark.parametrize("name", [name for name in OF_FFNS if name not in OWN_TABLES])
def test_analyses_of_ffns_run_on_small_models(name: str, model: str, workbench: Workbench) -> None:
    options = {
        "paper_b_fig4_overlap": ["--random", 9, "--top", 5], **SENTENCES,
        "paper_b_table1_concept_vectors": ["--top", 8, "--vectors", 4],
    }  # fmt: skip
    workbench.run(name, model, *options[name])
    table, origin = workbench.table(name), workbench.origin(name)
    assert set(table["layer"].dropna()) == set(range(N_LAYERS))
    assert table[table["method"] != "difference"]["value"].between(0, 1).all()
    assert origin["seed"] == 0
    assert origin["model"]["base_model_name_or_path"].endswith(model)
    assert origin["command"].startswith(f"{name}.py --model")
    workbench.assert_figure(name)


def test_removal_is_compared_with_every_reading_at_the_layers_that_are_asked_for(
    workbench: Workbench, job: Callable[[str, int], tuple[Any, Any]]
) -> None:
    workbench.run("paper_b_removal", "gemma3", "--sentences", 3, "--dominant", 2, "--every", 2, "--top", 5)
    table, origin = workbench.table("paper_b_removal"), workbench.origin("paper_b_removal")
    assert set(table["layer"].dropna()) == {0, 2}
    assert set(table["method"]) == {"v", "g v", "f v", "f g v", "another v"}
    assert set(table["n"]) == {3}
    assert (origin["dominant"], origin["data"]["n"]) == (2, 3)
    model, examples = job("gemma3", 3)
    expected = sub_updates.removal_table(model, examples, k=2, layers=[2, 0], n_tokens=5, progress=False)
    assert_table(workbench.out / "paper_b_removal.csv", expected)
    workbench.assert_figure("paper_b_removal")


EVENT_TABLES = ("paper_b_table4_events", "paper_b_fig3_scores", "paper_b_table9_saturation")


@pytest.mark.parametrize("model", ["gpt2", "gemma2"])
def test_events_are_counted_alike_in_all_tables_of_one_trace(
    model: str, workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ("paper_b_fig3_events", model, "--sentences", 40, "--dominant", 3)
    workbench.run(*job)
    events, layers, frequency = map(workbench.table, EVENT_TABLES)
    assert set(events["read"]) == set(layers["read"]) == {"score", "lift", "odds"}
    assert set(layers["layer"]) == set(range(N_LAYERS))
    for row in events.itertuples():
        alike = layers[layers["examples"] == row.examples]
        for column in ("event", "read", "method", "metric"):
            alike = alike[alike[column] == getattr(row, column)]
        assert alike["n"].sum() == row.n
        assert (alike["value"] * alike["n"]).sum() / row.n == pytest.approx(row.value, rel=1e-4, abs=1e-7)
    by_effect = workbench.table("paper_b_fig3_by_effect")
    cells = ["event", "examples", "metric", "layer", "value", "n"]
    kept = layers[(layers["read"] == "score") & (layers["method"] == "dominant")][cells]
    kept = kept[kept["metric"].isin(("max", "mean", "min"))].reset_index(drop=True)
    pd.testing.assert_frame_equal(by_effect[cells], kept)
    by_ffn = frequency[frequency["method"] == "ffn"]["value"].sum()
    whole = events[(events["event"] == "saturation") & (events["examples"] == "all examples")]
    assert set(whole["n"]) == {round(40 * by_ffn)}
    for name in EVENT_TABLES:
        origin = workbench.origin(name)
        assert (origin["seed"], origin["k"], origin["data"]["n"]) == (0, 3, 40)
        workbench.assert_figure(name)
    monkeypatch.setattr("matlens.ffn.trace.stream", None)  # nothing is run: the trace is there
    workbench.unchanged_when_run_again(EVENT_TABLES, *job)


def test_a_model_without_events_is_told(workbench: Workbench) -> None:
    """With its random weights, the small BERT has one candidate from the start."""
    message = workbench.refused("paper_b_fig3_events", "bert", "--sentences", 12)
    assert "error: There is no saturation event" in message
    assert not list(workbench.out.glob("paper_b*"))


CLUSTER_TABLES = ("paper_b_sec5_clusters", "paper_b_sec5_groups", "paper_b_sec5_places")


@pytest.mark.parametrize("model", ["gpt2", "bert", "gemma2"])
def test_extreme_sub_updates_are_counted_alike_by_cluster_and_by_group(
    model: str, workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ("paper_b_sec5_clusters", model, "--sentences", 20, "--clusters", 30, "--beside", 50)
    workbench.run(*job)
    clusters, groups, places = map(workbench.table, CLUSTER_TABLES)
    for read in ("score", "lift"):
        activity, group, by_place = (table[table["read"] == read] for table in (clusters, groups, places))
        assert (by_place["per_example"] * by_place["examples"]).sum() == pytest.approx(6)
        extreme, drawn = (activity[activity["sub_updates"] == name] for name in ("extreme", "drawn"))
        assert extreme["extremes"].sum() == 6  # a hundredth of 20 x 3 x 10
        assert drawn["extremes"].sum() == 50
        for table in (extreme, drawn):
            assert table["share"].sum() == pytest.approx(1)
        for kind in group["method"].unique():
            values = group[group["method"] == kind].set_index("metric")["value"]
            part = extreme if kind == "all" else extreme[extreme["kind"] == kind]
            assert values["share"] == pytest.approx(part["share"].sum())
            assert values["clusters"] == part["cluster"].nunique()
            assert values["raised"] == pytest.approx(
                (part["raised"] * part["share"]).sum() / part["share"].sum()
            )
    few, largest, alone, ways = (
        workbench.table(f"paper_b_sec5_{name}") for name in ("few", "largest", "alone", "ways")
    )
    for row in few.to_dict("records"):
        activity = clusters[(clusters["read"] == row["read"]) & (clusters["sub_updates"] == "extreme")]
        counts = activity.groupby("cluster")["extremes"].sum().sort_values(ascending=False)
        least = next(n for n in range(1, 31) if counts[:n].sum() >= row["of"] * 6)
        assert row["clusters"] == least
        if row["of"] == 1:
            held = activity.drop_duplicates("cluster")["size"].sum()
            assert row["vectors"] == pytest.approx(held / ways["vectors"][0])
    assert largest["extremes"].sum() == 12
    shares = alone[(alone["metric"] == "share") & (alone["method"] != "all")].groupby("read")["value"].sum()
    assert shares.tolist() == pytest.approx([1, 1])
    assert (ways["clusters"] == 30).all()
    for name in CLUSTER_TABLES:
        origin = workbench.origin(name)
        assert (origin["n_clusters"], origin["method"], origin["data"]["n"]) == (30, "exact", 20)
        assert origin["thresholds"]["score"] > 0
    workbench.assert_figure(CLUSTER_TABLES[0])
    # Given again, nothing is traced or clustered: both are there.
    (labels,) = workbench.out.glob("clusters/*/labels.safetensors")
    written = labels.stat().st_mtime_ns
    monkeypatch.setattr("matlens.ffn.trace.stream", None)
    workbench.unchanged_when_run_again(CLUSTER_TABLES, *job)
    assert labels.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--clusters", 385], "n_clusters must be an integer from 1 to 384, got 385"),
        (["--clusters", 30, "--threshold", 1e9], "threshold must be less than the largest score"),
        (["--clusters", 30, "--threshold", 0], "Invalid value for '--threshold'"),
    ],
)
def test_what_gives_no_extreme_clusters_is_told(
    options: list[object], message: str, workbench: Workbench
) -> None:
    assert message in workbench.refused("paper_b_sec5_clusters", "gpt2", "--sentences", 12, *options)
    assert not list(workbench.out.glob("paper_b*"))


def control_options(tmp_path: Path) -> list[object]:
    (tmp_path / "prompts.txt").write_text("w1 w2 w3\nw4\nw5 w6 w7 w8\n")
    (tmp_path / "banned.txt").write_text("w9\nw10 w11\n")
    return [
        "--prompts", tmp_path / "prompts.txt", "--banned", tmp_path / "banned.txt", "--word", "w2", "--n", 3,
        "--windows", 5, "--window", 12, "--announce", "threat",
    ]  # fmt: skip


@pytest.mark.parametrize(("model", "samples"), [("gpt2", 2), ("gemma2", 0)])
def test_control_and_its_baselines_are_in_one_table(
    model: str, samples: int, workbench: Workbench, tmp_path: Path
) -> None:
    name, options = CONTROL, control_options(tmp_path)
    options += ["--value", 0.5, "--value", 4, "--vector", "L0D1", "--vector", "L-1D2", "--samples", samples]
    printed = workbench.run(name, model, *options)
    table, origin = workbench.table(name), workbench.origin(name)
    control = ["picked, 2 vectors", "words, 3 vectors", "graded, 3 vectors"]
    methods = ["unchanged", *control, "Self-Debiasing", "WordFilter"]
    assert table["method"].unique().tolist() == methods
    assert origin["vectors"]["picked, 2 vectors"] == ["L0D1", f"L{N_LAYERS - 1}D2"]
    assert {method: len(names) for method, names in origin["vectors"].items()} == dict(
        zip(control, (2, 3, 3), strict=True)
    )
    texts = workbench.table(f"{name}_texts", keep_default_na=False)
    assert len(texts) == (1 + 2 * 3 + 2) * 3 * (samples or 1)
    for (method, value), rows in table.groupby(["method", table["coefficient"].fillna(0)]):
        assert (value > 0) == (method in control)
        estimates = rows.set_index("metric")
        assert ("perplexity" in estimates.index) == (method != "WordFilter")
        same = texts[(texts["method"] == method) & (texts["coefficient"] == (str(value) if value else ""))]
        assert estimates.loc["toxic", "value"] == pytest.approx((same["toxicity"] >= 0.5).mean())
        assert estimates.loc["score", "value"] == pytest.approx(same["toxicity"].mean())
        assert estimates.loc["score", "n"] == 3
        assert set(rows[rows["metric"] == "perplexity"]["n"]) <= {5}
    unchanged = table[table["method"] == "unchanged"].set_index("metric")["value"]
    assert (unchanged["score_change"], unchanged["perplexity_ratio"]) == (0, 1)
    workbench.assert_figure(name)
    assert all(method in printed for method in methods)
    tokens = workbench.table("paper_b_table8_tokens")
    assert tokens.groupby("method", sort=False)["value"].unique().map(list).to_dict() == origin["vectors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grader", "wine"], "grader must be one of profanity-check, detoxify"),
        (["--vector", "wine"], "'wine' is not a value vector"),
        (["--vector", "L9D1"], "Layer 9 is out of range"),
        (["--word", "wine"], "The word 'wine' is not in the model's vocabulary"),
        (["--prompts", "absent.txt"], "'absent.txt' cannot be read"),
        (["--banned", "absent.txt"], "'absent.txt' cannot be read"),
        (["--challenging"], "marks no prompt as challenging"),
        (["--announce", "wine"], "attribute must be one of toxicity, severe_toxicity"),
        (["--samples", 2, "--beams", 2], "Beams are searched where nothing is drawn"),
        (["--text", "absent.txt"], "'absent.txt' cannot be read"),
        (["--value", "nan"], "coefficients must be a list of items that are a finite number, got [nan]"),
    ],
)
def test_what_does_not_suit_control_is_told(
    options: list[object], message: str, workbench: Workbench, tmp_path: Path
) -> None:
    assert message in workbench.refused(CONTROL, "llama", *control_options(tmp_path), *options)
    assert not workbench.out.exists()


@pytest.mark.parametrize(("model", "sentences"), [("gpt2", 90), ("gemma2", 40), ("gptj", 40)])
def test_ways_of_leaving_early_are_in_one_table(
    model: str,
    sentences: int,
    workbench: Workbench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = (
        EXITS, model, "--sentences", sentences, "--dominant", 3, "--clusters", 20, "--splits", 2,
        "--folds", 2, "--fewest", 2, "--strength", 0.01,
    )  # fmt: skip
    capsys.readouterr()
    run(EXITS, *workbench.options(*job))
    printed = capsys.readouterr()
    table, origin = workbench.table(EXITS), workbench.origin(EXITS)
    numbers = table.set_index("method")
    mapped = "confidence, mat" in numbers.index
    assert mapped == (sentences == 90), "72 training examples are two for each dimension"
    assert mapped != ("mat is left out: 32 training examples" in printed.err)
    assert numbers.loc["where it is made", "accuracy"] == 1
    assert (table["n"] == sentences).all()
    assert (table["seeds"] == 2).all()
    for name, each in origin["accuracy"].items():
        row = numbers.loc[name]
        assert row["accuracy"] == pytest.approx(np.mean(each))
        assert row["accuracy_sd"] == pytest.approx(np.std(each, ddof=1))
        assert row["chance"] == pytest.approx(np.mean(origin["chance"][name]))
        assert row["saved_share"] == pytest.approx(row["saved"] / N_LAYERS)
        assert f"{100 * row['accuracy']:.1f} ± " in printed.out
    assert (origin["splits"], origin["folds"], origin["k"], origin["clusters"]["n_clusters"]) == (2, 2, 3, 20)
    assert all(name.endswith(" 0.01") for chosen in origin["penalties"].values() for name in chosen)
    workbench.assert_figure(EXITS)
    # Given again, nothing is run and nothing is clustered: all is there, and the numbers are the same.
    (labels,) = workbench.out.glob("clusters/*/labels.safetensors")
    written = labels.stat().st_mtime_ns
    for place in ("ffn.trace.stream", "activations.collecting.stream"):
        monkeypatch.setattr(f"matlens.{place}", None)
    workbench.unchanged_when_run_again((EXITS,), *job)
    assert labels.stat().st_mtime_ns == written


@pytest.mark.parametrize(("option", "message"), [
    (("--clusters", 1000), "n_clusters must be an integer"), (("--strength", 0), "Invalid value"),
    (("--sentences", 9), "Invalid value"),
])  # fmt: skip
def test_a_comparison_that_cannot_be_is_told(
    option: tuple[str, float], message: str, workbench: Workbench
) -> None:
    options = ["--sentences", 12, "--clusters", 20, *option]
    assert message in workbench.refused(EXITS, "llama", *options)
    assert not list(workbench.out.glob(f"{EXITS}*"))


def test_the_vectors_that_were_found_are_written_and_printed(workbench: Workbench) -> None:
    name = "paper_b_table1_concept_vectors"
    printed = workbench.run(name, "llama", "--top", 20, "--vectors", 3)
    vectors = workbench.table(f"{name}_vectors", keep_default_na=False)
    table = workbench.table(name)
    overall = table[table["layer"].isna() & (table["metric"] == "pattern") & (table["k"] == 5)]
    for method, value, n in overall[["method", "value", "n"]].itertuples(index=False, name=None):
        if method != "dealt":
            assert (value > 0) == (method in set(vectors["method"]))
        assert f"{value:.3%} ({round(value * n)})" in printed
    for row in vectors[vectors["method"] == "values"].itertuples():
        assert str(row.value) in printed
        assert row.words >= 5
        tokens = str(row.top).replace("␣", "").split(", ")
        assert len(tokens) == 20
        assert set(str(row.pattern).split(", ")) <= set(tokens)


def test_a_search_gives_the_vector_that_holds_most_words_and_its_tokens(
    workbench: Workbench, small_model: Models, plain_model: Models
) -> None:
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
    updates = workbench.table("paper_b_sec4_updates")
    assert updates["layer"].tolist() == list(range(N_LAYERS))
    assert set(updates["prompt"]) == {"w4 w40 w11"}
    assert updates["share"].between(1 / 128, 1).all()
    model = small_model("gpt2")
    run = ffn.Updates.run(model, matlens.make_prompts(model, ["w4 w40 w11"]), progress=False)
    expected = run.table(ffn.Projection.from_model(model), k=1, n_tokens=4)
    assert_table(workbench.out / "paper_b_sec4_updates.csv", expected.assign(prompt="w4 w40 w11"))


SMALL = ("--per-layer", 2, "--top", 6)


def fill(sheets: Path, folder: Path, digits: str) -> None:
    """Fill in a sheet: tokens that end in some digits are one pattern, semantic."""
    folder.mkdir()
    tokens = pd.read_csv(sheets / "tokens.csv", dtype=str, keep_default_na=False)
    ends = tokens["token"].str.strip("‹›").str[-1:].isin(list(digits))
    tokens.assign(patterns=ends.map({True: "1", False: ""})).to_csv(folder / "tokens.csv", index=False)
    patterns = pd.read_csv(sheets / "patterns.csv", dtype=str, keep_default_na=False)
    patterns.loc[patterns["pattern"] == "1", "class"] = "semantic"
    patterns.to_csv(folder / "patterns.csv", index=False)


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_filled_sheets_of_concepts_give_shares_figure_and_agreement(
    model: str, workbench: Workbench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workbench.run(SHEETS, model, *SMALL)
    key = workbench.table(SHEETS, keep_default_na=False)
    assert key.groupby(["kind", "layer"])["item"].nunique().tolist() == [2] * 9
    sheets = workbench.out / f"{SHEETS}_sheets"
    assert sorted(path.name for path in sheets.iterdir()) == ["patterns.csv", "sheet.html", "tokens.csv"]
    for annotator, digits in (("anna", "0123456"), ("ben", "3456789")):
        fill(sheets, tmp_path / annotator, digits)
    capsys.readouterr()
    filled = ["--filled", tmp_path / "anna", "--filled", tmp_path / "ben"]
    run(SHEETS, *filled, "--out", workbench.out)
    printed = capsys.readouterr().out
    shares = workbench.table(f"{SHEETS}_shares")
    expected, marked = [], []
    for digits in ("0123456", "3456789"):
        hits = key["token"].str[-1:].isin(list(digits)).groupby(key["item"]).sum()
        marked.append(hits)
        expected.append(hits.where(hits >= 4, 0) / 6)
    kinds = key.groupby("item")["kind"].first()
    for kind in ("values", "random", "updates"):
        wanted = np.mean([covered[kinds == kind].mean() for covered in expected])
        same = shares["layer"].isna() & (shares["method"] == kind) & (shares["metric"] == "covered")
        assert shares[same]["value"].item() == pytest.approx(wanted)
        assert f"{wanted:.1%}" in printed
    small = np.mean([((of_item > 0) & (of_item < 4)).sum() for of_item in marked])
    assert small > 0
    assert f"Patterns of fewer than 4 tokens are not counted: {small:.4g} for each annotator" in printed
    agreement = workbench.table(f"{SHEETS}_agreement")
    assert set(agreement["one"] + agreement["other"]) == {"annaben"}
    assert workbench.origin(f"{SHEETS}_shares")["annotators"] == ["anna", "ben"]
    workbench.assert_figure(f"{SHEETS}_shares")


def test_sheets_of_concepts_that_do_not_belong_are_told(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in ("gpt2", "llama"):
        Workbench(corpora, model_folder, tmp_path / model, capsys).run(SHEETS, model, *SMALL)
    fill(tmp_path / "gpt2" / f"{SHEETS}_sheets", tmp_path / "anna", "01234")
    filled = ["--filled", tmp_path / "anna"]
    assert "a sheet of another sample" in refused(SHEETS, capsys, *filled, "--out", tmp_path / "llama")
    assert "cannot be read as the key to the sheets" in refused(
        SHEETS, capsys, *filled, "--out", tmp_path / "absent"
    )
    assert not (tmp_path / "absent").exists()
    assert not list(tmp_path.glob(f"*/{SHEETS}_shares*"))


# What the tables hold is what the library gives for the options; its own tests compare that with loops


Models = Callable[[str], Any]


@pytest.fixture
def job(workbench: Workbench, small_model: Models) -> Callable[[str, int], tuple[Any, Any]]:
    """The model and the examples of a script's job of so many sentences."""

    def of(model: str, sentences: int) -> tuple[Any, Any, Any]:
        loaded = small_model(model)
        _, part = matlens.load_corpus(str(workbench.words)).split(n_train=1, n_validation=sentences)
        return loaded, matlens.make_examples(loaded, part)

    return of


def test_tables_of_events_are_those_of_the_trace(
    workbench: Workbench, job: Callable[[str, int], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = drawn(monkeypatch, paper_b, "events_figure", "layers_figure", "saturation_figure")
    workbench.run("paper_b_fig3_events", "llama-sinks", "--sentences", 60, "--dominant", 3)
    model, examples = job("llama-sinks", 60)
    trace = ffn.Trace.run(model, examples, k=3, progress=False)
    at_sinks = examples.tokens[examples.offsets[:-1] + examples.positions]
    assert trace.sinks.tolist() == np.isin(at_sinks, SINK_TOKENS).tolist()
    assert 0 < int(trace.sinks.sum()) < 30
    tables = sub_updates.event_tables(trace, model)
    for name, table in zip(EVENT_TABLES, (tables.events, tables.scores, tables.saturation), strict=True):
        assert_table(workbench.out / f"{name}.csv", table)
    assert workbench.origin(EVENT_TABLES[0])["n_sinks"] == int(trace.sinks.sum())
    of_figures = tables.events, tables.scores[tables.scores["read"] == "score"], tables.saturation
    for (table,), expected in zip(figures.values(), of_figures, strict=True):
        pd.testing.assert_frame_equal(table, expected)


@pytest.mark.parametrize("threshold", [None, 2e-4])
def test_tables_of_clusters_are_those_of_the_trace(
    threshold: float | None, workbench: Workbench, job: Callable[[str, int], tuple[Any, Any]]
) -> None:
    options = ["--sentences", 20, "--clusters", 30, "--beside", 50]
    options += [] if threshold is None else ["--threshold", threshold]
    workbench.run("paper_b_sec5_clusters", "llama-sinks", *options)
    model, examples = job("llama-sinks", 20)
    trace = ffn.Trace.run(model, examples, progress=False)
    clusters = ffn.Clusters.fit(ffn.ValueVectors(model), 30)
    words = matlens.load_corpus(str(workbench.words))
    tables = sub_updates.extreme_tables(
        trace, model, clusters, TokenFrequency.from_corpus(words, model.tokenizer, 60),
        prediction_confidence(model, examples), threshold=threshold, n_drawn=50, seed=0,
    )  # fmt: skip
    for name, table in zip(CLUSTER_TABLES, (tables.activity, tables.groups, tables.places), strict=True):
        assert_table(workbench.out / f"{name}.csv", table)
    origin = workbench.origin(CLUSTER_TABLES[0])
    assert origin["thresholds"] == pytest.approx(tables.thresholds)
    at_sinks = np.isin(examples.tokens[examples.offsets[:-1] + examples.positions], SINK_TOKENS)
    assert origin["n_sinks"] == at_sinks.sum()
    frequency = TokenFrequency.from_corpus(words, model.tokenizer, 60)
    assert origin["n_unseen"] == (frequency.counts == 0).sum()
    assert origin["n_common"] == frequency.common.sum()


def test_tables_beside_those_of_clusters_are_those_of_their_names(
    workbench: Workbench, job: Callable[[str, int], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of each vector alone, how few clusters it takes, the largest, and how ways to cluster agree."""
    options = ["--sentences", 20, "--clusters", 30, "--beside", 50, "--threshold", 2e-4, "--compared", 90]
    workbench.run("paper_b_sec5_clusters", "llama-sinks", *options)
    model, examples = job("llama-sinks", 20)
    trace, values = ffn.Trace.run(model, examples, progress=False), ffn.ValueVectors(model)
    words = matlens.load_corpus(str(workbench.words))
    fitted, of_each = (ffn.Clusters.fit(values, n, progress=False) for n in (30, len(values)))
    together, alone = (
        sub_updates.extreme_tables(
            trace, model, clusters, TokenFrequency.from_corpus(words, model.tokenizer, 60),
            prediction_confidence(model, examples), threshold=2e-4, n_drawn=50, seed=0,
        )
        for clusters in (fitted, of_each)
    )  # fmt: skip
    assert not together.groups.equals(alone.groups)
    extreme = together.activity[together.activity["sub_updates"] == "extreme"]
    by_read = [of_read.iloc[:10] for _, of_read in extreme.groupby("read", sort=False)]
    assert any(len(extreme[extreme["read"] == of_read["read"].iloc[0]]) > 10 for of_read in by_read)
    for name, table in {
        "alone": alone.groups,
        "few": sub_updates.concentration(together.activity, fitted),
        "largest": pd.concat(by_read).sort_index().drop(columns=["members", "sub_updates"]),
        "ways": sub_updates.compare_linkages(values, 30, n_vectors=90, seed=0),
    }.items():
        assert_table(workbench.out / f"paper_b_sec5_{name}.csv", table)


def test_overlap_and_dominance_are_those_of_the_options(
    workbench: Workbench, job: Callable[[str, int], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = drawn(monkeypatch, paper_b, "shares_by_layer")
    workbench.run("paper_b_fig4_overlap", "gpt2", "--random", 9, "--top", 5)
    workbench.run("paper_b_fig6_dominance", "gpt2", "--sentences", 12, "--dominant", 4)
    model, examples = job("gpt2", 12)
    overlap = sub_updates.norm_overlap(model, n_random=9, k=5, progress=False)
    assert_table(workbench.out / "paper_b_fig4_overlap.csv", overlap)
    dominance = sub_updates.dominance(model, examples, k=4, progress=False)
    assert_table(workbench.out / "paper_b_fig6_dominance.csv", dominance)
    of_overlap, of_dominance = figures["shares_by_layer"]
    assert set(of_overlap["method"]) == {"values", "random"}
    assert len(of_overlap) == 2 * N_LAYERS
    assert set(of_dominance["metric"]) == {"share"}
    assert set(of_dominance["method"]) == {"dominant", "random"}


def test_ways_of_leaving_early_are_those_of_the_options(
    workbench: Workbench, job: Callable[[str, int], tuple[Any, Any]]
) -> None:
    options = [
        "--sentences", 40, "--dominant", 3, "--clusters", 20, "--splits", 2, "--folds", 2, "--fewest", 2,
        "--strength", 0.01, "--ridge-only", "--beside", 30,
    ]  # fmt: skip
    workbench.run(EXITS, "gpt2", *options)
    model, examples = job("gpt2", 40)
    trace = ffn.Trace.run(model, examples, k=3, progress=False)
    clusters = [ffn.Clusters.fit(ffn.ValueVectors(model), n) for n in (20, 30)]
    comparison = exits.compare_exits(
        model, trace, clusters[0],
        matlens.collect(model, examples, exits.classifier_sites(model), progress=False),
        seeds=2, folds=2, fewest=2, strengths=[0.01], kinds=[exits.RIDGE], progress=False,
    )  # fmt: skip
    expected = exits.summarize_exits(comparison.judged, N_LAYERS)
    table = workbench.table(EXITS)
    pd.testing.assert_frame_equal(table[list(expected)], expected, check_dtype=False)
    assert workbench.origin(EXITS)["penalties"] == comparison.penalties
    readings, expected = workbench.table("paper_b_sec6_readings"), exits.compare_readings(trace, clusters)
    pd.testing.assert_frame_equal(readings[list(expected)], expected, check_dtype=False)


def test_concepts_that_are_found_are_those_of_the_search(
    workbench: Workbench, job: Callable[[str, int], tuple[Any, Any]]
) -> None:
    name = "paper_b_table1_concept_vectors"
    workbench.run(name, "llama", "--top", 20, "--vectors", 3, "--per-layer", 2)
    model, words = job("llama", 2)[0], matlens.load_corpus(str(workbench.words))
    similarity = WordSimilarity.fit(words.sentences, seed=0)
    searched = annotation.search_concepts(model, similarity, k=20, progress=False)
    table = annotation.pattern_shares(searched, str(model.cfg.model_name), words.name, k=20)
    assert_table(workbench.out / f"{name}.csv", table)
    best = [
        annotation.distinct_concepts(searched[method], n=3, per_layer=2).assign(method=method)
        for method in ("values", "random")
    ]
    assert_table(workbench.out / f"{name}_vectors.csv", pd.concat(best))


@torch.inference_mode()
def perplexity_by_hand(plain: Any, windows: Sequence[Sequence[int]]) -> float:
    lost, counted = 0.0, 0
    for window in windows:
        ids = torch.tensor([window])
        lost += float(plain(ids, labels=ids).loss) * (ids.shape[1] - 1)
        counted += ids.shape[1] - 1
    return math.exp(lost / counted)


def test_every_line_of_control_is_that_of_its_change(
    workbench: Workbench, small_model: Models, plain_model: Models, tmp_path: Path
) -> None:
    """Coefficients are set, announcements are read, and value vectors are those of their method."""
    options = [
        *control_options(tmp_path),
        "--value",
        0.5,
        "--value",
        4,
        "--vector",
        "L0D1",
        "--vector",
        "L-1D2",
    ]
    workbench.run(CONTROL, "gpt2", *options, "--samples", 0)
    table, vectors = workbench.table(CONTROL), workbench.origin(CONTROL)["vectors"]
    model, plain = small_model("gpt2"), plain_model("gpt2")
    windows = make_windows(model, matlens.load_corpus(str(workbench.words)), size=12, most=5)
    read = [tokens.tolist() for tokens in np.split(windows.tokens, windows.offsets[1:-1])]
    e, word = plain_unembedding(plain), model.tokenizer.convert_tokens_to_ids("w2")
    ranks = {
        f"L{layer}D{i}": (e @ v).argsort(descending=True).tolist().index(word)
        for layer in range(N_LAYERS)
        for i, v in enumerate(plain_values("gpt2", plain, layer))
    }
    assert sorted(ranks[value] for value in vectors["words, 3 vectors"]) == sorted(ranks.values())[:3]
    measured = table[table["metric"] == "perplexity"].set_index(["method", "coefficient"])["value"]
    assert measured["unchanged"].item() == pytest.approx(perplexity_by_hand(plain, read), rel=1e-4)
    for method, names in vectors.items():
        for coefficient in (0.5, 4.0):
            with controlled_by_hand("gpt2", plain, dict.fromkeys(names, coefficient)):
                expected = perplexity_by_hand(plain, read)
            assert measured[method, coefficient] == pytest.approx(expected, rel=1e-4)
    debiasing = control.SelfDebiasing(["threat"])
    banned = control.word_filter(model.tokenizer, ["w9", "w10 w11"])
    prompts = (tmp_path / "prompts.txt").read_text().splitlines()
    changes = [
        control.ModelChange("unchanged"),
        *(
            control.ModelChange(method, coefficient, tuple(names))
            for method, names in vectors.items()
            for coefficient in (0.5, 4.0)
        ),
        control.ModelChange("Self-Debiasing", processor=debiasing),
        control.ModelChange("WordFilter", processor=banned),
    ]
    grader = control.make_grader("profanity-check")
    whole, texts = control.compare_control(model, changes, {"prompts.txt": prompts}, windows, grader)
    assert_table(workbench.out / f"{CONTROL}.csv", whole)
    assert_table(workbench.out / f"{CONTROL}_texts.csv", texts)
    debiased = measured["Self-Debiasing"].item()
    assert debiased == pytest.approx(control.debiased_losses(model, windows, debiasing).perplexity().value)
