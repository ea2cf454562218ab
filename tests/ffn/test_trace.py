"""Traces, events and the exit rule are those of the plain model and of loops over examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import (
    MASKED,
    N_LAYERS,
    SINK_TOKENS,
    assert_near,
    load_plain,
    make_sentences,
    plain_vectors,
    save_model,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from identities import make_identity
from plain_values import NORM_BEHIND, plain_logits, plain_scale, plain_unembedding, plain_values
from rule_by_hand import layer_left
from sub_updates.events import event_tables, saturation_frequency, update_scores, updates_by_effect
from torch import Tensor
from traces import make_clusters, make_trace, make_trace_of_dominant

import matlens
from matlens import InputError, make_examples
from matlens.data.examples import Examples
from matlens.ffn import trace as module
from matlens.ffn.events import find_events, find_saturation, relative_scores
from matlens.ffn.projection import Projection
from matlens.ffn.rule import ExitRule, active_clusters
from matlens.ffn.trace import GROUPS, REFERENCES, Trace
from matlens.ffn.values import ValueVectors
from matlens.io.tables import COLUMNS
from matlens.models.layout import ModelLayout

WIRINGS = ("gpt2", "gptj", "bert", "gemma2", "gemma3", "granite", "olmo2")

N, K, BUDGET = 10, 4, 30  # sentences, sub-updates, tokens of a batch

ROUNDING = 2e-5  # of the largest number


@pytest.fixture(scope="module")
def pair(small_model, plain_model, tmp_path_factory):
    """A small model, loaded and plain. BERT's has greater weights: as it is, it predicts one token always."""
    made: dict[str, tuple[Any, Any]] = {}

    def both(name: str) -> tuple[Any, Any]:
        if name not in MASKED:
            return small_model(name), plain_model(name)
        if name not in made:
            folder = save_model(name, tmp_path_factory.mktemp("lively") / name)
            plain = load_plain(name, folder)
            with torch.no_grad():
                for path, parameter in plain.named_parameters():
                    if "layer" in path and path.endswith("dense.weight"):
                        parameter.mul_(20)
            plain.save_pretrained(folder)
            made[name] = matlens.load(str(folder), device="cpu"), plain
        return made[name]

    return both


@dataclass
class PlainUpdate:
    """One FFN and one sentence, as the plain model has them."""

    before: Tensor  # x
    logits_before: Tensor
    logits_after: Tensor  # of x~
    norm: float
    m: Tensor
    scale: float  # of a norm behind the FFN


def plain_updates(name: str, plain: Any, examples: Examples, sentence: int) -> list[PlainUpdate]:
    """What the FFN of every layer does to a sentence that is read alone."""
    start, end = examples.offsets[sentence : sentence + 2]
    at = examples.positions[sentence]
    vectors_by_site = plain_vectors(name, plain, torch.from_numpy(examples.tokens[start:end]))
    layers = from_vectors(name, plain, {site: vectors[0, at] for site, vectors in vectors_by_site.items()})
    assert_near(layers[-1].logits_after, vectors_by_site["logits"][0, at])
    return layers


def from_vectors(name: str, plain: Any, at: dict[str, Tensor]) -> list[PlainUpdate]:
    layers = []
    for layer in range(N_LAYERS):
        # In parallel blocks as if attention came first.
        x = at[f"mid.{layer}"] if f"mid.{layer}" in at else at[f"h.{layer}"] + at[f"attn_out.{layer}"]
        logits = [plain_logits(name, plain, vector) for vector in (x, at[f"h.{layer + 1}"])]
        scale = plain_scale(name, plain, at.get(f"ffn_out.{layer}", x))
        m = at[f"ffn_post.{layer}"].double()
        layers.append(PlainUpdate(x, *logits, float(at[f"h.{layer + 1}"].norm()), m, scale))
        if name in NORM_BEHIND:  # the sub-updates are all that the FFN adds to the stream
            assert_near(
                scale * (m @ plain_values(name, plain, layer).double()), at[f"h.{layer + 1}"] - x, ROUNDING
            )
    return layers


def assert_top(token: Tensor, logits: Tensor) -> None:
    """Check that no other token is above it by more than rounding."""
    assert float(logits.max() - logits[token]) <= ROUNDING * float(logits.abs().max())


def rank_bounds(token: Tensor, logits: Tensor) -> tuple[int, int]:
    """The best and the worst rank that it may have, as rounding falls."""
    slack = ROUNDING * float(logits.abs().max())
    return 1 + int((logits > logits[token] + slack).sum()), int((logits > logits[token] - slack).sum())


def assert_close(ours: Tensor, theirs: Tensor, scale: float) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=ROUNDING * scale)


def check(name: str, plain: Any, examples: Examples, trace: Trace, updates: list[list[PlainUpdate]]) -> None:
    """Compare every number of a trace, and see that the comparison says something."""
    e, sure = plain_unembedding(plain).double(), 0
    assert (len(trace), trace.n_layers, trace.k) == (len(examples), N_LAYERS, K)
    assert trace.before.dtype == trace.after.dtype == trace.rank.dtype == torch.int64
    for sentence in range(len(examples)):
        for layer, plain_update in enumerate(updates[sentence]):
            where = sentence, layer
            assert_top(trace.before[where], plain_update.logits_before)
            assert_top(trace.after[where], plain_update.logits_after)
            low, high = rank_bounds(trace.before[where], plain_update.logits_after)
            assert low <= int(trace.rank[where]) <= high
            sure += low == high
            v = plain_values(name, plain, layer).double()
            lengths = plain_update.m.abs() * v.norm(dim=1)
            chosen = trace.index["dominant"][where]
            assert_near(lengths[chosen], lengths.topk(K).values, ROUNDING)
            assert len(set(chosen.tolist())) == K
            tokens = {"before": trace.before[where], "final": trace.final[sentence]}
            # A small coefficient is a difference of large numbers: rounding is small against all of them.
            largest = float(plain_update.m.abs().max())
            assert float(trace.norm[where]) == pytest.approx(plain_update.norm, rel=1e-4)
            assert float(trace.scale[where]) == pytest.approx(plain_update.scale, rel=1e-4)
            for group in GROUPS:
                index = trace.index[group][where]
                assert_close(trace.coefficient[group][where], plain_update.m[index], largest)
                for reference in REFERENCES:
                    static = v[index] * e[tokens[reference]]
                    scale = plain_update.scale * largest * float(static.abs().sum(1).max())
                    scores = plain_update.scale * plain_update.m[index] * static.sum(1)
                    assert_close(trace.score[group, reference][where], scores, scale)
    assert sure > 0.5 * len(examples) * N_LAYERS, "most ranks could be several, so this proves little"
    assert torch.equal(trace.final, trace.after[:, -1])


@pytest.mark.parametrize("name", WIRINGS)
def test_every_number_is_the_plain_models(name, pair, sentences):
    model, plain = pair(name)
    examples = make_examples(model, sentences).head(N)
    trace = Trace.run(model, examples, k=K, batch_tokens=BUDGET, progress=False)
    check(name, plain, examples, trace, [plain_updates(name, plain, examples, i) for i in range(N)])
    assert (trace.rank > 1).any(), "no candidate ever falls, so this proves less"
    assert (trace.before != trace.final[:, None]).any(), "both references are one"
    assert all(bool((trace.coefficient[group] != 0).any()) for group in GROUPS)


@pytest.fixture
def llama(small_model):
    model = small_model("llama")
    return model, make_examples(model, make_sentences())


def test_a_stored_trace_is_the_one_in_memory_and_a_finished_folder_is_only_opened(
    llama, tmp_path, monkeypatch
):
    options: dict[str, Any] = {"k": K, "seed": 3, "progress": False}
    folder = tmp_path / "deep" / "trace"
    stored = Trace.run(*llama, folder=folder, **options)
    in_memory = Trace.run(*llama, **options)
    random = ValueVectors(llama[0]).random_sub_updates(len(stored), K, seed=3)
    assert torch.equal(stored.index["random"], torch.stack(random, 1).long())
    monkeypatch.setattr(module, "stream", lambda *_, **__: pytest.fail("the model is run"))
    for again in (Trace.run(*llama, folder=folder, batch_tokens=1, **options), Trace.load(folder)):
        for trace in (again, in_memory):
            for name in ("before", "after", "rank", "norm", "scale"):
                assert torch.equal(getattr(trace, name), getattr(stored, name))
            for name in ("index", "coefficient", "score"):
                for key, values in getattr(stored, name).items():
                    assert torch.equal(getattr(trace, name)[key], values)
        assert (again.provenance.details["k"], again.provenance.details["seed"]) == (K, 3)
        assert again.provenance.corpus == "words"


def test_a_trace_that_is_not_finite_is_refused(llama, monkeypatch):
    scale = torch.tensor(torch.inf)
    monkeypatch.setattr(module.ValueVectors, "scale", lambda _, __, outputs: scale.expand(len(outputs)))
    with pytest.raises(InputError, match="not finite"):
        Trace.run(*llama, k=K, progress=False)


def test_what_cannot_be_traced_is_refused_before_anything_is_run(llama, small_model, monkeypatch):
    model, examples = llama
    monkeypatch.setattr(module, "stream", lambda *_, **__: pytest.fail("the model is run"))
    with pytest.raises(InputError, match="no known value vectors"):  # these blocks are stream-only
        Trace.run(small_model("bloom"), examples, k=K)
    # Blocks with value vectors, but without a known residual stream before the FFN.
    layout = ModelLayout.from_model(model)
    bare = replace(layout, kinds=tuple(kind for kind in layout.kinds if kind != "mid"))
    monkeypatch.setattr(module.ModelLayout, "from_model", lambda _: bare)
    with pytest.raises(InputError, match=r"The residual stream before the FFNs of .*pre-norm\) is unknown"):
        Trace.run(model, examples, k=K)


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


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Sub-updates, labels of the value vectors, where predictions are made, how many examples train."""
    n_layers, d_mlp, n = draw(st.integers(1, 4)), draw(st.integers(3, 7)), draw(st.integers(2, 12))
    k = draw(st.integers(1, 3))
    chosen = st.lists(st.integers(0, d_mlp - 1), min_size=k, max_size=k, unique=True)
    dominant = draw(st.lists(st.lists(chosen, min_size=n_layers, max_size=n_layers), min_size=n, max_size=n))
    some = st.integers(0, draw(st.integers(0, n_layers * d_mlp - 1)))
    labels = draw(st.lists(some, min_size=n_layers * d_mlp, max_size=n_layers * d_mlp))
    made = draw(st.lists(st.integers(-1, n_layers - 1), min_size=n, max_size=n))
    _, dense = np.unique(labels, return_inverse=True)
    return np.array(dominant), dense, np.array(made), draw(st.integers(1, n - 1))


@pytest.mark.parametrize("overlap", ["sets", "places"])
@pytest.mark.parametrize("others", ["later", "by-layer", "together"])
@settings(max_examples=60)
@given(case=cases())
def test_the_rule_is_a_loop_over_examples(others, overlap, case):
    dominant, labels, made, n_train = case
    n, n_layers, _ = dominant.shape
    d_mlp, model = len(labels) // n_layers, make_identity("none", "one", n_layers=n_layers)
    clusters = [
        [[int(labels[layer * d_mlp + i]) for i in dominant[row, layer]] for layer in range(n_layers)]
        for row in range(n)
    ]
    order = np.random.default_rng(0).permutation(n)
    train, test = order[:n_train], order[n_train:]
    active = active_clusters(make_trace_of_dominant(dominant, "one"), make_clusters(labels, model))
    assert active.tolist() == clusters
    known = [clusters[row] for row in train]
    expected = [layer_left(clusters[row], known, made[train].tolist(), others, overlap) for row in test]
    rule = ExitRule(others=others, overlap=overlap).fit(active, made, train)
    signals = rule.signals(active, test)
    signals[:, -1] = True  # the last layer needs no signal
    assert signals.argmax(1).tolist() == expected


def test_clusters_are_ordered_by_the_sizes_of_coefficients():
    trace = make_trace_of_dominant(np.array([[[0, 1, 2, 3]], [[3, 2, 1, 0]]]), "one")
    trace.coefficient["dominant"] = torch.tensor([[[1.0, -4.0, 3.0, -2.0]], [[1.0, 1.0, 0.0, -1.0]]])
    clusters = make_clusters([5, 4, 3, 2, 0, 1], make_identity("none", "one", n_layers=1))
    assert active_clusters(trace, clusters).tolist() == [[[4, 3, 2, 5]], [[2, 3, 5, 4]]]
