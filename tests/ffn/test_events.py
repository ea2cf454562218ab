"""Events and their tables are those that loops over the examples find, written from the definition."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import SINK_TOKENS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sub_updates.events import event_tables, saturation_frequency, update_scores, updates_by_effect
from traces import make_trace

from matlens import make_examples
from matlens.data.examples import Examples
from matlens.ffn.events import find_events, find_saturation, relative_scores
from matlens.ffn.projection import Projection
from matlens.ffn.trace import GROUPS, Trace
from matlens.ffn.values import ValueVectors
from matlens.io.tables import COLUMNS

METRICS = {"max": max, "mean": lambda values: sum(values) / len(values), "min": min}

REFERENCE = {
    "update": "before",
    "stays": "before",
    "falls": "before",
    "saturation": "final",
    "elimination": "before",
}


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Few tokens, so that candidates come back often; ranks that are 0 where the candidate stays."""
    n, n_layers = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    tokens = st.lists(st.integers(0, 2), min_size=n * n_layers, max_size=n * n_layers)
    before, after = (torch.tensor(draw(tokens)).view(n, n_layers) for _ in range(2))
    ranks = torch.tensor(draw(tokens)).view(n, n_layers) + 1
    return make_trace(
        before, after, ranks.where(before != after, torch.zeros_like(ranks)), k=draw(st.integers(1, 3))
    )


def made_at(trace: Trace, example: int) -> tuple[int, str]:
    """The layer from which on the predicted token is always the candidate, and what brought it there."""
    final = int(trace.after[example, trace.n_layers - 1])
    layer, by = trace.n_layers - 1, "ffn"
    for l in reversed(range(trace.n_layers)):
        if int(trace.after[example, l]) != final:
            break
        layer, by = l, "ffn"
        if int(trace.before[example, l]) != final:
            break
        layer, by = l, "attention"
    return layer, by


def eliminated_at(trace: Trace, example: int) -> int | None:
    """The layer whose FFN leaves its candidate on the lowest rank, if one falls at all."""
    worst, at = 1, None
    for layer in range(trace.n_layers):
        if int(trace.rank[example, layer]) > worst:
            worst, at = int(trace.rank[example, layer]), layer
    return at


def all_updates(trace: Trace) -> dict[str, list[tuple[int, int]]]:
    updates: dict[str, list[tuple[int, int]]] = {name: [] for name in REFERENCE}
    for example in range(len(trace)):
        for layer in range(trace.n_layers):
            updates["update"].append((example, layer))
            updates["falls" if int(trace.rank[example, layer]) > 1 else "stays"].append((example, layer))
        layer, by = made_at(trace, example)
        if by == "ffn":
            updates["saturation"].append((example, layer))
        eliminated = eliminated_at(trace, example)
        if eliminated is not None:
            updates["elimination"].append((example, eliminated))
    return updates


@settings(max_examples=100)
@given(traces())
def test_events_and_updates_are_those_of_a_loop(trace):
    made = find_saturation(trace)
    by_hand = [made_at(trace, example) for example in range(len(trace))]
    assert made.layer.tolist() == [layer for layer, _ in by_hand]
    assert made.by_ffn.tolist() == [by == "ffn" for _, by in by_hand]
    expected, updates = all_updates(trace), updates_by_effect(trace)
    assert list(updates) == list(REFERENCE)
    for name, events in updates.items():
        assert list(zip(events.example.tolist(), events.layer.tolist(), strict=True)) == expected[name]
        assert events.reference == REFERENCE[name]
    assert list(find_events(trace)) == ["saturation", "elimination"]


def expected_value(
    trace: Trace, places: list[tuple[int, int]], group: str, reference: str, metric: str
) -> list[float]:
    return [METRICS[metric](trace.score[group, reference][place].tolist()) for place in places]


def some(rows: list[bool] | None, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return places if rows is None else [place for place in places if rows[place[0]]]


@settings(max_examples=40)
@given(traces(), st.none() | st.lists(st.booleans(), min_size=6, max_size=6))
def test_the_layers_table_has_the_means_and_quantiles_over_the_updates(trace, rows):
    assume(rows is None or any(rows[: len(trace)]))
    table = update_scores(trace, rows=None if rows is None else torch.tensor(rows[: len(trace)]))
    places = {name: some(rows, places_of_kind) for name, places_of_kind in all_updates(trace).items()}
    there = {(name, layer) for name, places_of_kind in places.items() for _, layer in places_of_kind}
    assert set(zip(table["event"], table["layer"], strict=True)) == there
    assert not table.duplicated(["event", "layer", "method", "metric"]).any()
    for row in table.itertuples():
        metric, _, percent = row.metric.partition("_p")
        of_event = [place for place in places[row.event] if place[1] == row.layer]
        values = expected_value(trace, of_event, row.method, REFERENCE[row.event], metric)
        if percent:
            assert row.event == "update"
            expected = float(np.percentile(values, int(percent)))
        else:
            expected = sum(values) / len(values)
        assert row.value == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert (row.n, row.target) == (len(of_event), row.layer)
    quantiles = {f"{metric}_p{percent}" for metric in METRICS for percent in ("05", "50", "95")}
    assert set(table[table["event"] == "update"]["metric"]) == {*METRICS, *quantiles}


@settings(max_examples=50)
@given(traces())
def test_the_frequency_of_saturation_is_counted_and_sums_to_one(trace):
    table = saturation_frequency(trace)
    assert list(table) == list(COLUMNS)
    assert len(table) == 3 * trace.n_layers
    made = [made_at(trace, example) for example in range(len(trace))]
    for row in table.itertuples():
        hits = [layer == row.layer and row.method in ("either", by) for layer, by in made]
        assert row.value == pytest.approx(sum(hits) / len(hits))
        assert row.low <= row.value <= row.high
        assert (row.metric, row.n) == ("share", len(trace))
    shares = table.groupby("method")["value"].sum()
    assert shares["either"] == pytest.approx(1)
    assert shares["ffn"] + shares["attention"] == pytest.approx(1)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bert"])
def test_lift_and_odds_are_differences_of_the_projections_scores(name, small_model, sentences):
    model = small_model(name)
    trace = Trace.run(model, make_examples(model, sentences).head(8), k=3, progress=False)
    values, projection = ValueVectors(model), Projection.from_model(model)
    lifted, against = (relative_scores(trace, model, to) for to in ("mean", "rival"))
    assert set(lifted) == set(against) == set(trace.score)
    for example in range(len(trace)):
        for layer in range(trace.n_layers):
            place = example, layer
            before, after = int(trace.before[place]), int(trace.after[place])
            final = int(trace.final[example])
            for group in GROUPS:
                vectors = values.layer(layer)[trace.index[group][place]]
                m = trace.scale[place] * trace.coefficient[group][place]
                of_all = projection.scores(m[:, None] * vectors).double()
                scale = 1e-5 * float(of_all.abs().max())
                for reference, token, rival in (("before", before, after), ("final", final, before)):
                    expected = (of_all[:, token] - of_all.mean(1), of_all[:, token] - of_all[:, rival])
                    for ours, theirs in zip((lifted, against), expected, strict=True):
                        torch.testing.assert_close(
                            ours[group, reference][place].double(), theirs, rtol=0, atol=scale
                        )


@pytest.fixture(scope="module")
def with_sinks(small_model):
    """Every fifth example is at a sink, which every model of the kind has at the same tokens."""
    n, generator = 60, torch.Generator().manual_seed(0)
    tokens = torch.randint(10, 55, (n, 6), generator=generator)
    tokens[::5, 3] = SINK_TOKENS[0]
    examples = Examples(
        tokens.flatten().numpy(), 6 * np.arange(n + 1), np.full(n, 3), {"corpus": "words", "n": n}
    )
    return Trace.run(small_model("llama-sinks"), examples, k=3, progress=False)


def test_all_readings_and_sinks_are_in_the_tables_under_their_names(with_sinks, small_model):
    trace, model = with_sinks, small_model("llama-sinks")
    tables = event_tables(trace, model)
    lift, odds = (relative_scores(trace, model, to) for to in ("mean", "rival"))
    readings = {"score": trace.score, "lift": lift, "odds": odds}
    counted = {"all examples": [True] * 60, "sinks excluded": [i % 5 != 0 for i in range(60)]}
    updates = all_updates(trace)
    for table, kinds in ((tables.events, ("saturation", "elimination")), (tables.scores, tuple(REFERENCE))):
        combinations = table[["read", "examples"]].drop_duplicates().apply(tuple, axis=1).tolist()
        assert combinations == [(read, examples) for read in readings for examples in counted]
        assert set(table["event"]) == set(kinds)
        for row in table[table["metric"].isin(METRICS)].itertuples():
            places = some(counted[row.examples], updates[row.event])
            if table is tables.scores:
                places = [place for place in places if place[1] == row.layer]
            scores = readings[row.read][row.method, REFERENCE[row.event]]
            values = [METRICS[row.metric](scores[place].tolist()) for place in places]
            assert row.n == len(values)
            assert row.layer == pytest.approx(sum(layer for _, layer in places) / len(places))
            assert row.value == pytest.approx(sum(values) / len(values), rel=1e-4, abs=1e-5)
    assert (tables.scores["read"] == "score").sum() * 3 == len(tables.scores)
    pd.testing.assert_frame_equal(tables.saturation, saturation_frequency(trace))
    counts = tables.scores[tables.scores["event"] == "update"].groupby("examples")["n"].first()
    assert counts.to_dict() == {"all examples": 60, "sinks excluded": 48}
