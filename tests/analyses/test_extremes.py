"""Extreme sub-updates, their clusters and groups are those that plain loops over a trace find."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import N_LAYERS
from hypothesis import given
from hypothesis import strategies as st
from plain_values import plain_unit_vectors, plain_values
from sub_updates import extremes
from sub_updates.extremes import (
    FREQUENCY_KINDS,
    TokenFrequency,
    cluster_activity,
    extreme_sub_updates,
    frequency_kinds,
    group_table,
    position_table,
    sample_sub_updates,
)
from traces import K, N, make_clusters, make_trace_of_model

from matlens.ffn import Clusters, Projection, Trace, ValueVectors

D_MLP = 48  # value vectors of a layer of the small llama


def draw_clusters(values: ValueVectors, n_clusters: int) -> Clusters:
    labels = np.random.default_rng(0).permutation(np.arange(len(values)) % n_clusters)
    return make_clusters(labels, values.identity)


def found_by_loop(trace: Trace, scores: Any, threshold: float) -> list[tuple[int, int, int, float, float]]:
    rows = []
    for example in range(len(trace)):
        for layer in range(trace.n_layers):
            for i in range(trace.k):
                score = float(scores["dominant", "before"][example, layer, i])
                if score > threshold or score < -threshold:
                    row = layer * D_MLP + int(trace.index["dominant"][example, layer, i])
                    coefficient = float(trace.coefficient["dominant"][example, layer, i])
                    rows.append((example, layer, row, coefficient, score))
    return rows


def as_rows(sub_updates: Any) -> list[tuple[Any, ...]]:
    columns = ["example", "layer", "row", "coefficient", "score"]
    return list(zip(*(sub_updates[column].tolist() for column in columns), strict=True))


@pytest.fixture
def values(small_model):
    return ValueVectors(small_model("llama"))


@pytest.fixture
def commonness():
    """Half of the vocabulary does not occur, and 6 tokens are common."""
    return TokenFrequency(np.repeat(np.arange(30), [20] * 6 + [5] * 24), 60)


@pytest.mark.parametrize("threshold", [0.05, 0.7, 1.5])
def test_extreme_are_those_that_a_loop_finds(threshold, values):
    trace = make_trace_of_model(values)
    expected = found_by_loop(trace, trace.score, threshold)
    assert 0 < len(expected) < N * N_LAYERS * K
    assert as_rows(extreme_sub_updates(trace, draw_clusters(values, 6), threshold)) == expected
    usual = extremes.default_threshold(trace.score)
    assert usual == pytest.approx(np.percentile(trace.score["dominant", "before"].abs(), 99))


def test_sub_updates_are_sampled_once_each_and_by_the_seed(values):
    trace, clusters = make_trace_of_model(values), draw_clusters(values, 6)
    every = found_by_loop(trace, trace.score, 0)
    assert as_rows(sample_sub_updates(trace, clusters, 10**6)) == every
    first, again, other = (as_rows(sample_sub_updates(trace, clusters, 20, seed=n)) for n in (7, 7, 8))
    assert first == again != other
    assert first == sorted(set(first), key=every.index)
    assert len(first) == 20


def test_clusters_and_signs_are_told_as_a_loop_finds_them(values, commonness, small_model, plain_model):
    trace, clusters = make_trace_of_model(values), draw_clusters(values, 6)
    extreme = extreme_sub_updates(trace, clusters, 0.9)
    projection = Projection.from_model(small_model("llama"))
    ours = cluster_activity(extreme, clusters, trace, values, projection, commonness)
    unit = plain_unit_vectors("llama", plain_model("llama"))
    embedding = plain_model("llama").get_output_embeddings().weight.detach().double().numpy()
    by_loop: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    expected = found_by_loop(trace, trace.score, 0.9)
    for example, layer, row, coefficient, score in expected:
        key = int(clusters.labels[row]), 1 if coefficient > 0 else -1
        by_loop.setdefault(key, []).append((example, layer, score))
    order = sorted(by_loop, key=lambda key: (-len(by_loop[key]), *key))
    assert list(zip(ours["cluster"], ours["sign"], strict=True)) == order
    assert {sign for _, sign in order} == {1, -1}
    for actual, (cluster, sign) in zip(ours.itertuples(), order, strict=True):
        triples = by_loop[cluster, sign]
        rows = [row for row in range(len(values)) if clusters.labels[row] == cluster]
        assert (actual.size, actual.extremes) == (len(rows), len(triples))
        assert actual.share == pytest.approx(len(triples) / len(expected))
        assert actual.raised == pytest.approx(sum(score > 0 for *_, score in triples) / len(triples))
        assert actual.at_sinks == pytest.approx(sum(example < 2 for example, *_ in triples) / len(triples))
        assert actual.examples == pytest.approx(len({example for example, *_ in triples}) / N)
        layers = [layer for _, layer, _ in triples]
        assert actual.layer == pytest.approx(sum(layers) / len(layers))
        assert (actual.first_layer, actual.last_layer) == (min(layers), max(layers))
        assert actual.members == " ".join(f"L{row // D_MLP}D{row % D_MLP}" for row in rows)
        pairs = [unit[a] @ unit[b] for a in rows for b in rows if a < b]
        assert actual.cosine == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
        top = np.argsort(-(embedding @ (sign * unit[rows].mean(0))))[:30].tolist()
        assert actual.common == pytest.approx(sum(token < 6 for token in top) / 30)
        assert actual.unseen == pytest.approx(sum(token >= 30 for token in top) / 30)
        assert actual.tokens.split(", ")[0] == small_model("llama").tokenizer.convert_ids_to_tokens(top[0])
        assert actual.kind == frequency_kinds(np.array([actual.common]), np.array([actual.unseen]))[0]


def test_groups_are_told_as_a_loop_finds_them(values, commonness, small_model):
    trace, clusters = make_trace_of_model(values, seed=3), draw_clusters(values, 30)
    projection = Projection.from_model(small_model("llama"))
    extreme, sampled = (
        extreme_sub_updates(trace, clusters, 1.4),
        sample_sub_updates(trace, clusters, 25),
    )
    tables = [
        cluster_activity(each, clusters, trace, values, projection, commonness) for each in (extreme, sampled)
    ]
    names = np.array(["unlikely", "common", "other"])
    kind_of = pd.concat(tables)
    kind_of["kind"] = names[(kind_of["cluster"] + (kind_of["sign"] > 0)) % 3]
    confident = torch.linspace(0.1, 0.9, N)
    ours = group_table(extreme, sampled, kind_of, clusters, values, trace, confident)

    def kind(row: int, coefficient: float) -> str:
        return str(names[(clusters.labels[row] + (coefficient > 0)) % 3])

    every = [(*one, kind(one[2], one[3])) for one in as_rows(extreme)]
    others = [kind(row, coefficient) for _, _, row, coefficient, _ in as_rows(sampled)]
    for method in ("all", *FREQUENCY_KINDS):
        part = ours[ours["method"] == method]
        values_of_metric = part.set_index("metric")
        of_kind = [one for one in every if method in ("all", one[-1])]
        chosen = sorted({int(clusters.labels[row]) for _, _, row, *_ in of_kind})
        sizes = [int((clusters.labels == cluster).sum()) for cluster in chosen]
        cosines = tables[0].drop_duplicates("cluster").set_index("cluster")["cosine"][chosen]
        layers = [layer for _, layer, *_ in of_kind]
        assert part["layer"].tolist() == pytest.approx([sum(layers) / len(layers)] * len(part))
        expected = {
            "share": (len(of_kind) / len(every), len(every)),
            "share_sampled": (sum(method in ("all", other) for other in others) / len(others), 25),
            "clusters": (len(chosen), len(chosen)),
            "vectors": (sum(sizes) / len(values), len(chosen)),
            "cosine": (float(np.median(cosines)), len(chosen)),
            "active": (len({row for _, _, row, *_ in of_kind}) / len(values), len(of_kind)),
            "raised": (sum(score > 0 for _, _, _, _, score, _ in of_kind) / len(of_kind), len(of_kind)),
            "at_sinks": (sum(example < 2 for example, *_ in of_kind) / len(of_kind), len(of_kind)),
        }
        active = {(example, layer) for example, layer, *_ in of_kind if example >= 2}
        idle = {(example, layer) for example in range(2, N) for layer in range(N_LAYERS)} - active
        for name, quantity in (
            ("position", lambda example, layer: trace.examples.positions[example] + 1),
            ("confidence", lambda example, layer: float(confident[example])),
            ("stays", lambda example, layer: float(trace.rank[example, layer] == 1)),
        ):
            expected[name] = (sum(quantity(*one) for one in active) / len(active), len(active))
            means = 0.0
            for layer in range(N_LAYERS):
                own_idle = [quantity(*one) for one in idle if one[1] == layer]
                if times := sum(one[1] == layer for one in active):
                    means += times * sum(own_idle) / len(own_idle)
            nearby = [one for one in idle if one[1] in {layer for _, layer in active}]
            expected[f"{name}_else"] = (means / len(active), len(nearby))
        assert set(values_of_metric.index) == set(expected)
        for metric, (value, n) in expected.items():
            assert values_of_metric["value"][metric] == pytest.approx(value, abs=1e-6), (method, metric)
            assert values_of_metric["n"][metric] == n, (method, metric)


def test_places_are_counted_as_a_loop_counts_them(values, commonness, small_model):
    trace, clusters = make_trace_of_model(values), draw_clusters(values, 9)
    trace.examples.positions[:] = [0, 1, 2, 3, 4, 5, 9, 10, 19, 20, 39, 40, 55, 0]
    extreme = extreme_sub_updates(trace, clusters, 0.9)
    projection = Projection.from_model(small_model("llama"))
    table = cluster_activity(extreme, clusters, trace, values, projection, commonness)
    places = position_table(extreme, table, trace)
    ranges = [(1, 1), (2, 2), (3, 3), (4, 5), (6, 10), (11, 20), (21, 40), (41, 56)]
    assert places[["first_position", "last_position"]].drop_duplicates().to_numpy().tolist() == list(
        map(list, ranges)
    )
    kind_of = {(row.cluster, row.sign): row.kind for row in table.itertuples()}
    for row in places.itertuples():
        examples = [
            example for example in range(N)
            if row.first_position <= trace.examples.positions[example] + 1 <= row.last_position
        ]  # fmt: skip
        of_kind = [
            example for example, _, vector, coefficient, _ in as_rows(extreme)
            if kind_of[int(clusters.labels[vector]), 1 if coefficient > 0 else -1] == row.kind
        ]  # fmt: skip
        assert row.examples == len(examples)
        assert row.per_example == pytest.approx(sum(map(of_kind.count, examples)) / len(examples))
    assert (places["per_example"] * places["examples"]).sum() == pytest.approx(len(extreme))
    trace.examples.positions[:] = 2
    assert set(position_table(extreme, table, trace)["first_position"]) == {3}


def lift_by_hand(trace: Trace, plain: Any) -> np.ndarray:
    """Scores of the dominant sub-updates for the top candidate, above the mean over the vocabulary."""
    mean = plain.get_output_embeddings().weight.detach().double().mean(0)
    lifted = trace.score["dominant", "before"].double().numpy().copy()
    for example, layer, i in np.ndindex(*lifted.shape):
        vector = plain_values("llama", plain, layer)[trace.index["dominant"][example, layer, i]].double()
        lifted[example, layer, i] -= float(trace.coefficient["dominant"][example, layer, i] * (mean @ vector))
    return lifted


def test_both_readings_are_in_the_tables_under_their_names(values, commonness, small_model, plain_model):
    """Each has its own sub-updates; what the tables are made of is tested above."""
    trace, clusters = make_trace_of_model(values, seed=5), draw_clusters(values, 9)
    trace.coefficient["dominant"][:] *= 1000  # so that both readings differ by much
    confidence = torch.rand(N, generator=torch.Generator().manual_seed(1))
    tables = extremes.extreme_tables(
        trace, small_model("llama"), clusters, commonness, confidence, n_sampled=21, seed=4
    )
    scores = {
        "score": trace.score["dominant", "before"].double().numpy(),
        "lift": lift_by_hand(trace, plain_model("llama")),
    }
    assert list(tables.thresholds) == list(scores)
    found = {}
    for read, of_read in scores.items():
        passed = float(np.quantile(np.abs(of_read), 0.99))
        assert tables.thresholds[read] == pytest.approx(passed, rel=1e-5)
        relative = {("dominant", "before"): torch.from_numpy(of_read)}
        chosen = extreme_sub_updates(trace, clusters, passed, relative)
        sampled = sample_sub_updates(trace, clusters, 21, relative, seed=4)
        activity = tables.activity[tables.activity["read"] == read]
        for name, rows in (("extreme", chosen), ("sampled", sampled)):
            counted = activity[activity["sub_updates"] == name].set_index(["cluster", "sign"]).sort_index()
            expected = rows.groupby(["cluster", "sign"])["raised"].agg(["size", "mean"])
            np.testing.assert_allclose(counted[["extremes", "raised"]], expected)
        kinds = activity[["cluster", "sign", "kind"]]
        groups = group_table(chosen, sampled, kinds, clusters, values, trace, confidence)
        places = position_table(chosen, kinds, trace)
        for table, expected in ((tables.groups, groups), (tables.places, places)):
            ours = table[table["read"] == read].drop(columns="read").reset_index(drop=True)
            pd.testing.assert_frame_equal(ours, expected, check_dtype=False)
        found[read] = len(chosen), chosen["raised"].mean()
    assert found["score"] != found["lift"]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_half_of_the_text_is_common_and_no_token_too_many(text):
    frequency, times = TokenFrequency(np.array(text), 9), Counter(text)
    assert frequency.counts.tolist() == [times[token] for token in range(9)]
    common = set(np.flatnonzero(frequency.common).tolist())
    shares = [np.mean([token in common for token in text]), np.mean([times[t] == 0 for t in (0, 3, 8)])]
    assert frequency.shares(np.array([text]))[0] == pytest.approx(shares[0])
    assert frequency.shares(np.array([[0, 3, 8]]))[1] == pytest.approx(shares[1])
    made = sum(times[token] for token in common)
    assert 2 * made >= len(text)
    assert all(2 * (made - times[token]) < len(text) for token in common)
    assert min(times[token] for token in common) >= max(
        (times[token] for token in times if token not in common), default=0
    )


def test_the_text_is_all_sentences_of_the_corpus(sentences, small_model):
    tokenizer = small_model("bert").tokenizer  # which would add [CLS] and [SEP]
    words = Counter(word for sentence in sentences.sentences for word in sentence.split())
    frequency = TokenFrequency.from_corpus(sentences, tokenizer, 60)
    assert {word: int(frequency.counts[tokenizer.convert_tokens_to_ids(word)]) for word in words} == words
    assert frequency.counts.sum() == sum(words.values())


def test_kinds_by_what_most_tokens_are():
    common, unseen = np.array([0.5, 0.49, 0, 0, 1]), np.array([0.5, 0, 0.9, 0.89, 0])
    assert frequency_kinds(common, unseen) == ["common", "other", "unlikely", "other", "common"]
