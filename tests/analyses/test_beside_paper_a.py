"""Analyses beside the papers': their tables are what the library gives for fits and sinks told here.

The library's own tests compare it with loops; here it is whether a script hands on the right fit, the right
part of the corpus and the right samples.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from analysing import N_PATCHED, SINKS, assert_table, read
from attention_heads import head_ablation
from conftest import N_LAYERS
from independent import assert_judged
from memory_and_layers import exit_costs
from sample_sizes import fit_quality_by_size
from sinks import fit_quality_without_sinks, later_sinks, sink_norms
from studies import head_pairs

from matlens import MapSet, collect
from matlens.models import ModelLayout


def origin(out: Path, name: str) -> Any:
    return json.loads((out / f"{name}.json").read_text())


def test_heads_are_fitted_and_replaced_without_sinks(finished, collected):
    model = collected.model
    pairs = head_pairs(ModelLayout.from_model(model))
    ends = sorted({site for pair in pairs for site in pair})
    train, validation = (
        collect(model, examples, [*ends, *last], progress=False)
        for examples, last in zip(collected.examples, ([], [f"h.{N_LAYERS}"]), strict=True)
    )
    maps = MapSet.fit(train, pairs=pairs, rows=~collected.train_sinks, progress=False)
    expected = head_ablation(
        collected.readout, model, maps, train, validation, rows=~collected.train_sinks,
        validation_rows=~collected.validation_sinks, every=1, patched=N_PATCHED,
    )  # fmt: skip
    out = finished("attention_heads", SINKS)
    assert_table(out / "attention_heads.csv", expected)
    assert origin(out, "attention_heads")["sinks"] == collected.counts(0)


def test_costs_are_those_of_exits_on_validation_sentences(finished, collected):
    expected = exit_costs(collected.readout, collected.model, collected.maps(), collected.validation)
    assert_table(finished("memory_and_layers", SINKS) / "memory_and_layers.csv", expected)


def test_fewer_and_fewer_training_sentences_are_fitted_on(finished, collected):
    expected = fit_quality_by_size(collected.train, collected.validation)
    assert sorted(set(expected["n_fitted"])) == [11, 22, 45, 90]
    assert_table(finished("sample_sizes", SINKS) / "sample_sizes.csv", expected)


def test_sinks_are_measured_among_training_samples_and_left_out_of_r2_of_others(finished, collected):
    out = finished("sinks", SINKS)
    assert_table(out / "sinks.csv", sink_norms(collected.train, collected.train_sinks))
    later = later_sinks(collected.train, collected.train_sinks, collected.model.tokenizer)
    assert len(later) == collected.counts(0)["n_later_sinks"] > 0
    assert_table(out / "sinks_later.csv", later)
    table = fit_quality_without_sinks(collected.maps(), collected.validation, collected.validation_sinks)
    assert_table(out / "sinks_r2.csv", table)
    for part, name in ((0, "sinks"), (0, "sinks_later"), (1, "sinks_r2")):
        assert origin(out, name)["sinks"] == collected.counts(part)


def test_ffns_alone_are_those_replaced_by_hand_in_one_block(finished, by_hand):
    table, study = read(finished, "submodule_alone"), by_hand()
    names = {"mat_ffn": "all", "mat_ffn without sinks": "not-sink"}
    vectors = {
        (method, layer): study.submodules("mat_ffn", tokens, tokens, layer, N_PATCHED, layer + 1)
        for method, tokens in names.items()
        for layer in range(N_LAYERS)
    }
    assert_judged(table, study.judge(vectors, N_PATCHED), nats=2e-3)
    assert set(zip(table["method"], table["layer"], strict=True)) == set(vectors)
