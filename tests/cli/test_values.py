"""The commands about feed-forward layers: what they print, and what they say of input they cannot use."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import N_LAYERS

from matlens import make_prompts
from matlens.cli import app, clusters
from matlens.ffn.clusters import MEMORY_GIB, N_CLUSTERS, Clusters, cluster_table
from matlens.ffn.projection import (
    Projection,
    token_table,
    top_tokens_of_all,
    values_promoting,
    values_with_tokens,
)
from matlens.ffn.updates import Updates, dominant_table
from matlens.ffn.values import ValueVectors

Matlens = Callable[..., str]
COMMANDS = (
    ("values", "show"),
    ("values", "search"),
    ("values", "promoting"),
    ("values", "cluster"),
    ("update",),
)


@pytest.fixture
def run_matlens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Matlens:
    """Run a command line in this process; gives what it prints, or says if it is refused (``code=2``)."""

    def command(*arguments: object, code: int = 0) -> str:
        monkeypatch.setattr("sys.argv", ["matlens", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "160")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app.main()
        said = capsys.readouterr()
        assert (ended.value.code or 0) == code
        assert "Traceback" not in said.out + said.err
        return " ".join(said.err.replace("│", " ").split()) if code else said.out

    return command


@pytest.fixture
def options(model_folder: Callable[[str], Path]) -> Callable[[str], list[object]]:
    """What every command needs, for a model."""
    return lambda name: ["--model", model_folder(name), "--device", "cpu"]


def cells(printed: str) -> list[list[str]]:
    """Rows of the tables that were printed."""
    rows = [line.strip("│ ") for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.split("│")] for row in rows]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_command(command: tuple[str, ...], run_matlens: Matlens) -> None:
    said = run_matlens(*command, "--help")
    for option in ("--model", "--device", "--read", "--tokens"):
        assert option in said
    assert command[-1] in run_matlens(*command[:-1], "--help")


@pytest.mark.parametrize("read", ["plain", "norm"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_show_prints_both_ends_of_each_vector(
    name: str,
    read: str,
    run_matlens: Matlens,
    options: Callable[[str], list[object]],
    small_model: Callable[[str], Any],
) -> None:
    model = small_model(name)
    printed = run_matlens("values", "show", "L1D7", "L-1D0", "--tokens", 4, "--read", read, *options(name))
    projection = Projection.from_model(model) if read == "plain" else Projection.after_norm(model)
    expected = token_table(ValueVectors(model), projection, ["L1D7", "L2D0"], k=4)
    rows = []
    for _, own in expected.groupby("value", sort=False):
        up, down = (own[own["side"] == side].itertuples() for side in ("top", "bottom"))
        for one, other in zip(up, down, strict=True):
            scores = f"{one.score:.3f}", f"{other.score:.3f}"
            rows.append([str(one.rank), one.token, scores[0], other.token, scores[1]])
    assert cells(printed) == rows
    assert re.findall(r"^(L\d+D\d+)", printed, re.MULTILINE) == ["L1D7", "L2D0"]


def test_search_prints_what_has_the_words_and_how_many_there_are(
    run_matlens: Matlens, options: Callable[[str], list[object]], small_model: Callable[[str], Any]
) -> None:
    model = small_model("gpt2")
    values, projection = ValueVectors(model), Projection.from_model(model)
    among = ["--among", 6, "--limit", 5, "--tokens", 2]
    printed = run_matlens("values", "search", "w7", "w30", *among, *options("gpt2"))
    expected = values_with_tokens(
        values, projection, top_tokens_of_all(values, projection, k=6), ["w7", "w30"]
    )
    assert [row[0] for row in cells(printed)] == expected["value"].tolist()[:5]
    assert [row[1:3] for row in cells(printed)] == expected[["words", "rank"]].astype(str).values.tolist()[:5]
    assert f"{len(expected)} of {len(values)} value vectors" in printed
    assert all(len(row[-1].split(", ")) == 2 for row in cells(printed))


def test_a_search_that_finds_nothing_says_so(
    run_matlens: Matlens, options: Callable[[str], list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("matlens.ffn.projection.values_with_tokens", lambda *_: token_table_of_none())
    printed = run_matlens("values", "search", "w7", "--among", 3, *options("gpt2"))
    assert "No value vector has w7 among its 3 top tokens" in printed


def token_table_of_none() -> Any:
    import pandas as pd

    return pd.DataFrame({"value": []})


def test_promoting_prints_those_that_raise_the_words_most(
    run_matlens: Matlens, options: Callable[[str], list[object]], small_model: Callable[[str], Any]
) -> None:
    model = small_model("llama")
    printed = run_matlens("values", "promoting", "w7", "w9", "--limit", 3, *options("llama"))
    expected = values_promoting(
        ValueVectors(model), Projection.from_model(model), ["w7", "w9"], n=3, progress=False
    )
    wanted = [[row.value, f"{row.score:.3f}", f"{row.lift:.3f}"] for row in expected.itertuples()]
    assert [row[:3] for row in cells(printed)] == wanted


def cluster_cells(found: Any) -> list[list[str]]:
    """Numbers of a table of clusters as they are printed."""
    return [
        [
            str(one.cluster),
            str(one.size),
            str(one.first_layer) if one.layers == 1 else f"{one.first_layer}-{one.last_layer}",
            "–" if one.size == 1 else f"{one.cosine:.2f}",
        ]
        for one in found.itertuples()
    ]


@pytest.mark.parametrize(
    ("memory", "how"), [([], "exactly"), (["--memory", "0"], "by near neighbours")], ids=["exact", "near"]
)
@pytest.mark.parametrize("read", ["plain", "norm"])
def test_cluster_prints_the_largest_clusters_and_keeps_them(
    memory: list[str],
    how: str,
    read: str,
    run_matlens: Matlens,
    options: Callable[[str], list[object]],
    small_model: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small_model("llama")
    given = ["--clusters", 40, "--limit", 3, "--tokens", 2, "--read", read, "--out", tmp_path, *memory]
    printed = run_matlens("values", "cluster", *given, *options("llama"))
    clusters = Clusters.fit(ValueVectors(model), 40, memory=0 if memory else MEMORY_GIB, progress=False)
    projection = Projection.from_model(model) if read == "plain" else Projection.after_norm(model)
    expected = cluster_table(ValueVectors(model), projection, clusters, range(3), n_tokens=2)
    assert [row[:4] for row in cells(printed)] == cluster_cells(expected)
    assert [row[5] for row in cells(printed)] == expected["tokens"].tolist()
    for row, members in zip(cells(printed), expected["members"], strict=True):
        told = members.split()[:3]
        assert row[4] == f"{' '.join(told)} +{len(members.split()) - 3}"
    assert f"144 value vectors in 40 clusters, {how}" in printed
    monkeypatch.setattr("matlens.ffn.clusters.agglomerate", lambda *_: 1 / 0)
    assert run_matlens("values", "cluster", *given, *options("llama")) == printed


def test_cluster_prints_the_clusters_of_value_vectors(
    run_matlens: Matlens,
    options: Callable[[str], list[object]],
    small_model: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    values = ValueVectors(small_model("gpt2"))
    clusters = Clusters.fit(values, 120, progress=False)
    largest = [str(values.at(row)) for row in clusters.members(0).tolist()]
    alone = str(values.at(int(clusters.members(119)[0])))
    assert len(largest) > 4
    assert clusters.sizes[119] == 1
    given = [alone, *largest[-4:], "--clusters", 120, "--limit", 1, "--out", tmp_path]
    printed = run_matlens("values", "cluster", *given, *options("gpt2"))
    expected = cluster_table(values, Projection.from_model(small_model("gpt2")), clusters, [119, 0])
    assert [row[:4] for row in cells(printed)] == cluster_cells(expected)
    assert cells(printed)[0][4] == alone
    assert cells(printed)[1][4] == f"{' '.join(largest[-4:])} +{len(largest) - 4}"


def test_defaults_of_the_command_are_those_of_clusters() -> None:
    parameters = inspect.signature(clusters.cluster).parameters
    assert parameters["clusters"].default == N_CLUSTERS
    assert parameters["memory"].default == MEMORY_GIB


@pytest.mark.parametrize(
    ("name", "prompt"), [("gpt2", "w1 w2 w3"), ("llama", "w4"), ("bert", "w1 [MASK] w3")]
)
def test_update_has_a_line_for_each_layer(
    name: str,
    prompt: str,
    run_matlens: Matlens,
    options: Callable[[str], list[object]],
    small_model: Callable[[str], Any],
) -> None:
    model = small_model(name)
    printed = run_matlens("update", prompt, "--tokens", 2, *options(name))
    updates = Updates.run(model, make_prompts(model, [prompt]), progress=False)
    expected = dominant_table(updates, Projection.from_model(model), n_tokens=2)
    assert [int(row[0]) for row in cells(printed)] == list(range(N_LAYERS))
    for layer, row in enumerate(cells(printed)):
        own = expected[expected["layer"] == layer]
        assert row[1] == f"{own['share'].sum():.1%}"
        assert row[2] == own["value"].iloc[0]
        assert row[5] == own["tokens"].iloc[0]
    assert prompt.replace("[", "").split()[0] in printed


def test_update_shows_the_sub_updates_of_a_layer_at_a_position(
    run_matlens: Matlens, options: Callable[[str], list[object]], small_model: Callable[[str], Any]
) -> None:
    model = small_model("gpt2")
    given = ["--layer", -1, "--layer", 0, "--dominant", 4, "--position", -3, *options("gpt2")]
    printed = run_matlens("update", "w1 w2 w3 w4 w5", *given)
    # A decoder's third token knows nothing of those after it.
    updates = Updates.run(model, make_prompts(model, ["w1 w2 w3"]), [0, 2], progress=False)
    expected = dominant_table(updates, Projection.from_model(model), k=4)
    assert [row[1] for row in cells(printed)] == expected["value"].tolist()
    assert [row[2] for row in cells(printed)] == [f"{one:.3f}" for one in expected["coefficient"]]
    assert [row[4] for row in cells(printed)] == expected["tokens"].tolist()
    assert "At token 2, 'w3', layer 2" in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["values", "show", "3D4"], "'3D4' is not a value vector. Expected L{layer}D{index}"),
        (["values", "show", "L3D0"], "Layer 3 is out of range: the FFNs of this model are in the"),
        (["values", "show", "L0D128"], "Index 128 of L0D128 is out of range"),
        (["values", "show", "L0D1", "--tokens", "61"], "61 tokens were asked for. Expected 1 to 60"),
        (["values", "search", "w1 w2"], "The word 'w1 w2' is 2 tokens: 'w1', 'w2'"),
        (["values", "promoting", "tea"], "The word 'tea' is not in the model's vocabulary"),
        (["values", "cluster", "L0D128", "--clusters", "9"], "Index 128 of L0D128 is out of range"),
        (["values", "cluster", "--clusters", "9", "some"], "'some' is not a value vector. Expected L{layer}"),
        (["values", "cluster"], "10,000 clusters of 384 value vectors: expected 1 to 384"),
        (["values", "cluster", "--clusters", "0"], "Invalid value for '--clusters'"),
        (["values", "cluster", "--clusters", "9", "--memory", "-1"], "Invalid value for '--memory'"),
        (["values", "cluster", "--clusters", "9", "--tokens", "61"], "61 tokens were asked for. Expected 1"),
        (["update", ""], "The prompt '' cannot be read out"),
        (["update", "w1", "--layer", "3"], "Layer 3 is out of range: the FFNs of this model"),
        (["update", "w1", "--position", "1"], "Position 1 is out of range: the prompt has the tokens 0 to 0"),
        (["update", "w1", "--dominant", "129"], "129 sub-updates were asked for. Expected 1 to 128"),
        (["values", "show", "L0D1", "--read", "other"], "Invalid value for '--read'"),
    ],
)  # fmt: skip
def test_bad_input_is_told(
    arguments: list[str],
    told: str,
    run_matlens: Matlens,
    options: Callable[[str], list[object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in run_matlens(*arguments, *options("gpt2"), code=2)
    if "--tokens" not in arguments:
        assert not list(tmp_path.iterdir()), "something was written before the input was looked at"


@pytest.mark.parametrize(
    "command",
    [("values", "show", "L0D1"), ("values", "search", "w1"), ("values", "cluster"), ("update", "w1")],
)
def test_models_that_cannot_be_read_are_told(
    command: tuple[str, ...],
    run_matlens: Matlens,
    options: Callable[[str], list[object]],
    tmp_path: Path,
) -> None:
    assert "have no value vectors that are known" in run_matlens(*command, *options("granite"), code=2)
    assert "There is no model" in run_matlens(*command, "--model", tmp_path / "absent", code=2)
