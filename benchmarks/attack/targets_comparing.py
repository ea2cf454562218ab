"""Targets of what analyses compute: comparisons of fits, schemes, stand-ins, events and extremes."""

from __future__ import annotations

from functools import cache
from typing import Any

import annotation
import control
import exits
import paper_a
import sub_updates
import torch

from attack.kept import MAPS, READOUT, STREAM_MAPS, annotations_of, draw, once
from attack.signatures import Target
from attack.world import ConstantGrader, World
from matlens import lens, linearity

ACTIVATIONS = "activations, other activations"


@cache
def _schemes(world: World) -> Any:
    return paper_a.scheme_quality(world.readout, world.model, world.maps, world.activations)


@cache
def _submodules(world: World) -> Any:
    stand_ins = dict.fromkeys(("all", "not-first", "not-sink"), world.maps)
    return paper_a.submodule_layers(world.readout, world.model, world.maps, stand_ins, world.activations)


@cache
def _transfer(world: World) -> Any:
    return linearity.transfer_quality(
        world.readout, {"a": world.maps, "b": world.maps}, {"a": world.activations}
    )


@cache
def _comparison(world: World) -> Any:
    changes = [control.ModelChange("unchanged"), control.ModelChange("control", 3.0, ("L0D1",))]
    return control.compare_control(
        world.model, changes, {"prompts": list(world.sentences[:2])}, world.examples.head(4),
        ConstantGrader(), n_samples=1,
    )  # fmt: skip


@cache
def _events(world: World) -> Any:
    return sub_updates.event_tables(world.trace, world.model)


def _positions(world: World) -> Any:
    stand_ins = dict.fromkeys(("all", "not-first", "not-sink"), world.maps)
    return once(
        world,
        "positions",
        lambda: paper_a.submodule_positions(
            world.readout, world.model, world.maps, stand_ins, world.activations.head(6), every=3
        ),
    )


def _exits(world: World) -> Any:
    judged = {"rule": [exits.JudgedExits(0.5, 1.0, 0.5, 0.5, 0.0)]}
    return exits.summarize_exits(judged, 3).assign(model="m", corpus="c", n=60)


def _confidence(world: World) -> Any:
    return lens.prediction_confidence(world.model, world.examples, progress=False)


def _sinks(world: World) -> Any:
    return torch.arange(60) % 9 == 0


def _given(name: str, value: Any) -> Any:
    return {name: lambda w: value(w) if callable(value) else value}


COMPARING: list[Target] = [
    # Lens.
    Target("lens.savings", {"precision": "positive"}, {"table": lambda w: w.sweep}),
    Target("linearity.fit_equally_many", {"samples": "object"}, {"samples": lambda w: {"a": w.activations}}),
    Target("linearity.transfer_losses", good={"table": _transfer}),
    Target("linearity.transfer_means", good={"table": _transfer}),
    Target(
        "linearity.transfer_quality",
        {**READOUT, "maps": "object", "validations": "object"},
        {"maps": lambda w: {"a": w.stream_maps}, "validations": lambda w: {"a": w.activations}},
    ),
    Target("lens.masked_accuracy", good={"model": lambda w: w.load("bert")}),
    # FFNs.
    # Models, corpora and activations.
    Target(
        "wrap",
        {"bridge": "model", "tokenizer": "tokenizer", "prepend_bos": "truth"},
        {"bridge": lambda w: w.load("gpt2")},
    ),
    Target(
        "activations.sink_counts",
        {"sinks": "marks", "places": "object"},
        {"sinks": _sinks, "places": lambda w: w.activations.places},
    ),
    Target(
        "data.make_windows",
        {"source": "object", "size": "whole", "most": "whole", "name": ""},
        {"source": lambda w: w.corpus, "size": lambda _: 16},
    ),
    Target(
        "models.locate",
        {"name": "text", "revision": "choice"},
        {"name": lambda w: str(w.model_folder("gpt2")), "revision": lambda _: None},
        takes={"revision=None": lambda w, place: place[0] == str(w.model_folder("gpt2").resolve())},
    ),
    Target(
        "models.encode_text",
        {"longest": "whole"},
        {"text": lambda _: "w1 w2"},
        takes={
            "text=''": lambda _, tokens: tokens.ids == [],
            "longest=0": lambda _, tokens: tokens.ids == [],
        },
    ),
    Target("models.check_finite_weights"),
    Target("models.rounded_fingerprints"),
    Target("study.compatibility"),
    Target(
        "study.origin_of",
        {**MAPS, "validation": "activations"},
        STREAM_MAPS,
        takes={"maps": lambda _, origin: {*origin} == {"maps", "note", "validation"}},
    ),
    # Plots.
    *[
        Target(
            f"plots.{name}",
            {"results": "table", "table": "table"},
            {"results": part, "table": part},  # type: ignore[dict-item]
            finish=draw,
            takes={"label=''": lambda _, nothing: nothing is None},
        )
        for name, part in {
            "events_figure": lambda w: _events(w).events,
            "layers_figure": lambda w: _events(w).scores.query("read == 'score'"),
            "across_corpora": _transfer,
            "alternation": _schemes,
            "by_method": _submodules,
            "toxicity_against_perplexity": lambda w: _comparison(w).table,
            "by_fitting": lambda w: paper_a.rows_of_replacement(_positions(w), "mat_ffn"),
            "costs_figure": lambda w: once(
                w, "costs", lambda: paper_a.exit_costs(w.readout, w.model, w.stream_maps, w.activations)
            ),
            "exits_figure": _exits,
            "removal_figure": lambda w: once(
                w, "removal", lambda: sub_updates.removal_table(w.model, w.examples.head(4), n_tokens=5)
            ),
            "shares_by_layer": lambda w: once(
                w, "dominance", lambda: sub_updates.dominance(w.model, w.examples, progress=False)
            ),
            "concept_shares": lambda w: annotation.tally_concepts(w.sample, annotations_of(w)),
        }.items()
    ],
    Target(
        "plots.transfer_heatmaps",
        {"means": "table"},
        {"means": lambda w: linearity.transfer_means(_transfer(w).query("target == target.max()"))},
        finish=draw,
    ),
    Target(
        "plots.pattern_sizes",
        {"size": "whole"},
        {
            "size": lambda _: 2,
            "results": lambda w: annotation.pattern_shares(w.patterns, model_name="m", corpus="c", k=5),
        },
        finish=draw,
    ),
    Target(
        "plots.extremes_figure",
        {"clusters": "table"},
        {
            "clusters": lambda w: (
                sub_updates.extreme_tables(w.trace, w.model, w.clusters, w.frequency, _confidence(w)).activity
            )
        },
        finish=draw,
        takes={"title=''": lambda _, nothing: nothing is None},
    ),
]
