"""A command is its Python call: it prints or writes what the call gives, and refuses what it refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from command_lines import cells
from conftest import N_LAYERS, make_sentences

import matlens
from matlens import Lens, make_prompts
from matlens.cli.app import app
from matlens.explorer import explore, write_value_pages
from matlens.ffn.clusters import Clusters
from matlens.ffn.projection import Projection
from matlens.ffn.updates import Updates
from matlens.ffn.values import ValueVectors
from matlens.models.tokens import visible

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
