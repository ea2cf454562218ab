"""The command that clusters value vectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_lines import FfnCommands, cells

from matlens.cli.values import cluster
from matlens.ffn.clusters import MEMORY_GIB, N_CLUSTERS, Clusters, cluster_table
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors


@pytest.fixture
def commands(model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> FfnCommands:
    return FfnCommands(model_folder, capsys)


def test_help_names_the_options(commands: FfnCommands) -> None:
    commands.assert_help("values", "cluster")


def cluster_cells(table: Any) -> list[list[str]]:
    """Numbers of a table of clusters as they are printed."""
    return [
        [
            str(row.cluster),
            str(row.size),
            str(row.first_layer) if row.layers == 1 else f"{row.first_layer}-{row.last_layer}",
            "–" if row.size == 1 else f"{row.cosine:.2f}",
        ]
        for row in table.itertuples()
    ]


@pytest.mark.parametrize(
    ("memory", "how"),
    [
        ([], "exactly, by average linkage"),
        (["--memory", "0"], "by near neighbours"),
        (["--memory", "0", "--disk", "1", "--linkage", "complete"], "exactly, by complete linkage"),
    ],
    ids=["exact", "near", "complete"],
)
@pytest.mark.parametrize("read", ["plain", "norm"])
def test_cluster_prints_the_largest_clusters_and_keeps_them(
    memory: list[str],
    how: str,
    read: str,
    commands: FfnCommands,
    small_model: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small_model("llama")
    given = ["--clusters", 40, "--limit", 3, "--tokens", 2, "--read", read, "--out", tmp_path, *memory]
    printed = commands.run("values", "cluster", *given, model="llama")
    linkage: Any = "complete" if "complete" in memory else "average"
    limit = 0 if how == "by near neighbours" else MEMORY_GIB
    clusters = Clusters.fit(ValueVectors(model), 40, linkage=linkage, memory=limit, progress=False)
    projection = Projection.from_model(model) if read == "plain" else Projection.after_norm(model)
    expected = cluster_table(ValueVectors(model), projection, clusters, range(3), n_tokens=2)
    assert [row[:4] for row in cells(printed)] == cluster_cells(expected)
    assert [row[5] for row in cells(printed)] == expected["tokens"].tolist()
    for row, members in zip(cells(printed), expected["members"], strict=True):
        named = members.split()[:3]
        assert row[4] == f"{' '.join(named)} +{len(members.split()) - 3}"
    assert f"144 value vectors in 40 clusters, {how}" in printed
    monkeypatch.setattr("matlens.ffn.clusters.agglomerate", lambda *_: 1 / 0)
    assert commands.run("values", "cluster", *given, model="llama") == printed


def test_cluster_prints_the_clusters_of_value_vectors(
    commands: FfnCommands,
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
    printed = commands.run("values", "cluster", *given, model="gpt2")
    expected = cluster_table(values, Projection.from_model(small_model("gpt2")), clusters, [119, 0])
    assert [row[:4] for row in cells(printed)] == cluster_cells(expected)
    assert cells(printed)[0][4] == alone
    assert cells(printed)[1][4] == f"{' '.join(largest[-4:])} +{len(largest) - 4}"


def test_defaults_of_the_command_are_those_of_clusters() -> None:
    parameters = inspect.signature(cluster).parameters
    assert parameters["clusters"].default == N_CLUSTERS
    assert parameters["memory"].default == MEMORY_GIB
    fitted = inspect.signature(Clusters.fit).parameters
    assert (parameters["disk"].default, str(parameters["linkage"].default)) == (
        fitted["disk"].default, fitted["linkage"].default,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["values", "cluster", "L0D128", "--clusters", "9"], "Index 128 of L0D128 is out of range"),
        (["values", "cluster", "--clusters", "9", "some"], "'some' is not a value vector. Expected L{layer}"),
        (["values", "cluster"], "10,000 clusters of 384 value vectors: expected 1 to 384"),
        (["values", "cluster", "--clusters", "0"], "Invalid value for '--clusters'"),
        (["values", "cluster", "--clusters", "9", "--memory", "-1"], "Invalid value for '--memory'"),
        (["values", "cluster", "--clusters", "9", "--linkage", "ward"], "Invalid value for '--linkage'"),
        (
            ["values", "cluster", "--clusters", "9", "--memory", "0", "--linkage", "complete"],
            "Complete linkage needs the distances of all pairs",
        ),
        (["values", "cluster", "--clusters", "9", "--tokens", "61"], "integer from 1 to 60, got 61"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(
    arguments: list[str], message: str, commands: FfnCommands, tmp_path: Path
) -> None:
    commands.assert_refused(*arguments, message=message, folder=tmp_path)


@pytest.mark.parametrize("command", [("values", "cluster")])
def test_models_that_cannot_be_read_are_told(
    command: tuple[str, ...], commands: FfnCommands, tmp_path: Path
) -> None:
    commands.assert_models_refused(*command, absent=tmp_path / "absent")
