"""The analyses of paper B run on small models, and their tables agree with one another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from analysing import CONTROL, EXITS, OF_FFNS, SENTENCES, SHEETS, TRACED, refused, run
from conftest import N_LAYERS

NO_CORPUS = ("paper_b_fig4_overlap",)


@pytest.mark.parametrize("model", ["gpt2", "bert", "gemma2"])
@pytest.mark.parametrize("name", [name for name in OF_FFNS if name not in (SHEETS, CONTROL, EXITS, *TRACED)])
def test_analyses_of_ffns_run_on_small_models(
    name: str, model: str, corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    own = {
        "paper_b_fig4_overlap": ["--random", 9, "--top", 5], **SENTENCES,
        "paper_b_table1_concept_vectors": ["--top", 8, "--vectors", 4],
    }  # fmt: skip
    given = [] if name in NO_CORPUS else ["--corpus", corpora / "words.txt"]
    run(name, "--model", model_folder(model), *given, *own[name], "--device", "cpu", "--out", tmp_path)
    table, told = pd.read_csv(tmp_path / f"{name}.csv"), json.loads((tmp_path / f"{name}.json").read_text())
    assert set(table["layer"].dropna()) == set(range(N_LAYERS))
    assert table["value"].between(0, 1).all()
    assert told["seed"] == 0
    assert told["model"]["base_model_name_or_path"].endswith(model)
    assert told["command"].startswith(f"{name}.py --model")
    for suffix, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert (tmp_path / f"{name}.{suffix}").read_bytes().startswith(start)


EVENT_TABLES = ("paper_b_table4_events", "paper_b_fig3_scores", "paper_b_table9_saturation")


@pytest.mark.parametrize("model", ["gpt2", "gemma2"])
def test_events_are_counted_alike_in_all_tables_of_one_trace(
    model: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--model", model_folder(model), "--corpus", corpora / "words.txt", "--sentences", 40]
    options += ["--dominant", 3, "--device", "cpu", "--out", tmp_path]
    run("paper_b_fig3_events", *options)
    events, layers, frequency = (pd.read_csv(tmp_path / f"{name}.csv") for name in EVENT_TABLES)
    assert set(events["read"]) == set(layers["read"]) == {"score", "lift", "odds"}
    assert set(layers["layer"]) == set(range(N_LAYERS))
    for row in events.itertuples():
        alike = layers[layers["examples"] == row.examples]
        for column in ("event", "read", "method", "metric"):
            alike = alike[alike[column] == getattr(row, column)]
        assert alike["n"].sum() == row.n
        assert (alike["value"] * alike["n"]).sum() / row.n == pytest.approx(row.value, rel=1e-4, abs=1e-7)
    by_ffn = frequency[frequency["method"] == "ffn"]["value"].sum()
    whole = events[(events["event"] == "saturation") & (events["examples"] == "all examples")]
    assert set(whole["n"]) == {round(40 * by_ffn)}
    for name in EVENT_TABLES:
        told = json.loads((tmp_path / f"{name}.json").read_text())
        assert (told["seed"], told["k"], told["data"]["n"]) == (0, 3, 40)
        for suffix, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
            assert (tmp_path / f"{name}.{suffix}").read_bytes().startswith(start)
    # Given again, nothing is run: the trace is there.
    before = [(tmp_path / f"{name}.csv").read_bytes() for name in EVENT_TABLES]
    monkeypatch.setattr("matlens.ffn.trace.stream", None)
    run("paper_b_fig3_events", *options)
    assert [(tmp_path / f"{name}.csv").read_bytes() for name in EVENT_TABLES] == before


def test_a_model_without_events_is_told(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its random weights, the small BERT has one candidate from the start."""
    options = ["--model", model_folder("bert"), "--corpus", corpora / "words.txt", "--sentences", 12]
    said = refused("paper_b_fig3_events", capsys, *options, "--device", "cpu", "--out", tmp_path)
    assert "error: There is no saturation event among 12 examples" in said
    assert not list(tmp_path.glob("paper_b*"))


CLUSTER_TABLES = ("paper_b_sec5_clusters", "paper_b_sec5_groups", "paper_b_sec5_places")


@pytest.mark.parametrize("model", ["gpt2", "bert", "gemma2"])
def test_extreme_sub_updates_are_counted_alike_by_cluster_and_by_group(
    model: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--model", model_folder(model), "--corpus", corpora / "words.txt", "--sentences", 20]
    options += ["--clusters", 30, "--beside", 50, "--device", "cpu", "--out", tmp_path]
    run("paper_b_sec5_clusters", *options)
    clusters, groups, places = (pd.read_csv(tmp_path / f"{name}.csv") for name in CLUSTER_TABLES)
    for read in ("score", "lift"):
        own, told, at = (table[table["read"] == read] for table in (clusters, groups, places))
        assert (at["per_example"] * at["examples"]).sum() == pytest.approx(6)
        extreme, drawn = (own[own["sub_updates"] == name] for name in ("extreme", "drawn"))
        assert extreme["extremes"].sum() == 6  # a hundredth of 20 x 3 x 10
        assert drawn["extremes"].sum() == 50
        for table in (extreme, drawn):
            assert table["share"].sum() == pytest.approx(1)
        for kind in told["method"].unique():
            values = told[told["method"] == kind].set_index("metric")["value"]
            part = extreme if kind == "all" else extreme[extreme["kind"] == kind]
            assert values["share"] == pytest.approx(part["share"].sum())
            assert values["clusters"] == part["cluster"].nunique()
            assert values["raised"] == pytest.approx(
                (part["raised"] * part["share"]).sum() / part["share"].sum()
            )
    for name in CLUSTER_TABLES:
        origin = json.loads((tmp_path / f"{name}.json").read_text())
        assert (origin["n_clusters"], origin["method"], origin["data"]["n"]) == (30, "exact", 20)
        assert origin["thresholds"]["score"] > 0
    for suffix, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert (tmp_path / f"{CLUSTER_TABLES[0]}.{suffix}").read_bytes().startswith(start)
    # Given again, nothing is traced or clustered: both are there.
    before = [(tmp_path / f"{name}.csv").read_bytes() for name in CLUSTER_TABLES]
    monkeypatch.setattr("matlens.ffn.trace.stream", None)
    monkeypatch.setattr("matlens.ffn.clusters.agglomerate", None)
    run("paper_b_sec5_clusters", *options)
    assert [(tmp_path / f"{name}.csv").read_bytes() for name in CLUSTER_TABLES] == before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--clusters", 385], "385 clusters of 384 value vectors: expected 1 to 384"),
        (["--clusters", 30, "--threshold", 1e9], "No score passes 1e+09 either way: the largest is"),
        (["--clusters", 30, "--threshold", 0], "The threshold is 0.0. Expected a positive number"),
    ],
)
def test_what_gives_no_extreme_clusters_is_told(
    options: list[object],
    told: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", model_folder("gpt2"), "--corpus", corpora / "words.txt", "--sentences", 12]
    assert told in refused("paper_b_sec5_clusters", capsys, *given, *options, "--out", tmp_path)
    assert not list(tmp_path.glob("paper_b*"))


def control_options(tmp_path: Path) -> list[object]:
    (tmp_path / "prompts.txt").write_text("w1 w2 w3\nw4\nw5 w6 w7 w8\n")
    (tmp_path / "banned.txt").write_text("w9\nw10 w11\n")
    return [
        "--prompts", tmp_path / "prompts.txt", "--banned", tmp_path / "banned.txt", "--word", "w2", "--n", 3,
        "--sentences", 6, "--announce", "threat", "--device", "cpu", "--out", tmp_path / "out",
    ]  # fmt: skip


@pytest.mark.parametrize(("model", "samples"), [("gpt2", 2), ("gemma2", 0)])
def test_control_and_its_baselines_are_in_one_table(
    model: str,
    samples: int,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, out = CONTROL, tmp_path / "out"
    given = ["--model", model_folder(model), "--corpus", corpora / "words.txt", *control_options(tmp_path)]
    values = ["--value", 0.5, "--value", 4]
    run(name, *given, *values, "--vector", "L0D1", "--vector", "L-1D2", "--samples", samples)
    table, told = pd.read_csv(out / f"{name}.csv"), json.loads((out / f"{name}.json").read_text())
    control = ["picked, 2 vectors", "words, 3 vectors", "graded, 3 vectors"]
    methods = ["unchanged", *control, "Self-Debiasing", "WordFilter"]
    assert table["method"].unique().tolist() == methods
    assert told["vectors"]["picked, 2 vectors"] == ["L0D1", f"L{N_LAYERS - 1}D2"]
    assert {method: len(names) for method, names in told["vectors"].items()} == dict(
        zip(control, (2, 3, 3), strict=True)
    )
    texts = pd.read_csv(out / f"{name}_texts.csv", keep_default_na=False)
    assert len(texts) == (1 + 2 * 3 + 2) * 3 * (samples or 1)
    for (method, value), own in table.groupby(["method", table["coefficient"].fillna(0)]):
        assert (value > 0) == (method in control)
        found = own.set_index("metric")
        assert ("perplexity" in found.index) == (method != "WordFilter")
        same = texts[(texts["method"] == method) & (texts["coefficient"] == (str(value) if value else ""))]
        assert found.loc["toxic", "value"] == pytest.approx((same["toxicity"] >= 0.5).mean())
        assert found.loc["score", "value"] == pytest.approx(same["toxicity"].mean())
        assert found.loc["score", "n"] == 3
        assert "corpus" not in found or set(own[own["metric"] == "perplexity"]["n"]) <= {6}
    unchanged = table[table["method"] == "unchanged"].set_index("metric")["value"]
    assert (unchanged["score_change"], unchanged["perplexity_ratio"]) == (0, 1)
    pictures = [(out / f"{name}.{suffix}").read_bytes()[:4] for suffix in ("png", "pdf")]
    assert pictures == [b"\x89PNG", b"%PDF"]
    said = capsys.readouterr().out
    assert all(method in said for method in methods)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--grader", "wine"], "There is no grader 'wine'"),
        (["--vector", "wine"], "'wine' is not a value vector"),
        (["--vector", "L9D1"], "Layer 9 is out of range"),
        (["--word", "wine"], "The word 'wine' is not in the model's vocabulary"),
        (["--prompts", "absent.txt"], "There is no file 'absent.txt'. Expected prompts"),
        (["--banned", "absent.txt"], "There is no file 'absent.txt'"),
        (["--challenging"], "marks no prompt as challenging"),
        (["--announce", "wine"], "'wine' cannot be announced"),
        (["--value", "nan"], "nan is no value for the coefficient"),
    ],
)
def test_what_does_not_suit_control_is_told(
    options: list[object],
    told: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", model_folder("llama"), "--corpus", corpora / "words.txt", *control_options(tmp_path)]
    assert told in refused(CONTROL, capsys, *given, *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("model", "sentences"), [("gpt2", 90), ("gemma2", 40), ("gptj", 40)])
def test_ways_of_leaving_early_are_in_one_table(
    model: str,
    sentences: int,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--model", model_folder(model), "--corpus", corpora / "words.txt", "--sentences", sentences]
    options += ["--dominant", 3, "--clusters", 20, "--splits", 2, "--folds", 2, "--fewest", 2]
    options += ["--strength", 0.01]
    options += ["--device", "cpu", "--out", tmp_path]
    run(EXITS, *options)
    said = capsys.readouterr()
    table, told = pd.read_csv(tmp_path / f"{EXITS}.csv"), json.loads((tmp_path / f"{EXITS}.json").read_text())
    numbers = table.set_index("method")
    mapped = "confidence, mat" in numbers.index
    assert mapped == (sentences == 90), "72 training examples are two for each dimension"
    assert mapped != ("mat is left out: 32 training examples" in said.err)
    assert numbers.loc["where it is made", "accuracy"] == 1
    assert (table["n"] == sentences).all()
    assert (table["seeds"] == 2).all()
    for name, each in told["accuracy"].items():
        row = numbers.loc[name]
        assert row["accuracy"] == pytest.approx(np.mean(each))
        assert row["accuracy_sd"] == pytest.approx(np.std(each, ddof=1))
        assert row["chance"] == pytest.approx(np.mean(told["chance"][name]))
        assert row["saved_share"] == pytest.approx(row["saved"] / N_LAYERS)
        assert f"{100 * row['accuracy']:.1f} ± " in said.out
    assert (told["splits"], told["folds"], told["k"], told["clusters"]["n_clusters"]) == (2, 2, 3, 20)
    assert all(name.endswith(" 0.01") for chosen in told["penalties"].values() for name in chosen)
    for suffix, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert (tmp_path / f"{EXITS}.{suffix}").read_bytes().startswith(start)
    # Given again, nothing is run and nothing is clustered: all is there, and the numbers are the same.
    before = (tmp_path / f"{EXITS}.csv").read_bytes()
    (labels,) = tmp_path.glob("clusters/*/labels.npy")
    written = labels.stat().st_mtime_ns
    for place in ("ffn.trace.stream", "collecting.stream"):
        monkeypatch.setattr(f"matlens.{place}", None)
    run(EXITS, *options)
    assert (tmp_path / f"{EXITS}.csv").read_bytes() == before
    assert labels.stat().st_mtime_ns == written


@pytest.mark.parametrize(("option", "told"), [
    (("--clusters", 1000), "1,000 clusters of 144 value vectors"), (("--strength", 0), "Invalid value"),
    (("--sentences", 9), "Invalid value"),
])  # fmt: skip
def test_a_comparison_that_cannot_be_is_told(
    option: tuple[str, float],
    told: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--model", model_folder("llama"), "--corpus", corpora / "words.txt", "--sentences", 12]
    options += ["--clusters", 20, *option, "--device", "cpu", "--out", tmp_path]
    assert told in refused(EXITS, capsys, *options)
    assert not list(tmp_path.glob(f"{EXITS}*"))


def test_the_vectors_that_were_found_are_written_and_printed(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "paper_b_table1_concept_vectors"
    options = ["--model", model_folder("llama"), "--corpus", corpora / "words.txt", "--device", "cpu"]
    run(name, *options, "--top", 20, "--vectors", 3, "--out", tmp_path)
    said = capsys.readouterr().out
    found = pd.read_csv(tmp_path / f"{name}_vectors.csv", keep_default_na=False)
    table = pd.read_csv(tmp_path / f"{name}.csv")
    overall = table[table["layer"].isna() & (table["metric"] == "pattern") & (table["k"] == 5)]
    for method, value, n in overall[["method", "value", "n"]].itertuples(index=False, name=None):
        if method != "dealt":
            assert (value > 0) == (method in set(found["method"]))
        assert f"{value:.3%} ({round(value * n)})" in said
    for row in found[found["method"] == "values"].itertuples():
        assert str(row.value) in said
        assert row.words >= 5
        tokens = str(row.top).replace("␣", "").split(", ")
        assert len(tokens) == 20
        assert set(str(row.pattern).split(", ")) <= set(tokens)


def first_run(name: str, model: Path, corpus: Path, out: Path) -> pd.DataFrame:
    run(
        name,
        "--model",
        model,
        "--corpus",
        corpus,
        "--per-layer",
        2,
        "--top",
        6,
        "--device",
        "cpu",
        "--out",
        out,
    )
    return pd.read_csv(out / f"{name}.csv", keep_default_na=False)


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
    model: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = first_run(SHEETS, model_folder(model), corpora / "words.txt", tmp_path / "out")
    assert key.groupby(["kind", "layer"])["item"].nunique().tolist() == [2] * 9
    sheets = tmp_path / "out" / f"{SHEETS}_sheets"
    assert sorted(path.name for path in sheets.iterdir()) == ["patterns.csv", "sheet.html", "tokens.csv"]
    for annotator, digits in (("anna", "0123456"), ("ben", "3456789")):
        fill(sheets, tmp_path / annotator, digits)
    capsys.readouterr()
    filled = ["--filled", tmp_path / "anna", "--filled", tmp_path / "ben"]
    run(SHEETS, *filled, "--out", tmp_path / "out")
    said = capsys.readouterr().out
    found = pd.read_csv(tmp_path / "out" / f"{SHEETS}_shares.csv")
    expected = []
    for digits in ("0123456", "3456789"):
        hits = key["token"].str[-1:].isin(list(digits)).groupby(key["item"]).sum()
        expected.append(hits.where(hits >= 4, 0) / 6)
    kinds = key.groupby("item")["kind"].first()
    for kind in ("values", "random", "updates"):
        wanted = np.mean([one[kinds == kind].mean() for one in expected])
        same = found["layer"].isna() & (found["method"] == kind) & (found["metric"] == "covered")
        assert found[same]["value"].item() == pytest.approx(wanted)
        assert f"{wanted:.1%}" in said
    assert "Patterns of fewer than 4 tokens are not counted" in said
    agreed = pd.read_csv(tmp_path / "out" / f"{SHEETS}_agreement.csv")
    assert set(agreed["one"] + agreed["other"]) == {"annaben"}
    assert json.loads((tmp_path / "out" / f"{SHEETS}_shares.json").read_text())["annotators"] == [
        "anna",
        "ben",
    ]
    for suffix, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert (tmp_path / "out" / f"{SHEETS}_shares.{suffix}").read_bytes().startswith(start)


def test_sheets_of_concepts_that_do_not_belong_are_told(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in ("gpt2", "llama"):
        first_run(SHEETS, model_folder(model), corpora / "words.txt", tmp_path / model)
    fill(tmp_path / "gpt2" / f"{SHEETS}_sheets", tmp_path / "anna", "01234")
    filled = ["--filled", tmp_path / "anna"]
    assert "a sheet of another sample" in refused(SHEETS, capsys, *filled, "--out", tmp_path / "llama")
    assert "cannot be read as the key to the sheets" in refused(
        SHEETS, capsys, *filled, "--out", tmp_path / "absent"
    )
    assert not (tmp_path / "absent").exists()
    assert not list(tmp_path.glob(f"*/{SHEETS}_shares*"))
