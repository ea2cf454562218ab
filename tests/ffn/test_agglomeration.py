"""Merges on the disk are those of scikit-learn's and scipy's own clustering in memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score

from matlens import InputError
from matlens.ffn.agglomeration import cut, gib_on_disk, merges_in_memory, merges_on_disk

LINKAGES = ("average", "complete")


def unit_vectors(n: int, d: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(n, d))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def by_definition(distances: np.ndarray, linkage: str) -> list[list[set[int]]]:
    """The clusters after each merge: the two nearest of all, looked for anew each time."""
    clusters = [{row} for row in range(len(distances))]
    stages = [clusters]
    together = np.mean if linkage == "average" else np.max
    while len(clusters) > 1:
        pairs = [(i, j) for i in range(len(clusters)) for j in range(i)]
        far = [together(distances[np.ix_(list(clusters[i]), list(clusters[j]))]) for i, j in pairs]
        i, j = pairs[int(np.argmin(far))]
        rest = [cluster for place, cluster in enumerate(clusters) if place not in (i, j)]
        clusters = [*rest, clusters[i] | clusters[j]]
        stages.append(clusters)
    return stages


@pytest.mark.parametrize("linkage", LINKAGES)
@settings(max_examples=30)
@given(n=st.integers(2, 14), d=st.integers(2, 6), seed=st.integers(0, 10**6))
def test_clusters_of_every_number_are_those_of_the_definition(
    linkage: Any, n: int, d: int, seed: int
) -> None:
    unit = unit_vectors(n, d, seed)
    distances = pdist(unit, "cosine")
    assume(
        len(distances) < 2 or np.diff(np.sort(distances)).min() > 1e-5
    )  # either of equal ones may come first
    stages = by_definition(squareform(distances), linkage)
    for merges in (merges_in_memory(unit, linkage), merges_on_disk(unit, linkage, progress=False)):
        for stage in stages:
            labels = cut(merges, len(stage))
            assert {frozenset(np.flatnonzero(labels == c)) for c in set(labels)} == set(map(frozenset, stage))


@pytest.mark.parametrize("linkage", LINKAGES)
def test_more_vectors_than_a_block_of_distances(linkage: Any) -> None:
    unit = unit_vectors(700, 12, seed=3)
    merges = merges_on_disk(unit, linkage, progress=False)
    for n_clusters in (1, 2, 30, 200, 699):
        theirs = AgglomerativeClustering(n_clusters=n_clusters, metric="cosine", linkage=linkage)
        assert adjusted_rand_score(theirs.fit_predict(unit), cut(merges, n_clusters)) == 1


@pytest.mark.parametrize("linkage", LINKAGES)
def test_equal_vectors_are_merged_first(linkage: Any) -> None:
    distinct = unit_vectors(8, 5, seed=1)
    truth = np.random.default_rng(0).integers(0, 8, 60)
    for unit in (distinct[truth], np.repeat(distinct[:1], 60, axis=0)):
        merges = merges_on_disk(unit, linkage, progress=False)
        for n_clusters in (1, 3, 8, 60):
            labels = cut(merges, n_clusters)
            assert len(set(labels)) == n_clusters
    assert adjusted_rand_score(cut(merges_on_disk(distinct[truth], linkage, progress=False), 8), truth) == 1


class Usage(NamedTuple):
    free: float


def test_a_disk_without_room_is_refused_and_nothing_stays_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = unit_vectors(50, 5, seed=0)
    merges_on_disk(unit, "complete", tmp_path / "new", progress=False)
    assert not list((tmp_path / "new").iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0.99 * gib_on_disk(50) * 2**30))
    with pytest.raises(InputError, match=r"distances of 50 vectors take .* are free in .*new"):
        merges_on_disk(unit, "complete", tmp_path / "new", progress=False)
