"""Agglomeration gives scikit-learn's clusters, from all distances and from a graph of near neighbours."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.sparse import lil_array
from scipy.spatial.distance import pdist
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score

from matlens.ffn.agglomeration import EXACT, NEIGHBOURS, agglomerate, distances_gib, method_within

METHODS = (EXACT, NEIGHBOURS)


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
    found = AgglomerativeClustering(n_clusters=n_clusters, metric="cosine", linkage="average")
    return found.fit_predict(unit)


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
        found = AgglomerativeClustering(n_clusters=n_clusters, linkage="ward", connectivity=graph.tocsr())
        return found.fit_predict(unit.astype(np.float32))


@settings(deadline=None, max_examples=80)
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", [[20, 15, 12, 30], [2, 40, 11, 11, 3], [50]])
def test_bundles_apart_from_each_other_are_found(sizes: list[int], method: str) -> None:
    """The graph of such vectors falls into parts, of which nothing is to be heard."""
    unit, truth = bundles(sizes)
    assert same(agglomerate(unit, len(sizes), method), truth)


def test_a_graph_in_parts_is_joined() -> None:
    unit, truth = bundles([20, 15, 12, 30])
    for n_clusters in (1, 2, 3):
        labels = agglomerate(unit, n_clusters, NEIGHBOURS)
        assert len(set(labels)) == n_clusters
        for bundle in range(4):
            assert len(set(labels[truth == bundle])) == 1
        assert same(labels, ward_of_neighbours(unit, n_clusters))


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None, max_examples=40)
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
    assert distances_gib(2**15) == pytest.approx(8, rel=1e-4)
    assert distances_gib(1) == 0
    assert distances_gib(46080) == pytest.approx(15.82, abs=0.01)
    needed = distances_gib(1000)
    assert method_within(1000, needed) == EXACT
    assert method_within(1000, 0.999 * needed) == NEIGHBOURS
