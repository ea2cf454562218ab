"""Clusters are scikit-learn's by either method, kept in a folder, and told as written out by hand."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ARCHITECTURES, N_LAYERS, make_tokenizer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plain_values import plain_unit_vectors
from scipy.sparse import lil_array
from scipy.spatial.distance import pdist
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score
from sub_updates.linkages import compare_linkages
from traces import make_clusters

import matlens
from matlens import InputError
from matlens.ffn.agglomeration import (
    EXACT,
    NEIGHBOURS,
    agglomerate,
    gib_in_memory,
    gib_on_disk,
    method_within,
)
from matlens.ffn.clusters import Clusters, cluster_table
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors

COMPUTING = "matlens.ffn.clusters.agglomerate"

METHODS = (EXACT, NEIGHBOURS)


# Agglomeration


def unit_vectors(n: int, d: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(n, d))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def bundles(sizes: list[int], *, d: int = 24, spread: float = 0.02, seed: int = 0) -> tuple:
    """Vectors in some order around axes that are at right angles, and which axis each is around."""
    generator = np.random.default_rng(seed)
    truth = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    vectors = np.eye(d)[truth] + spread * generator.normal(size=(len(truth), d))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), truth


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Equal but for the names of the clusters."""
    return adjusted_rand_score(ours, theirs) == 1 and len(set(ours.tolist())) == len(set(theirs.tolist()))


def average_linkage(unit: np.ndarray, n_clusters: int) -> np.ndarray:
    if n_clusters == len(unit):
        return np.arange(len(unit))
    linkage = AgglomerativeClustering(n_clusters=n_clusters, metric="cosine", linkage="average")
    return linkage.fit_predict(unit)


def ward_of_neighbours(unit: np.ndarray, n_clusters: int) -> np.ndarray:
    """Ward on the graph of each vector's ten nearest by the cosine, sorted one by one."""
    cosines = unit @ unit.T
    graph = lil_array(cosines.shape)
    for row in range(len(unit)):
        others = [other for other in np.argsort(-cosines[row], kind="stable") if other != row]
        for other in others[:10]:
            graph[row, other] = graph[other, row] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ward = AgglomerativeClustering(n_clusters=n_clusters, linkage="ward", connectivity=graph.tocsr())
        return ward.fit_predict(unit.astype(np.float32))


@settings(max_examples=80)
@given(st.data(), st.integers(2, 24), st.integers(2, 6), st.integers(0, 10**6))
def test_exact_clusters_are_those_of_average_linkage(data: st.DataObject, n: int, d: int, seed: int) -> None:
    unit = unit_vectors(n, d, seed)
    distances = np.sort(pdist(unit, "cosine"))
    assume(len(distances) < 2 or np.diff(distances).min() > 1e-9)  # of equal ones any may come first
    n_clusters = data.draw(st.integers(1, n))
    assert same(agglomerate(unit, n_clusters, EXACT), average_linkage(unit, n_clusters))


def test_exact_clusters_of_more_vectors_than_a_block_of_distances() -> None:
    unit = unit_vectors(600, 8, seed=3)
    for n_clusters in (1, 2, 150, 599, 600):
        assert same(agglomerate(unit, n_clusters, EXACT), average_linkage(unit, n_clusters))


@pytest.mark.parametrize("n", [13, 60, 300])
def test_clusters_of_neighbours_are_wards_on_the_same_graph(n: int) -> None:
    unit = unit_vectors(n, 6, seed=n)
    for n_clusters in (1, 2, n // 3, n - 1):
        ours = agglomerate(unit, n_clusters, NEIGHBOURS)
        assert same(ours, ward_of_neighbours(unit, n_clusters))
    assert not same(agglomerate(unit, n // 3, NEIGHBOURS), agglomerate(unit, n // 3, EXACT))


def test_a_graph_in_parts_is_joined() -> None:
    unit, truth = bundles([20, 15, 12, 30])
    for n_clusters in (1, 2, 3):
        labels = agglomerate(unit, n_clusters, NEIGHBOURS)
        assert len(set(labels)) == n_clusters
        for bundle in range(4):
            assert len(set(labels[truth == bundle])) == 1
        assert same(labels, ward_of_neighbours(unit, n_clusters))


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40)
@given(st.data(), st.integers(1, 30), st.integers(0, 10**6), st.booleans())
def test_clusters_are_as_many_as_asked_for_and_numbered_by_size(
    method: str, data: st.DataObject, n: int, seed: int, equal: bool
) -> None:
    """Whatever ties there are; of one size, those come first whose first vector does."""
    unit = unit_vectors(n, 3, seed)
    if equal:
        unit = unit[np.random.default_rng(seed).integers(0, (n + 1) // 2, n)]
    n_clusters = data.draw(st.integers(1, n))
    labels = agglomerate(unit, n_clusters, method)
    assert sorted(set(labels.tolist())) == list(range(n_clusters))
    keys = [(-int((labels == c).sum()), int(np.flatnonzero(labels == c)[0])) for c in range(n_clusters)]
    assert keys == sorted(keys)


@pytest.mark.parametrize("method", METHODS)
def test_a_vector_for_each_cluster_is_its_own(method: str) -> None:
    assert agglomerate(unit_vectors(12, 4, 0), 12, method).tolist() == list(range(12))
    assert agglomerate(unit_vectors(1, 4, 0), 1, method).tolist() == [0]


def test_the_method_follows_the_memory() -> None:
    """Two float64 for each pair."""
    assert gib_in_memory(2**15) == pytest.approx(8, rel=1e-4)
    assert gib_in_memory(1) == 0
    assert gib_in_memory(46080) == pytest.approx(15.82, abs=0.01)
    needed = gib_in_memory(1000)
    assert method_within(1000, needed) == EXACT
    assert method_within(1000, 0.999 * needed) == NEIGHBOURS
    assert gib_on_disk(98304) == pytest.approx(36)
    assert method_within(1000, 0, gib_on_disk(1000)) == EXACT
    assert method_within(1000, 0, 0.999 * gib_on_disk(1000)) == NEIGHBOURS


def changed(
    model_folder: Callable[[str], Path], tmp_path: Path, change: Callable[[Any], None]
) -> ValueVectors:
    """Value vectors of a small gpt2 whose output matrices are changed."""
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(model_folder("gpt2"))
    with torch.no_grad():
        change([block.mlp.c_proj.weight for block in plain.transformer.h])
    plain.save_pretrained(tmp_path / "changed")
    make_tokenizer().save_pretrained(tmp_path / "changed")
    return ValueVectors(matlens.load(str(tmp_path / "changed"), device="cpu"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_clusters_of_a_model_are_those_of_its_plain_weights(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    values, unit = ValueVectors(small_model(name)), plain_unit_vectors(name, plain_model(name))
    distances = 1 - unit @ unit.T
    for n_clusters in (1, 2, 40, len(unit) - 1):
        options = {"metric": "precomputed", "linkage": "average"}
        theirs = AgglomerativeClustering(n_clusters=n_clusters, **options).fit_predict(distances)
        ours = Clusters.fit(values, n_clusters, progress=False)
        assert ours.method == "exact"
        assert len(ours) == n_clusters == len(ours.sizes)
        assert adjusted_rand_score(theirs, ours.labels) == 1
        assert ours.sizes.tolist() == sorted(np.bincount(theirs).tolist(), reverse=True)
    alone = Clusters.fit(values, len(values), progress=False)
    assert alone.labels.tolist() == list(range(len(values)))


@pytest.mark.parametrize("linkage", ["average", "complete"])
def test_exact_clusters_are_the_same_wherever_the_distances_are(
    linkage: Any, small_model: Callable[[str], Any], plain_model: Callable[[str], Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    values, unit = ValueVectors(small_model("gpt2")), plain_unit_vectors("gpt2", plain_model("gpt2"))
    options = {"metric": "precomputed", "linkage": linkage}
    theirs = AgglomerativeClustering(n_clusters=40, **options).fit_predict(1 - unit @ unit.T)
    for memory, disk in ((1, 0), (0, 1)):
        ours = Clusters.fit(
            values, 40, linkage=linkage, memory=memory, disk=disk, folder=tmp_path / str(memory) / "clusters"
        )
        assert (ours.method, ours.linkage) == ("exact", linkage)
        assert adjusted_rand_score(theirs, ours.labels) == 1
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["clusters"]
    assert (
        "over the limit of 0 GiB, but 0.0 GiB on the disk, within the limit of 1 GiB"
        in capsys.readouterr().err
    )


def test_complete_linkage_without_room_is_refused(small_model: Callable[[str], Any]) -> None:
    values = ValueVectors(small_model("gpt2"))
    with pytest.raises(InputError, match=r"all pairs of 384 vectors.* Raise memory \(0\) or disk \(0\)"):
        Clusters.fit(values, 40, linkage="complete", memory=0, progress=False)
    near = Clusters.fit(values, 40, memory=0, progress=False)
    assert (near.method, near.linkage) == ("neighbours", "ward")


@pytest.mark.parametrize("n_clusters", [0, 385])
def test_clusters_are_one_to_as_many_as_vectors(
    n_clusters: int, small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"^n_clusters must be an integer from 1 to 384"):
        Clusters.fit(ValueVectors(small_model("gpt2")), n_clusters, folder=tmp_path / "clusters")
    assert not (tmp_path / "clusters").exists()


def test_the_method_and_its_reason_are_told_before_the_work(
    small_model: Callable[[str], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = ValueVectors(small_model("gpt2"))
    needed = gib_in_memory(len(values))
    exact = Clusters.fit(values, 9, memory=needed)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Clustering 384 value vectors, exactly: the distances of exact clusters take ")
    assert f"GiB, within the limit of {needed:g} GiB." in said.err
    near = Clusters.fit(values, 9, memory=0)
    assert "by near neighbours" in (said := capsys.readouterr().err)
    assert "over the limit of 0 GiB" in said
    assert (exact.method, near.method) == ("exact", "neighbours")
    assert adjusted_rand_score(exact.labels, near.labels) < 1
    monkeypatch.setattr(COMPUTING, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Clusters.fit(values, 9)
    assert "Clustering 384" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        Clusters.fit(values, 9, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("value", "message"),
    [(0.0, "L1D5 is zero or not finite"), (float("nan"), "L1D5"), (float("inf"), "L1D5")],
)
def test_a_vector_without_a_direction_is_named(
    value: float,
    message: str,
    small_model: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    values = ValueVectors(small_model("gpt2"))
    plain = ValueVectors.layer

    def layer(self: ValueVectors, number: int) -> torch.Tensor:
        vectors = plain(self, number).clone()
        if number == 1:
            vectors[5] = value
            vectors[7, 3] = value
        return vectors

    monkeypatch.setattr(ValueVectors, "layer", layer)
    with pytest.raises(InputError, match=rf"{message}.*nor do {0 if value == 0 else 1} more"):
        Clusters.fit(values, 9, folder=tmp_path / "new" / "clusters", progress=False)
    assert not (tmp_path / "new").exists()


def test_short_vectors_count_as_much_as_long_ones(
    model_folder: Callable[[str], Path], small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    def shorter(weights: list[Any]) -> None:
        weights[0].mul_(1e-30)  # whose squares float32 cannot tell from zero
        weights[1].mul_(1e3)

    plain = Clusters.fit(ValueVectors(small_model("gpt2")), 30, progress=False)
    scaled = Clusters.fit(changed(model_folder, tmp_path, shorter), 30, progress=False)
    assert adjusted_rand_score(plain.labels, scaled.labels) == 1


# Kept in a folder


def test_what_is_kept_is_not_computed_again(
    small_model: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values, folder = ValueVectors(small_model("llama")), tmp_path / "deep" / "clusters"
    first = Clusters.fit(values, 20, folder=folder)
    alone = Clusters.fit(values, 20, progress=False)
    capsys.readouterr()
    monkeypatch.setattr(COMPUTING, lambda *_: 1 / 0)
    again, loaded = Clusters.fit(values, 20, folder=folder), Clusters.load(folder)
    assert capsys.readouterr().err == ""
    for other in (again, loaded, alone):
        assert other.labels.tolist() == first.labels.tolist()
        assert other.method == first.method == "exact"
        assert other.provenance == first.provenance
    assert first.provenance.model == values.identity
    config = json.loads((folder / "config.json").read_text())
    assert config["software"]["scikit-learn"]
    assert config["command"]


# What is told of them


def test_members_and_clusters_of_names(small_model: Callable[[str], Any]) -> None:
    values = ValueVectors(small_model("llama"))  # 3 layers of 48
    clusters = make_clusters([row % 5 for row in range(len(values))], values.identity)
    assert clusters.members(2).tolist() == list(range(2, len(values), 5))
    assert [values.at(row).layer for row in clusters.members(4)[[0, -1]]] == [0, N_LAYERS - 1]
    assert clusters.holding(values, ["L1D0", "L0D4", "L-1D-2", (0, 8)]) == [3, 4, 2]
    for wrong in (-1, 5):
        with pytest.raises(InputError, match=r"^cluster must be an integer from 0 to 4"):
            clusters.members(wrong)
    with pytest.raises(InputError, match="Index 48 of L0D48 is out of range"):
        clusters.holding(values, ["L0D48"])
    for one in ("L0D4", values.at(4)):
        with pytest.raises(InputError, match="must be a list"):
            clusters.holding(values, one)


def test_cosines_need_a_direction_for_each_cluster(small_model: Callable[[str], Any]) -> None:
    values = ValueVectors(small_model("llama"))
    clusters = make_clusters([row % 5 for row in range(len(values))], values.identity)
    directions = clusters.directions(values, [1, 2])
    for wrong in (directions[:1], directions[:, :0]):
        with pytest.raises(InputError, match="directions must be a vector for each of 2 clusters"):
            clusters.cosines(wrong, [1, 2])


def test_clusters_of_another_model_are_refused(small_model: Callable[[str], Any]) -> None:
    values, other = ValueVectors(small_model("llama")), ValueVectors(small_model("gemma3"))
    clusters = make_clusters([0] * len(values), values.identity)
    for use in (clusters.holding, clusters.directions):
        with pytest.raises(InputError, match=r"The clusters and this model .*llama.* and .*gemma3"):
            use(other, ["L0D0"] if use == clusters.holding else [0])


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_the_table_is_the_one_written_out(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model, plain = small_model(name), plain_model(name)
    values, unit = ValueVectors(model), plain_unit_vectors(name, plain)
    labels = [0] * len(values)
    labels[7] = labels[values.d_mlp + 2] = labels[values.d_mlp + 5] = 1
    labels[-1] = 2
    clusters = make_clusters(labels, values.identity)
    table = cluster_table(values, Projection.from_model(model), clusters, [2, 1], n_tokens=4)
    assert table["cluster"].tolist() == [2, 1]
    assert table["size"].tolist() == [1, 3]
    assert table["layers"].tolist() == [1, 2]
    assert table[["first_layer", "last_layer"]].values.tolist() == [[N_LAYERS - 1] * 2, [0, 1]]
    assert table["members"].tolist() == [f"L{N_LAYERS - 1}D{values.d_mlp - 1}", "L0D7 L1D2 L1D5"]
    members = unit[[7, values.d_mlp + 2, values.d_mlp + 5]]
    pairs = [members[i] @ members[j] for i, j in ((0, 1), (0, 2), (1, 2))]
    assert np.isnan(table["cosine"][0])
    assert table["cosine"][1] == pytest.approx(np.mean(pairs), abs=1e-6)
    embedding = plain.get_output_embeddings().weight.detach().double().numpy()
    for vector, texts in zip((unit[-1], members.mean(0)), table["tokens"], strict=True):
        best = np.argsort(-(embedding @ vector))[:4].tolist()
        names = zip(best, model.tokenizer.convert_ids_to_tokens(best), strict=True)
        assert texts == ", ".join(f"<{token}>" if name is None else name for token, name in names)


def test_ways_to_cluster_are_compared_on_drawn_vectors(
    small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    values, unit = ValueVectors(small_model("gpt2")), plain_unit_vectors("gpt2", plain_model("gpt2"))
    table = compare_linkages(values, 100, n_vectors=96, seed=2)
    unit = unit[sorted(np.random.default_rng(2).permutation(len(unit))[:96])]
    theirs = {
        linkage: AgglomerativeClustering(n_clusters=25, metric="cosine", linkage=linkage).fit_predict(unit)
        for linkage in ("average", "complete")
    } | {"neighbours": ward_of_neighbours(unit, 25)}
    assert (table["vectors"].unique().tolist(), table["clusters"].unique().tolist()) == ([96], [25])
    for row in table.to_dict("records"):
        ours, others = theirs[row["method"]], theirs[row["other"]]
        assert row["rand"] == pytest.approx(adjusted_rand_score(ours, others))
        for labels, cosine in ((ours, row["cosine"]), (others, row["other_cosine"])):
            means = np.array([unit[labels == label].mean(0) for label in labels])
            expected = np.mean((means * unit).sum(1) / np.linalg.norm(means, axis=1))
            assert cosine == pytest.approx(expected)
    assert table[["method", "other"]].values.tolist() == [
        ["average", "complete"], ["average", "neighbours"], ["complete", "neighbours"],
    ]  # fmt: skip
