"""Objects that do not belong together are refused, and not computed with one broadcast to the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from calibration_texts import running_text
from plot_tables import lens_table, prediction_table

from matlens import (
    Activations,
    InputError,
    Lens,
    Projection,
    Trace,
    ValueVectors,
    collect,
    compare_lenses,
    evaluate,
    exit_sweep,
    make_examples,
)
from matlens.activations import sink_counts
from matlens.data import make_windows
from matlens.drawing import Look
from matlens.ffn import ExitRule, TextLosses, event_scores, relative_scores, text_losses
from matlens.io.tables import COLUMNS
from matlens.lens import ExitConfidence, exit_layers, savings, summarize
from matlens.lens.evaluation import Evaluation, evaluate_lenses
from matlens.lens.hub import lens_card
from matlens.linearity import rank_correlations
from matlens.models.readout import Readout
from matlens.plots import plot_atlas, plot_layers, plot_r2, plot_report, plot_trajectory
from matlens.pruning import plain_copy, read_text


@pytest.fixture(scope="module")
def model(small_model):
    return small_model("gpt2")


@pytest.fixture
def halves(model, sentences):
    """Two lists of as many examples of as many tokens, all different."""
    examples = make_examples(model, sentences)
    first, second = np.arange(0, 16), np.arange(16, 32)
    return examples.select(first), examples.select(second)


def test_losses_of_other_texts_have_no_ratio(model, halves):
    ours, theirs = (text_losses(model, examples, progress=False) for examples in halves)
    assert np.array_equal(ours.n_tokens, theirs.n_tokens)  # nothing but the tokens differs
    assert ours.ratio(ours).value == 1
    one = TextLosses(ours.total[:1], ours.n_tokens[:1])
    order = np.arange(len(ours.total))[::-1]
    shuffled = TextLosses(ours.total[order], ours.n_tokens[order], ours.texts[order])
    for other in (theirs, one, shuffled, TextLosses(ours.total, ours.n_tokens + 1)):
        for pair in ((ours, other), (other, ours)):
            with pytest.raises(InputError, match="same"):
                pair[0].ratio(pair[1])


def test_losses_at_other_positions_of_the_same_texts_are_compared(model, halves):
    again = replace(halves[0], positions=np.zeros_like(halves[0].positions))
    ours, theirs = (text_losses(model, examples, progress=False) for examples in (halves[0], again))
    assert ours.ratio(theirs).value == 1


def test_other_windows_of_pruned_models_have_no_ratio(small_model):
    llama = small_model("llama")
    plain, text = plain_copy(llama), make_windows(llama, running_text(600), size=24)
    half = len(text) // 2
    ours, theirs = (
        read_text(plain, text.select(np.arange(start, start + half)), progress=False) for start in (0, half)
    )
    assert ours.compare(ours)["ratio"].value == 1
    with pytest.raises(InputError, match="same"):
        ours.compare(theirs)


def test_evaluations_at_other_tokens_have_no_differences(model, halves):
    readout = Readout(model)
    ours, theirs = (
        evaluate(readout, vectors, {"id": vectors}, confidence=True, progress=False)["id"]
        for vectors in (collect(model, examples, [2], progress=False)[2] for examples in halves)
    )
    one = Evaluation(*(part if part is None else part[:1] for part in ours[:4]))
    assert ours.differences(ours)["precision", 1].value == 0
    for other in (theirs, one):
        for pair in ((ours, other), (other, ours)):
            with pytest.raises(InputError, match="same"):
                pair[0].differences(pair[1])
            with pytest.raises(InputError, match="same"):
                ExitConfidence.from_evaluations(pair)


def test_scores_relative_to_another_trace_are_refused(model, halves):
    ours, theirs = (Trace.run(model, examples, k=3, progress=False) for examples in halves)
    other_random = Trace.run(model, halves[0], k=3, seed=1, progress=False)
    scores = relative_scores(ours, model, "mean")
    event_scores(ours, scores=scores)
    event_scores(Trace.run(model, halves[0], k=3, progress=False), scores=scores)
    event_scores(theirs, scores=dict(scores))  # of the user's own, nothing is known
    for other in (theirs, other_random):
        with pytest.raises(InputError, match="of this trace"):
            event_scores(other, scores=scores)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_search_refuses_top_tokens_of_another_projection(name, small_model):
    model, values = small_model(name), ValueVectors(small_model(name))
    plain, head = Projection.from_model(model), Projection.through_head(model)
    tops = {projection: projection.top_of_all(values, 5, progress=False) for projection in (plain, head)}
    word = model.tokenizer.convert_ids_to_tokens(int(tops[plain].ids[0, 0]))
    for projection, other in ((plain, head), (head, plain)):
        assert len(projection.search(values, tops[projection], [word])) >= (projection is plain)
        with pytest.raises(InputError, match="of this projection"):
            projection.search(values, tops[other], [word])


def test_vectors_and_traces_belong_to_their_examples(model, halves):
    rows = collect(model, halves[0], [1, 2], progress=False)
    vectors = dict(rows)
    for positions in ("sampled", "all"):
        other = replace(rows.provenance, examples=None)
        if positions == "sampled":
            Activations(vectors, halves[1], positions, other)  # unknown, and as many
            with pytest.raises(InputError, match="examples must be"):
                Activations(vectors, halves[1], positions, rows.provenance)
        else:
            with pytest.raises(InputError, match="per position"):
                Activations(vectors, halves[1], positions, other)
    trace = Trace.run(model, halves[0], k=3, progress=False)
    stored = {"before": trace.before}
    with pytest.raises(InputError, match="examples must be"):
        Trace(stored, halves[1], trace.provenance)
    with pytest.raises(InputError, match="per position"):
        Trace(stored, halves[1].head(3), replace(trace.provenance, examples=None))


@pytest.mark.refused
def test_arrays_in_pairs_are_equally_long():
    flags = torch.zeros(4, dtype=torch.bool)
    with pytest.raises(InputError, match="places"):
        sink_counts(flags, np.zeros(1, int))
    with pytest.raises(InputError, match="threshold"):
        exit_layers(torch.zeros(4, 3), torch.zeros(1).double())
    with pytest.raises(InputError, match="made_at"):
        ExitRule().fit(np.zeros((4, 2, 3), int), np.zeros(3, int), np.array([0, 1]))


def shifted(table: pd.DataFrame, **columns: str) -> pd.DataFrame:
    return table.assign(value=table["value"] / 2, **columns)


def quality_table() -> pd.DataFrame:
    rows = []
    for method in ("mat", "id"):
        rows += [
            ("x", "some/model", "some-corpus", method, layer, target, "r2", None, 0.5, 0.5, 0.5, 9)
            for target in range(1, 4)
            for layer in range(target)
        ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


@pytest.mark.parametrize("column", ["model", "corpus", "experiment"])
@pytest.mark.parametrize(
    ("draw", "table"),
    [
        (plot_layers, prediction_table(4)),
        (lambda table: plot_layers(table, title="one"), prediction_table(4)),
        (plot_report, lens_table(4, ("mat", "id"))),
        (plot_r2, quality_table()),
    ],
    ids=["layers", "layers with a title", "report", "r2"],
)
def test_figures_refuse_several_models_or_corpora(draw, table, column):
    draw(table)
    with pytest.raises(InputError, match="table must"):
        draw(pd.concat([table, shifted(table, **{column: "another"})]))


def test_figures_of_lenses_refuse_differences_among_the_values():
    table = lens_table(4, ("mat", "id"))
    with pytest.raises(InputError, match="against"):
        plot_layers(pd.concat([table, shifted(table, against="id")]))


def test_a_trajectory_of_two_prompts_is_refused():
    rows = [
        {"layer": layer, "position": 0, "token": "a", "predicted": "b", "probability": 0.5}
        for layer in (0, 1)
    ]
    table = pd.DataFrame(rows)
    plot_trajectory(table)
    with pytest.raises(InputError, match="one value"):
        plot_trajectory(pd.concat([table, table.assign(token="c")]))


def test_summaries_refuse_tables_of_several_models():
    table = lens_table(4, ("mat", "id"))
    exits = prediction_table(4)
    exits = exits[exits["k"] == 1].assign(lam=1.0, value=1.0)
    savings(exits), summarize(table, exits)
    for column in ("model", "corpus"):
        other = {column: "another"}
        with pytest.raises(InputError, match=f"one {column}"):
            savings(pd.concat([exits, shifted(exits, **other)]))
        with pytest.raises(InputError, match=f"one {column}"):
            summarize(table, exits.assign(**other))
        atlas = pd.DataFrame({"kind": ["ffn"] * 2, "model": ["a", "a"], "corpus": ["b", "b"]})
        atlas[column] = ["a", "b"]
        with pytest.raises(InputError, match=f"one {column}"):
            rank_correlations(atlas)
        with pytest.raises(InputError, match=f"one {column}"):
            plot_atlas(atlas.head(1), atlas.tail(1))


def test_a_lens_has_the_readout_of_its_model(model, small_model, lenses):
    replace(lenses["id"], readout=Readout(model))
    with pytest.raises(InputError):
        replace(lenses["id"], readout=Readout(small_model("llama")))


# Names that nothing has


@pytest.fixture(scope="module")
def lenses(model):
    return {"id": Lens.identity(model), "b": Lens.identity(model)}


def test_thresholds_of_no_lens_are_refused(model, halves, lenses):
    data = collect(model, halves[0], progress=False)
    table = exit_sweep(lenses, data, lams={"b": [0.5]}, progress=False)
    assert set(table[table["method"] == "b"]["lam"].dropna()) == {0.5}
    for lams in ({"bb": [0.5]}, {"b": [0.5], "mat": [0.5]}):
        with pytest.raises(InputError, match="lams"):
            exit_sweep(lenses, data, lams=lams, progress=False)


def test_seconds_are_of_the_lenses(model, halves, lenses):
    data = collect(model, halves[0], progress=False)
    evaluate_lenses(lenses, data, seconds={"id": 0.0, "b": 1.0}, progress=False)
    for seconds in ({"id": 0.0}, {"id": 0.0, "b": 1.0, "c": 2.0}):
        with pytest.raises(InputError, match="seconds"):
            evaluate_lenses(lenses, data, seconds=seconds, progress=False)


def test_a_lens_has_scales_of_its_layers_alone(lenses):
    replace(lenses["id"], scales={1: 0.5})
    with pytest.raises(InputError, match="scales"):
        replace(lenses["id"], scales={9: 0.5})


def test_lenses_of_ones_own_have_names_of_their_own(model, sentences, lenses, tmp_path):
    parts = sentences.split(n_train=30, n_validation=10)
    with pytest.raises(InputError, match="fitted"):
        compare_lenses(model, parts, tmp_path, methods=["id"], fitted={"id": (lenses["id"], 0.0)})


def test_looks_of_no_method_are_refused():
    table = prediction_table(4)
    plot_layers(table, looks={"mat": Look("black")})
    with pytest.raises(InputError, match="looks"):
        plot_layers(table, looks={"mat": Look("black"), "mta": Look("black")})


def test_cards_have_the_quality_of_their_own_model(model, halves, lenses):
    table = evaluate_lenses({"id": lenses["id"]}, collect(model, halves[0], progress=False), progress=False)
    lens_card(lenses["id"], table)
    for wrong in (table.assign(model="another"), pd.concat([table, table.assign(corpus="another")])):
        with pytest.raises(InputError, match="table"):
            lens_card(lenses["id"], wrong)
