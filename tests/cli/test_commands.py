"""A command is its Python call: it prints or writes what the call gives, and refuses what it refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import typer
from command_lines import cells, run_command
from conftest import D_MODEL, N_LAYERS, WORDS, make_sentences
from hub_stand_in import TOKEN
from small_lenses import make_lens
from transformer_lens.tools.analysis import JacobianLens

import matlens
from matlens import Lens, make_prompts
from matlens.cli.app import app
from matlens.explorer import explore, write_value_pages
from matlens.ffn import Clusters, Projection, Updates, ValueVectors
from matlens.io.tables import COLUMNS, write_results
from matlens.lens import LensConfig, compare_lenses
from matlens.linearity import atlas_seconds
from matlens.models import visible
from matlens.study.plan import Shape, format_bytes, plan_study

Rows = list[list[str]]
PROMPT = "w3 w14 w15 w9"


def number(value: float) -> str:
    return f"{value:.3f}"


def words_of(click: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of all commands."""
    for name, command in getattr(click, "commands", {}).items():
        yield from words_of(command, (*words, name))
    if not hasattr(click, "commands"):
        yield words


def test_every_command_has_a_help_and_is_listed(commands):
    for words in words_of(typer.main.get_command(app)):
        assert f" {' '.join(words)} [OPTIONS]" in commands.run(*words, "--help")
        assert words[-1] in commands.run(*words[:-1], "--help")


def shown(read: str) -> Callable[[Any], Rows]:
    """Both ends of two value vectors."""

    def rows(model: Any) -> Rows:
        made = {
            "plain": Projection.from_model,
            "norm": Projection.after_norm,
            "head": Projection.through_head,
        }
        table = made[read](model).table(ValueVectors(model), ["L1D7", "L2D0"], k=4)
        lines = []
        for _name, scores in table.groupby("value", sort=False):
            sides = (scores[scores["side"] == side].itertuples() for side in ("top", "bottom"))
            for up, down in zip(*sides, strict=True):
                lines.append([str(up.rank), up.token, number(up.score), down.token, number(down.score)])
        return lines

    return rows


def searched(model: Any) -> Rows:
    values, projection = ValueVectors(model), Projection.from_model(model)
    table = projection.search(values, projection.top_of_all(values, 6), ["w7", "w30"])
    return [[row.value, str(row.words), str(row.rank), number(row.score)] for row in table.itertuples()][:5]


def promoting(model: Any) -> Rows:
    table = Projection.from_model(model).promoting(ValueVectors(model), ["w7", "w9"], 3, progress=False)
    return [[row.value, number(row.score), number(row.lift)] for row in table.itertuples()]


def updated_inside(model: Any) -> Rows:
    """Sub-updates of two layers at the third token, which knows nothing of later ones."""
    updates = Updates.run(model, make_prompts(model, ["w1 w2 w3"]), [0, 2], progress=False)
    table = updates.table(Projection.from_model(model), k=4)
    shares = table.groupby("layer")["share"].sum()
    return [
        [
            str(row.layer), f"{shares[row.layer]:.1%}", str(row.rank), row.value, number(row.coefficient),
            f"{row.share:.1%}", row.promoted,
        ]
        for row in table.itertuples()
    ]  # fmt: skip


def layers_shown(model: Any) -> Rows:
    best = Lens.identity(model).trajectory(PROMPT).top_tokens()
    return [
        [str(layer), *(visible(best[layer][place][0]) for place in (2, 3))] for layer in range(N_LAYERS + 1)
    ]


def followed(model: Any) -> Rows:
    """The prediction after the prompt layer by layer, and the rank of a word."""
    read = Lens.identity(model).trajectory(PROMPT)
    table = read.to_dataframe(["w7"]).query("position == 3")
    assert table["answer_rank"].tolist() == [int(rank[3]) for rank in read.rank("w7").values()]
    return [
        [
            str(row.layer), visible(row.predicted), *map(number, (row.probability, row.entropy, row.kl)),
            str(row.rank), str(row.answer_rank),
        ]
        for row in table.itertuples()
    ]  # fmt: skip


OF_UPDATE = ["--layer", "-1", "--layer", "0", "--dominant", "4", "--position", "-3"]
TRAJECTORY = ["--token", "w7", "--color", "kl", "--plot", "{out}/a.png", "--csv", "{out}/a.csv"]
# The words of a command, its model, the first cells of its tables' rows, and another text that it prints.
CALLS: list[tuple[list[str], str, Callable[[Any], Rows], str]] = [
    *(
        (["values", "show", "L1D7", "L-1D0", "--tokens", "4", "--read", read], model, shown(read), "L2D0")
        for read, model in (("plain", "gpt2"), ("norm", "gpt2"), ("head", "bert"))
    ),
    (
        ["values", "search", "w7", "w30", "--top-k", "6", "--limit", "5", "--tokens", "2"], "gpt2", searched,
        " of 384 value vectors",
    ),
    (["values", "promoting", "w7", "w9", "--limit", "3"], "llama", promoting, "By lift"),
    (["update", "w1 w2 w3 w4 w5", *OF_UPDATE], "gpt2", updated_inside, "At token 2, 'w3'"),
    (["lens", "show", PROMPT, "--last", "2"], "llama", layers_shown, PROMPT),
    (["lens", "trajectory", PROMPT, *TRAJECTORY], "llama", followed, "At token 3, 'w9'"),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join((call[1], *call[0])).replace("/", ""))
def test_a_command_prints_what_its_call_gives(call, commands, small_model, tmp_path):
    words, name, rows, more = call
    expected = rows(small_model(name))
    given = [word.replace("{out}", str(tmp_path / "out")) for word in words]
    printed = commands.run(*given, model=name)
    assert [row[: len(wanted)] for row, wanted in zip(cells(printed), expected, strict=True)] == expected
    assert more in printed


def test_clusters_are_shown_with_the_vectors_that_are_asked_for(commands, small_model, tmp_path, monkeypatch):
    values = ValueVectors(small_model("gpt2"))
    clusters = Clusters.fit(values, 120, linkage="complete", progress=False)
    largest, (first, second) = (
        [str(values.at(row)) for row in clusters.members(n).tolist()] for n in (0, 119)
    )
    assert len(largest) > 4
    options = ["--clusters", 120, "--linkage", "complete", "--read", "norm", "--tokens", 2, "--out", tmp_path]
    given = ["values", "cluster", second, *largest[-4:], *options]
    printed = commands.run(*given, model="gpt2")
    assert "384 value vectors in 120 clusters, exactly, by complete linkage" in printed
    table = clusters.table(values, Projection.after_norm(small_model("gpt2")), [119, 0], n_tokens=2)
    named = [f"{second} {first}", f"{' '.join(largest[-4:])} +{len(largest) - 4}"]
    expected = []
    for row, name in zip(table.itertuples(), named, strict=True):
        layers = str(row.first_layer) if row.layers == 1 else f"{row.first_layer}-{row.last_layer}"
        sizes = [str(row.cluster), str(row.size), layers, f"{row.cosine:.2f}"]
        expected.append([*sizes, name, row.tokens])
    assert cells(printed) == expected
    monkeypatch.setattr("matlens.ffn.clusters.agglomerate", lambda *_: 1 / 0)  # fitted once
    assert commands.run(*given, model="gpt2") == printed
    assert len(cells(commands.run("values", "cluster", *options, "--limit", 7, model="gpt2"))) == 7


def test_pages_are_those_of_the_library(commands, small_model, tmp_path):
    model, sentences = small_model("gpt2"), make_sentences()
    samples = matlens.collect(model, matlens.make_examples(model, sentences), positions="all", progress=False)
    maps = matlens.MapSet.fit(samples, pairs="last", progress=False)
    maps.save(tmp_path / "maps")
    page = tmp_path / "pages" / "page.html"
    options = ["--lens", tmp_path / "maps", "--out", page, "--pin", "w5", "--dominant", 4, "--read", "head"]
    printed = commands.run("explore", "w1 w2 w3", *options, model="gpt2")
    assert "3 tokens, 4 layers" in printed
    expected = explore(model, "w1 w2 w3", [maps], pins=["w5"], dominant=4, read="head", progress=False)
    assert page.read_text(encoding="utf-8") == expected.to_html()
    commands.run("explore", "w1 w2", "--out", page, model="gpt2")  # a page is written over

    (tmp_path / "words.txt").write_text("\n".join(sentences.sentences[:9]))
    options = ["--corpus", tmp_path / "words.txt", "--sentences", 5, "--neighbors", 2]
    printed = commands.run("values", "explore", "--out", tmp_path / "values", *options, model="gpt2")
    assert "values/index.html" in printed.replace("\n", "")
    corpus, _ = matlens.load_corpus(tmp_path / "words.txt").split(n_train=5, n_validation=2)
    write_value_pages(model, tmp_path / "same", corpus=corpus, neighbors=2, progress=False)
    names = {path.name for path in (tmp_path / "values").iterdir()} - {"config.json"}
    assert len(names) > 6
    for name in names:
        assert (tmp_path / "values" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()


def test_serve_prints_an_address_with_a_secret_and_listens_on_this_machine_alone(commands, monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr("uvicorn.run", lambda application, **options: calls.append(options))
    printed = commands.run("serve", "--port", 9876, model="gpt2")
    assert re.search(r"http://127\.0\.0\.1:9876/[\w-]{32}/", printed)
    assert (calls[0]["host"], calls[0]["port"]) == ("127.0.0.1", 9876)
    monkeypatch.delitem(sys.modules, "matlens.explorer.server")
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert "pip install" in commands.run("serve", model="gpt2", code=2)


def test_lenses_are_fitted_on_the_training_sentences(commands, corpora, small_model, tmp_path):
    printed = commands.run(
        "lens", "fit", "--corpus", corpora / "words.txt", "--train", 40, "--out", tmp_path / "out",
        "--method", "mat", "--method", "affine", "--standardise", "--sinks", "exclude", "--ridge", "loo",
        model="llama",
    )  # fmt: skip
    texts = matlens.load_corpus(str(corpora / "words.txt"))
    corpus, _ = texts.split(n_train=40, n_validation=len(texts) - 40)
    model, config = small_model("llama"), LensConfig(standardise=True, sinks="exclude", ridge="loo")
    expected = Lens.fit(model, corpus, method=config, progress=False)
    lens = Lens.load(tmp_path / "out" / "standardise-ridge-loo-sinks-exclude", model)
    h = torch.randn(3, D_MODEL, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(lens(h, 1), expected(h, 1), rtol=1e-3, atol=1e-3)
    folders = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(folders) == 2
    assert Lens.load(tmp_path / "out" / folders[1]).norm is not None
    assert f"fitted on {expected.n_samples:,} tokens" in printed


def test_convert_goes_both_ways(commands, small_model, tmp_path):
    model = small_model("llama")
    Lens.identity(model).save(tmp_path / "own")
    printed = commands.run("lens", "convert", tmp_path / "own", tmp_path / "j.pt", model="llama")
    assert "A lens of 3 layers (id)" in printed
    assert torch.equal(JacobianLens.load(str(tmp_path / "j.pt")).jacobians[0], torch.eye(D_MODEL))
    commands.run("lens", "convert", tmp_path / "j.pt", tmp_path / "back", model="llama")
    assert Lens.load(tmp_path / "back").layers == (1, 2)


def test_push_and_pull_go_through_the_hub(commands, small_model, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = small_model("llama")
    lens = make_lens(model)
    lens.save(tmp_path / "lens")
    row = {"method": "by hand", "layer": 1, "target": 3, "metric": "r2", "value": 0.625, "n": 9}
    write_results(tmp_path, "report", pd.DataFrame([row], columns=[*COLUMNS, "against"]), {})
    printed = commands.run(
        "lens", "push", tmp_path / "lens", "someone/lenses", "--results", tmp_path / "report.csv",
        "--name", "llama/hand", "--private",
    )  # fmt: skip
    commit, content = hub.repositories["someone/lenses"][-1]
    assert commit in printed.replace("\n", "")
    assert "| 1 | 0.625 |" in content["llama/hand/README.md"].decode()
    assert hub.private == {"someone/lenses"}
    commands.run(
        "lens", "pull", "someone/lenses", "llama/hand", "--revision", commit, "--out", tmp_path / "back",
    )  # fmt: skip
    assert Lens.load(tmp_path / "back", model).digest == lens.digest
    said = commands.run(
        "lens", "pull", "someone/lenses", "llama/hand", "--revision", "0" * 40, "--out", tmp_path / "x",
        code=2,
    )  # fmt: skip
    assert "Revision Not Found" in " ".join(said.split())
    assert not (tmp_path / "x").exists()


def test_report_writes_tables_and_a_figure_and_prints_a_line_for_each_lens(
    commands, small_model, corpora, tmp_path
):
    arguments = ["--corpus", corpora / "few.txt", "--train", 30, "--val", 20, "--out", tmp_path / "out"]
    printed = commands.run(
        "lens", "report", *arguments, "--method", "id", "--method", "mat", "--layers", "1,2", model="llama"
    )
    parts = matlens.load_corpus(str(corpora / "few.txt")).split(n_train=30, n_validation=20)
    made = compare_lenses(
        small_model("llama"), parts, tmp_path / "own", methods=["id", "mat"], layers=[1, 2], progress=False
    )
    written = pd.read_csv(tmp_path / "out" / "lens_report.csv")
    costs = written["metric"].isin(["seconds"])
    assert written.loc[~costs, "value"].tolist() == pytest.approx(
        made.report.loc[~made.report["metric"].eq("seconds"), "value"].tolist(), rel=1e-5
    )
    assert (tmp_path / "out" / "lens_report.png").stat().st_size > 1000
    assert (tmp_path / "out" / "lens_exits.json").is_file()
    assert not (tmp_path / "out" / "lens_cosines.csv").exists()
    lines = [line for line in printed.splitlines() if "│ id" in line or "│ mat" in line]
    assert len(lines) == 2


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    generator = np.random.default_rng(4)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(" ".join(generator.choice(WORDS, 20)) for _ in range(80)))
    return path


def test_a_folder_is_written_that_transformers_loads(text, model_folder, tmp_path, capsys):
    asked = [
        "prune", "--model", model_folder("llama"), "--device", "cpu", "--corpus", text, "--blocks", "1",
        "--window", "24", "--heal", "48", "--out", tmp_path / "pruned",
    ]  # fmt: skip
    outcome = run_command(asked, capsys)
    assert outcome.code == 0, outcome.err
    for part in ("agreement", "seconds ratio", "s per token", "kB per token", "Healed on 1,008 tokens"):
        assert part in outcome.out
    assert "with the method `chain` (penalty 0.3)" in (tmp_path / "pruned" / "README.md").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pruned")
    assert loaded.config.num_hidden_layers == 2
    again = run_command(asked, capsys)
    assert again.code == 2
    assert "must be a new or empty folder" in " ".join(again.err.split())


def test_an_atlas_is_written_and_drawn(text, model_folder, tmp_path, capsys):
    asked = [
        "linearity", "--model", model_folder("llama"), "--device", "cpu", "--corpus", text,
        "--window", "20",
        "--windows", "20", "--eval-windows", "4", "--out", tmp_path,
    ]  # fmt: skip
    outcome = run_command(asked, capsys)
    assert outcome.code == 0, outcome.err
    assert "Rank correlation" in outcome.out
    assert "Parts replaced together" in outcome.out
    assert {path.name for path in tmp_path.iterdir()} == {
        "atlas", "linearity.csv", "linearity.json", "linearity.png", "linearity.pdf",
        "linearity_correlations.csv", "linearity_correlations.json",
    }  # fmt: skip
    origin = json.loads((tmp_path / "linearity.json").read_text())
    assert origin["atlas_seconds"] == atlas_seconds(tmp_path / "atlas")
    few = run_command([*asked[:-1], tmp_path / "few", "--windows", "2", "--window", "12"], capsys)
    assert few.code == 2
    assert "must have more than 32 tokens" in " ".join(few.err.split())
    assert not (tmp_path / "few").exists() or not list((tmp_path / "few").glob("*.csv"))


def test_attention_is_removed(text, model_folder, tmp_path, capsys):
    asked = [
        "prune", "--model", model_folder("llama"), "--device", "cpu", "--corpus", text, "--window", "24",
        "--out", tmp_path / "fewer",
    ]  # fmt: skip
    assert run_command([*asked, "--attention", "1", "--blocks", "1"], capsys).code == 2
    outcome = run_command([*asked, "--attention", "1"], capsys)
    assert outcome.code == 0, outcome.err
    assert "Without the attention of the blocks" in outcome.out
    assert "with the method `refit` (penalty 0.1)" in (tmp_path / "fewer" / "README.md").read_text()


@pytest.mark.parametrize(("disk", "fits"), [(10**12, "yes"), (10**9, "no")])
def test_what_is_printed_is_the_plan(disk, fits, capsys, monkeypatch):
    monkeypatch.setattr("matlens.study.plan.free_memory", lambda: 10**12)
    monkeypatch.setattr("matlens.study.plan.free_disk", lambda _: disk)
    arguments = [
        "--layers", 32, "--width", 4096, "--mlp", 14336, "--vocab", 128256, "--sentences", 10000,
        "--positions", "all", "--pairs", "last", "--keep-rows",
    ]  # fmt: skip
    printed = run_command(["plan", *arguments], capsys, width=200).out
    shape = Shape(n_layers=32, d_model=4096, d_mlp=14336, d_vocab=128256)
    plan = plan_study(shape, 10_000, 1000, positions="all", pairs="last", keep_rows=True)
    assert [row[:3] for row in cells(printed)] == [
        [step, format_bytes(need.memory), format_bytes(need.disk) if need.disk else "–"]
        for step, need in plan.needs.items()
    ]
    assert [row[4] for row in cells(printed)][:2] == ["yes", fits]  # the model, and collecting
    memory, written = plan.job
    (line,) = (line for line in printed.splitlines() if line.startswith("--pairs last: "))
    for part in (f"statistics of {format_bytes(plan.statistics)}", f"{format_bytes(memory)} of memory"):
        assert part in line
    assert f"{format_bytes(written)} of disk. Fits: {fits}." in line


def test_short_commands_use_the_cache_which_is_shown_and_cleared(
    commands, model_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    assert "0 entries" in run_command(["cache", "show"], capsys).out
    asked: list[list[Any]] = [["search", "w3", "--top-k", 5], ["show", "L1D3", "--read", "head"]]
    printed = [commands.run("values", *command, model="llama") for command in asked]

    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("the model is loaded, or top tokens are computed again")

    monkeypatch.setattr("matlens.ffn.catalogue.load", refuse)
    monkeypatch.setattr("matlens.ffn.projection.Projection.top_of_all", refuse)
    assert [commands.run("values", *command, model="llama") for command in asked] == printed
    shown = run_command(["cache", "show"], capsys).out
    for part in ("2 entries", "top 5 tokens", model_folder("llama").name):
        assert part in shown
    assert "freed" in run_command(["cache", "clear"], capsys).out
    assert "0 entries" in run_command(["cache", "show"], capsys).out
    monkeypatch.setenv("MATLENS_CACHE", "off")
    assert "switched off" in run_command(["cache", "clear"], capsys).out
