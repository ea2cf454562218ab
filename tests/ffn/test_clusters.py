"""Clusters are scikit-learn's, whatever ties there are, stored in a folder, and described as by hand."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plain_values import plain_unit_vectors
from scipy.sparse import lil_array
from scipy.spatial.distance import pdist
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score
from sub_updates.extremes import compare_linkages
from traces import make_clusters

from matlens import InputError
from matlens.ffn.agglomeration import EXACT, NEIGHBORS, agglomerate, gib_in_memory
from matlens.ffn.clusters import Clusters
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors

LINKAGES: tuple[Any, ...] = ("average", "complete")


def unit_vectors(n: int, d: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(n, d))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Equal but for the numbers of the clusters."""
    return adjusted_rand_score(ours, theirs) == 1 and len(set(ours.tolist())) == len(set(theirs.tolist()))


def exact(unit: np.ndarray, n_clusters: int, linkage: str) -> np.ndarray:
    clustering = AgglomerativeClustering(n_clusters=n_clusters, metric="cosine", linkage=linkage)
    return np.arange(len(unit)) if n_clusters == len(unit) else clustering.fit_predict(unit)


def ward_of_neighbors(unit: np.ndarray, n_clusters: int) -> np.ndarray:
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


@pytest.mark.parametrize("linkage", LINKAGES)
@settings(max_examples=40)
@given(st.data(), st.integers(2, 24), st.integers(2, 6), st.integers(0, 10**6))
def test_exact_clusters_are_scikit_learns(linkage, data, n, d, seed):
    unit = unit_vectors(n, d, seed)
    distances = np.sort(pdist(unit, "cosine"))
    assume(len(distances) < 2 or np.diff(distances).min() > 1e-9)  # of equal ones any may come first
    n_clusters = data.draw(st.integers(1, n))
    assert same(agglomerate(unit, n_clusters, EXACT, linkage), exact(unit, n_clusters, linkage))


@pytest.mark.parametrize("method", [EXACT, NEIGHBORS])
@settings(max_examples=40)
@given(st.data(), st.integers(1, 30), st.integers(0, 10**6), st.booleans())
def test_clusters_are_as_many_as_requested_and_numbered_by_size(method, data, n, seed, equal):
    """Whatever ties there are; of one size, those come first whose first vector does."""
    unit = unit_vectors(n, 3, seed)
    if equal:
        unit = unit[np.random.default_rng(seed).integers(0, (n + 1) // 2, n)]
    n_clusters = data.draw(st.integers(1, n))
    labels = agglomerate(unit, n_clusters, method)
    assert sorted(set(labels.tolist())) == list(range(n_clusters))
    keys = [(-int((labels == c).sum()), int(np.flatnonzero(labels == c)[0])) for c in range(n_clusters)]
    assert keys == sorted(keys)


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
@pytest.mark.parametrize("linkage", LINKAGES)
def test_clusters_of_a_model_are_those_of_its_plain_weights(name, linkage, small_model, plain_model):
    values, unit = ValueVectors(small_model(name)), plain_unit_vectors(name, plain_model(name))
    ours = Clusters.fit(values, 40, linkage=linkage, progress=False)
    theirs = exact(unit, 40, linkage)
    assert (ours.method, ours.linkage, len(ours)) == ("exact", linkage, 40)
    assert same(ours.labels, theirs)
    assert ours.sizes.tolist() == sorted(np.bincount(theirs).tolist(), reverse=True)


def test_the_method_follows_the_memory_and_is_printed(small_model, capsys):
    """Two float64 for each pair of vectors."""
    assert gib_in_memory(46080) == pytest.approx(15.82, abs=0.01)
    values = ValueVectors(small_model("gpt2"))
    needed = gib_in_memory(len(values))
    for memory, method, linkage in ((needed, "exact", "average"), (0.999 * needed, "neighbors", "ward")):
        fitted = Clusters.fit(values, 9, memory=memory)
        assert (fitted.method, fitted.linkage) == (method, linkage)
        said = capsys.readouterr()
        assert f"{method.removesuffix('s')[:5]}" in said.err
        assert said.out == ""
    with pytest.raises(InputError, match="Complete linkage: exact clusters of 384 value vectors need"):
        Clusters.fit(values, 40, linkage="complete", memory=0, progress=False)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_vector_without_a_direction_is_named(value, small_model, monkeypatch):
    values, plain = ValueVectors(small_model("gpt2")), ValueVectors.layer_view

    def layer(self: ValueVectors, number: int) -> torch.Tensor:
        vectors = plain(self, number).clone()
        if number == 1:
            vectors[5] = value
        return vectors

    monkeypatch.setattr(ValueVectors, "layer_view", layer)
    with pytest.raises(InputError, match=r"L1D5 is zero or not finite"):
        Clusters.fit(values, 9, progress=False)


def test_short_vectors_count_as_much_as_long_ones(small_model, monkeypatch):
    values, plain = ValueVectors(small_model("gpt2")), ValueVectors.layer_view
    expected = Clusters.fit(values, 30, progress=False)
    scales = (1e-30, 1e3, 1.0)  # whose squares float32 cannot tell from zero
    monkeypatch.setattr(ValueVectors, "layer_view", lambda self, number: scales[number] * plain(self, number))
    assert adjusted_rand_score(expected.labels, Clusters.fit(values, 30, progress=False).labels) == 1


def test_stored_clusters_are_not_computed_again(small_model, tmp_path, monkeypatch, capsys):
    values, folder = ValueVectors(small_model("llama")), tmp_path / "deep" / "clusters"
    first = Clusters.fit(values, 20, folder=folder)
    capsys.readouterr()
    monkeypatch.setattr("matlens.ffn.clusters.agglomerate", lambda *_: 1 / 0)
    for other in (Clusters.fit(values, 20, folder=folder), Clusters.load(folder)):
        assert other.labels.tolist() == first.labels.tolist()
        assert other.provenance == first.provenance
    assert capsys.readouterr().err == ""
    assert first.provenance.model == values.identity


def test_members_and_clusters_of_names(small_model):
    values = ValueVectors(small_model("llama"))  # 3 layers of 48
    clusters = make_clusters([row % 5 for row in range(len(values))], values.identity)
    assert clusters.members(2).tolist() == list(range(2, len(values), 5))
    assert clusters.containing(values, ["L1D0", "L0D4", "L-1D-2", (0, 8)]) == [3, 4, 2]
    with pytest.raises(InputError, match=r"^cluster must be an integer from 0 to 4"):
        clusters.members(-1)
    other = ValueVectors(small_model("gemma3"))
    for use in (clusters.containing, clusters.directions):
        with pytest.raises(InputError, match=r"The clusters and this model .*llama.* and .*gemma3"):
            use(other, ["L0D0"] if use == clusters.containing else [0])


def test_methods_are_compared_on_sampled_vectors(small_model, plain_model):
    values, unit = ValueVectors(small_model("gpt2")), plain_unit_vectors("gpt2", plain_model("gpt2"))
    table = compare_linkages(values, 100, n_vectors=96, seed=2)
    unit = unit[sorted(np.random.default_rng(2).permutation(len(unit))[:96])]
    theirs = {linkage: exact(unit, 25, linkage) for linkage in LINKAGES}
    theirs["neighbors"] = ward_of_neighbors(unit, 25)
    assert (table["vectors"].unique().tolist(), table["clusters"].unique().tolist()) == ([96], [25])
    assert len(table) == 3
    for row in table.to_dict("records"):
        ours, others = theirs[row["method"]], theirs[row["other"]]
        assert row["rand"] == pytest.approx(adjusted_rand_score(ours, others))
        for labels, cosine in ((ours, row["cosine"]), (others, row["other_cosine"])):
            means = np.array([unit[labels == label].mean(0) for label in labels])
            expected = np.mean((means * unit).sum(1) / np.linalg.norm(means, axis=1))
            assert cosine == pytest.approx(expected)


@pytest.mark.parametrize("linkage", LINKAGES)
def test_exact_clusters_of_more_vectors_than_a_block_of_distances(linkage):
    unit = unit_vectors(600, 8, seed=3)
    for n_clusters in (1, 150, 599):
        assert same(agglomerate(unit, n_clusters, EXACT, linkage), exact(unit, n_clusters, linkage))


def test_the_table_is_the_one_written_out(small_model, plain_model):
    model, plain = small_model("gpt2"), plain_model("gpt2")
    values, unit = ValueVectors(model), plain_unit_vectors("gpt2", plain)
    labels = np.zeros(len(values), dtype=int)
    labels[[7, values.d_mlp + 2, values.d_mlp + 5]], labels[-1] = 1, 2
    clusters = make_clusters(labels, values.identity)
    table = clusters.table(values, Projection.from_model(model), [2, 1], n_tokens=4)
    columns = ["cluster", "size", "layers", "first_layer", "last_layer"]
    assert table[columns].values.tolist() == [[2, 1, 1, 2, 2], [1, 3, 2, 0, 1]]
    assert table["members"].tolist() == [f"L2D{values.d_mlp - 1}", "L0D7 L1D2 L1D5"]
    members = unit[labels == 1]
    pairs = [members[i] @ members[j] for i, j in ((0, 1), (0, 2), (1, 2))]
    assert np.isnan(table["cosine"][0])
    assert table["cosine"][1] == pytest.approx(np.mean(pairs), abs=1e-6)
    embedding = plain.get_output_embeddings().weight.detach().double().numpy()
    for vector, texts in zip((unit[-1], members.mean(0)), table["tokens"], strict=True):
        best = np.argsort(-(embedding @ vector))[:4].tolist()
        names = zip(best, model.tokenizer.convert_ids_to_tokens(best), strict=True)
        assert texts == ", ".join(f"<{token}>" if name is None else name for token, name in names)
