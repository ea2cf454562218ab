"""Every public name of the Python API that takes something from a user, and good arguments for it."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attack.signatures import Target
from attack.world import ConstantGrader, World

import matlens
from matlens import (
    activations,
    annotation,
    control,
    corpora,
    ffn,
    lens,
    linear,
    models,
    patching,
    plots,
    storage,
)


def _run(world: World, context: Any) -> Any:
    with context as model:
        return model(world.examples.head(1).batches(512).__next__().tokens, return_type="logits")


def _patch(world: World, replacements: Any) -> Any:
    with matlens.patched(world.model, replacements) as model:
        return model(torch.tensor([[5, 6, 7]]), return_type="logits")


def _draw(world: World, figure: Any) -> Any:
    figure.draw_without_rendering()
    import matplotlib.pyplot as plt

    plt.close(figure)
    return None


def _read(kind: str) -> Any:
    return {
        "maps": lambda w: _saved(w, "maps", lambda folder: w.stream_maps.save(folder)),
        "activations": lambda w: _saved(
            w, "activations",
            lambda folder: matlens.collect(w.model, w.examples, folder=folder, progress=False),
        ),
        "trace": lambda w: _saved(
            w, "trace", lambda folder: ffn.Trace.run(w.model, w.examples, k=4, folder=folder, progress=False)
        ),
        "clusters": lambda w: _saved(
            w, "clusters", lambda folder: ffn.Clusters.fit(w.values, 20, folder=folder, progress=False)
        ),
        "predictions": lambda w: _written(w, "predictions", w.table_of_predictions),
        "sample": lambda w: _written(w, "sample", w.sample),
        "plausibility": lambda w: _written(
            w, "plausibility", annotation.make_plausibility_sheet(w.table_of_predictions).assign(plausible="1")
        ),
        "prompts": lambda w: _lines(w),
    }[kind]  # fmt: skip


def _saved(world: World, name: str, save: Any) -> Path:
    folder = world.root / "saved" / name
    if not folder.is_dir():
        save(folder)
    return folder


def _written(world: World, name: str, table: Any) -> Path:
    path = world.root / f"{name}.csv"
    if not path.exists():
        table.to_csv(path, index=False, lineterminator="\n")
    return path


def _lines(world: World) -> Path:
    path = world.root / "prompts.jsonl"
    path.write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w4 w5"}\n')
    return path


def _figure(world: World) -> Any:
    return plots.r2_heatmaps(_part(world, "fit_quality"))


def _part(world: World, experiment: str) -> Any:
    return world.quality[world.quality["experiment"] == experiment]


def _moments(world: World) -> linear.Moments:
    return linear.Moments(32, 32).update(world.activations[0], world.activations[3])


def _scheme(world: World) -> patching.Scheme:
    return patching.Scheme((0, 1, 3), "blocks")


def _identity(world: World) -> models.ModelIdentity:
    return models.ModelIdentity.from_model(world.model)


def _active(world: World) -> Any:
    return ffn.active_clusters(world.trace, world.clusters)


_MAPS = {"maps": "maps, other maps"}
_STREAM = {"maps": lambda w: w.stream_maps}
_RANGE = {"first": "layer", "last": "layer", "where": "where", "maps": "maps"}
_VALUES = {"values": "values, other values"}
_READ = {"readout": "readout, other readout"}

TARGETS: list[Target] = [
    # The six lines.
    Target("collect", {"positions": "choice", "dtype": ""}),
    Target("load_corpus", {"split": ""}),
    Target("make_examples"),
    Target("make_prompts"),
    Target("load", {"name": "text", "device": "choice", "dtype": "choice", "revision": "object"},
           {"name": lambda w: str(w.model_folder("gpt2"))}),
    Target("Readout"),
    Target("Readout.logits", owner=lambda w: w.readout),
    Target("Readout.log_probs", owner=lambda w: w.readout),
    Target("Readout.top_tokens", {"h": "vector"}, {"h": lambda w: w.activations[3][0]}, lambda w: w.readout),
    Target("Site.parse", {"text": "site", "n_layers": ""}, {"n_layers": lambda _: 3}),
    Target("Site.read", {"text": "site"}),
    Target("Site", {"kind": "text", "layer": "layer"}, {"kind": lambda _: "h"}),
    # Maps.
    Target("LinearMap", {"weight": "object", "bias": "object", "source": "site", "target": "site"},
           {"weight": lambda _: torch.eye(3), "bias": lambda _: None, "source": lambda _: "h.0",
            "target": lambda _: "h.1"}),
    Target("LinearMap.__call__", owner=lambda w: w.stream_maps[0, 3]),
    Target("LinearMap.to", {"device": "choice"}, {"device": lambda _: "cpu"}, lambda w: w.stream_maps[0, 3]),
    Target("LinearMap.then", {"following": "map"}, {"following": lambda w: w.stream_maps[1, 3]},
           lambda w: w.stream_maps[0, 1]),
    Target("MapSet", {"maps": "object"}, {"maps": lambda w: [w.stream_maps[0, 3]]}),
    Target("MapSet.__getitem__", {"pair": "pair"}, {"pair": lambda _: (0, 3)}, lambda w: w.stream_maps),
    Target("MapSet.fit"),
    Target("MapSet.held", {"pairs": "pairs", "device": "choice"}, {"pairs": lambda _: [(0, 3)]},
           lambda w: w.stream_maps),
    Target("MapSet.save", owner=lambda w: w.stream_maps),
    Target("MapSet.load", {"folder": "path read"}, {"folder": _read("maps")}),
    Target("linear.fit_rows"),
    Target("linear.fit_samples"),
    Target("linear.fit_stream", {"batches": "object"}, {"batches": lambda w: [dict(w.activations)]}),
    Target("linear.Moments", {"d_in": "count", "d_out": "count", "source": "text", "target": "text"},
           {"d_in": lambda _: 4, "d_out": lambda _: 4}),
    Target("linear.Moments.update", {"x": "vectors", "y": "vectors"},
           {"x": lambda w: w.activations[3], "y": lambda w: w.activations[3]}, lambda w: linear.Moments(32, 32)),
    Target("linear.Moments.merge", {"other": "object"}, {"other": _moments}, _moments),
    Target("linear.Moments.solve", owner=_moments),
    Target("linear.Moments.solution", {"intercept": "truth", "ridge": "positive"},
           {"intercept": lambda _: False, "ridge": lambda _: 0.0}, _moments),
    Target("linear.resolve_pairs", {"n_layers": "whole"}),
    # Activations.
    Target("activations.Activations.__getitem__", owner=lambda w: w.activations),
    Target("activations.Activations.resolve", owner=lambda w: w.activations),
    Target("activations.Activations.head", {"n": "whole"}, owner=lambda w: w.activations),
    Target("activations.Activations.load", {"folder": "path read"}, {"folder": _read("activations")}),
    Target("activations.default_batch_tokens"),
    Target("activations.stream", {"positions": "choice"}, {"positions": lambda _: "drawn"}),
    Target("activations.find_sinks"),
    Target("activations.outlying_rows", {"norms": "vectors"}, {"norms": lambda w: w.trace.norm}),
    Target("activations.sink_rows"),
    # Corpora.
    Target("corpora.Corpus.split", owner=lambda w: w.corpus),
    Target("corpora.Examples.head", {"n": "whole"}, owner=lambda w: w.examples),
    Target("corpora.Examples.batches", {"max_tokens": "whole"}, {"max_tokens": lambda _: 100},
           lambda w: w.examples),
    Target("corpora.is_masked"),
    Target("corpora.TokenFrequency", {"tokens": "object"}, {"tokens": lambda w: w.examples.tokens}),
    Target("corpora.TokenFrequency.from_corpus"),
    Target("corpora.TokenFrequency.shares", {"ids": "ids"}, {"ids": lambda _: np.array([[5, 6], [7, 8]])},
           lambda w: w.frequency),
    Target("corpora.read_prompts", {"path": "path read", "challenging": "truth"}, {"path": _read("prompts")}),
    Target("corpora.WordSimilarity.fit", {}, {"dimensions": lambda _: 5, "min_count": lambda _: 2}),
    Target("corpora.WordSimilarity.row", {"text": "text"}, {"text": lambda _: "w12"}, lambda w: w.similarity),
    Target("corpora.WordSimilarity.compare", {"rows": "numbers"}, {"rows": lambda _: np.array([0, 1])},
           lambda w: w.similarity),
    # FFNs.
    Target("ffn.Updates", {"activations": "activations"},
           {"activations": lambda w: w.updates.activations, "values": lambda w: w.values}),
    Target("ffn.Updates.run", {"layers": "layers"}, {"examples": lambda w: w.prompts}),
    *[Target(f"ffn.Updates.{name}", owner=lambda w: w.updates)
      for name in ("coefficients", "outputs", "sub_updates", "contributions", "shares", "dominant")],
    Target("ffn.dominance"),
    Target("ffn.dominant_table", {"projection": "projection, other projection"}),
    Target("ffn.Trace.run"),
    Target("ffn.Trace.load", {"folder": "path read"}, {"folder": _read("trace")}),
    Target("ffn.ValueVector", {"layer": "whole", "index": "whole"}, {"index": lambda _: 2}),
    Target("ffn.ValueVector.parse", {"text": "name read"}, {"text": lambda _: "L0D1"}),
    Target("ffn.ValueVectors"),
    *[Target(f"ffn.ValueVectors.{name}", owner=lambda w: w.values)
      for name in ("resolve", "resolve_layer", "at", "layer", "bias", "vectors", "norms")],
    Target("ffn.ValueVectors.random", owner=lambda w: w.values),
    Target("ffn.Clusters.fit", {}, {"n_clusters": lambda _: 20}),
    Target("ffn.Clusters.load", {"folder": "path read"}, {"folder": _read("clusters")}),
    Target("ffn.Clusters.members", {"cluster": "row"}, {"cluster": lambda _: 1}, lambda w: w.clusters),
    Target("ffn.Clusters.holding", _VALUES, owner=lambda w: w.clusters),
    Target("ffn.Clusters.directions", _VALUES, owner=lambda w: w.clusters),
    Target("ffn.Clusters.cosines", {"directions": "vectors"},
           {"directions": lambda w: w.clusters.directions(w.values, [0, 1])}, lambda w: w.clusters),
    Target("ffn.cluster_table", {**_VALUES, "projection": "projection, other projection"}),
    Target("ffn.Projection.from_model"),
    Target("ffn.Projection.after_norm"),
    Target("ffn.Projection.scores", {"vectors": "any vectors"}, owner=lambda w: w.projection),
    Target("ffn.Projection.top", owner=lambda w: w.projection),
    Target("ffn.Projection.bottom", owner=lambda w: w.projection),
    Target("ffn.norm_overlap", {}, {"n_random": lambda _: 5, "k": lambda _: 5}),
    Target("ffn.top_tokens_of_all", {**_VALUES, "projection": "projection, other projection"}),
    Target("ffn.values_promoting", {**_VALUES, "projection": "projection, other projection"}),
    Target("ffn.values_with_tokens", {**_VALUES, "projection": "projection, other projection"}),
    Target("ffn.token_table", {**_VALUES, "projection": "projection, other projection"}),
    Target("ffn.find_events"),
    Target("ffn.find_saturation"),
    Target("ffn.updates_by_effect"),
    Target("ffn.saturation_frequency"),
    Target("ffn.event_scores"),
    Target("ffn.update_scores"),
    Target("ffn.lift_scores"),
    Target("ffn.odds_scores"),
    Target("ffn.Events.among", {}, {"rows": lambda w: torch.ones(len(w.examples), dtype=torch.bool)}, owner=lambda w: ffn.find_events(w.trace)["elimination"]),
    Target("ffn.extreme_sub_updates", _VALUES),
    Target("ffn.default_threshold", {"scores": "object"}, {"scores": lambda w: w.trace.score}),
    Target("ffn.draw_sub_updates", {**_VALUES, "n": "count"}),
    Target("ffn.cluster_activity", {**_VALUES, "sub_updates": "object"}, {"sub_updates": lambda w: w.extremes}),
    Target("ffn.group_table", {"extreme": "object", "drawn": "object", "kind_of": "table", "confidence": "object"},
           {"drawn": lambda w: ffn.draw_sub_updates(w.trace, w.values, 20), "kind_of": lambda w: w.activity,
            "confidence": lambda w: ffn.prediction_confidence(w.model, w.examples, progress=False)}),
    Target("ffn.place_table", {"extreme": "object", "kind_of": "table"}, {"kind_of": lambda w: w.activity}),
    Target("ffn.prediction_confidence"),
    Target("ffn.active_clusters"),
    Target("ffn.OverlapRule", {"others": "choice"}),
    Target("ffn.OverlapRule.fit", {"active": "object", "made_at": "object", "rows": "numbers"},
           {"active": _active, "made_at": lambda w: ffn.find_saturation(w.trace).layer.numpy(),
            "rows": lambda _: np.arange(30)}, lambda _: ffn.OverlapRule()),
    Target("ffn.summarize_exits", {"judged": "object", "n_layers": "whole"},
           {"judged": lambda _: {"rule": [ffn.JudgedExits(0.5, 1.0, 0.5, 0.5)]}}),
    Target("ffn.ExitClassifiers", {"strengths": "object", "kinds": "object"}),
    Target("ffn.classifier_sites"),
    Target("ffn.compare_exits", {"activations": "activations, other activations"},
           {"activations": lambda w: w.collected(sites=ffn.classifier_sites(w.model)), "seeds": lambda _: 1,
            "folds": lambda _: 2, "fewest": lambda _: 2, "strengths": lambda _: [0.01], "kinds": lambda _: [0]}),
    # Lens.
    Target("lens.as_substitute"),
    Target("lens.exit_confidences", {**_READ, "substitutes": "object", "name": ""},
           {"substitutes": lambda w: w.substitutes, "name": lambda _: "id"}),
    Target("lens.exit_layers", {"confidence": "any vectors", "threshold": "vector"},
           {"confidence": lambda w: w.confidence.difference, "threshold": lambda w: torch.full((60,), 0.5)}),
    Target("lens.exit_sweep", {**_MAPS, **_READ}, _STREAM),
    Target("lens.layers_saved", {"precision": "positive"}, {"table": lambda w: w.sweep, "precision": lambda _: 0.5}),
    Target("lens.least_lam", {"positions": "object", "mean_length": "positive", "wanted": "number"},
           {"positions": lambda w: torch.from_numpy(w.examples.positions), "mean_length": lambda _: 7.0,
            "wanted": lambda _: 0.5}),
    Target("lens.thresholds", {"positions": "object", "lam": "number", "mean_length": "positive"},
           {"positions": lambda w: torch.from_numpy(w.examples.positions), "lam": lambda _: 0.5}),
    Target("lens.predictions_table", {"prompt": "text"},
           {"table": lambda w: w.table_of_predictions, "prompt": lambda w: w.table_of_predictions["prompt"][0]}),
    Target("lens.side_by_side", {"prompt": "text"},
           {"table": lambda w: w.table_of_predictions, "prompt": lambda w: w.table_of_predictions["prompt"][0]}),
    Target("lens.prompt_texts", {**_READ, "prompts": "activations"}, {"prompts": lambda w: w.prompt_activations}),
    Target("lens.read_predictions", {"path": "path read"}, {"path": _read("predictions")}),
    Target("lens.top_predictions", {**_MAPS, **_READ, "prompts": "activations, other activations"},
           {**_STREAM, "prompts": lambda w: w.prompt_activations}),
    Target("lens.fit_quality", {**_MAPS, "validation": "activations, other activations"}, _STREAM),
    Target("lens.prediction_quality",
           {**_MAPS, **_READ, "validation": "activations, other activations", "methods": "names"},
           {**_STREAM, "methods": lambda _: ["mat"]}),
    Target("lens.judge_predictions", {**_READ, "substitutes": "object"},
           {"substitutes": lambda w: {"id": w.substitutes[0]}}),
    Target("lens.layer_table"),
    Target("lens.r2_matrix"),
    # Patching.
    Target("patched", {"replacements": "object"}, {"replacements": lambda w: matlens.jump(w.stream_maps, 1, 3)},
           finish=_run),
    Target("jump", {**_MAPS}, _STREAM, finish=_patch),
    *[Target(name, {**_RANGE}, finish=_patch) for name in ("mat_attn", "mat_ffn", "mat_ln1_ln2")],
    Target("patching.stand_ins", {**_RANGE, "names": "names"}, {"names": lambda _: ["attn"]}, finish=_patch),
    Target("patching.Replacement.from_map", {"linear": "map"}, {"linear": lambda w: w.stream_maps[0, 3]}),
    Target("patching.Scheme", {"boundaries": "layers", "starts_with": "choice"},
           {"boundaries": lambda _: (0, 1, 3), "starts_with": lambda _: "blocks"}),
    Target("patching.Scheme.replacements", _MAPS, _STREAM, _scheme, finish=_patch),
    Target("patching.r2_schemes", {"r2": "vectors"}, {"r2": lambda w: lens.r2_matrix(w.quality, "mat")}),
    Target("patching.r2_score", {"scheme": "object", "r2": "object"},
           {"scheme": _scheme, "r2": lambda w: lens.r2_matrix(w.quality, "mat")}),
    Target("patching.wrr_schemes", {"n_layers": "whole"}),
    Target("patching.attend_nowhere", {"first": "layer", "last": "layer", "h": "vectors"},
           {"maps": lambda w: w.maps, "h": lambda w: w.activations[1]}),
    Target("patching.fit_submodules", {},
           {"samples": lambda w: w.submodule_activations, "pairs": lambda _: [("ffn_in.0", "ffn_out.0")]}),
    Target("patching.submodule_pairs", {"anatomy": "object", "names": "names"},
           {"anatomy": lambda w: models.Anatomy.from_model(w.model), "names": lambda _: ["attn"]}),
    Target("patching.run_variants", {"variants": "object"},
           {"variants": lambda w: {"one": patching.Variant(1, matlens.jump(w.stream_maps, 1, 3))}}),
    # Models.
    Target("models.Anatomy.from_model"),
    *[Target(f"models.Anatomy.{name}", owner=lambda w: models.Anatomy.from_model(w.model))
      for name in ("resolve", "width", "hook")],
    Target("models.output_layer", {"layer": "layer"}),
    Target("models.ModelIdentity.from_model", {"hash_unembedding": ""}),
    Target("models.ModelIdentity.from_json", {"values": "object"}, {"values": lambda w: _identity(w).to_json()}),
    Target("models.Provenance.from_json", {"values": "object"},
           {"values": lambda w: w.activations.provenance.to_json()}),
    Target("models.Provenance.require_same", {"other": "object", "ours": "", "theirs": ""},
           {"other": lambda w: w.stream_maps.provenance, "ours": lambda _: "the maps"},
           lambda w: w.activations.provenance),
    Target("models.fingerprint"),
    Target("models.unembed_hash"),
    Target("models.require_raw"),
    Target("models.token_texts", {"tokens": "numbers"}, {"tokens": lambda _: [5, 6]}),
    Target("models.visible", {"token": "text"}),
    Target("models.word_token", {"word": "text"}),
    Target("models.word_tokens"),
    # Control.
    Target("control.controlled", {"value": "number"}, finish=_run),
    Target("control.continue_prompts", {}, {"n_tokens": lambda _: 2}),
    Target("control.sentence_losses"),
    Target("control.perplexity_estimate"),
    Target("control.perplexity_ratio"),
    Target("control.SelfDebiasing", {"attributes": "names", "decay": "positive", "floor": "positive"},
           {"attributes": lambda _: ["toxicity"]}),
    Target("control.SelfDebiasing.log_probs", {"plain": "any vectors", "announced": "any vectors"},
           {"plain": lambda _: torch.rand(60), "announced": lambda _: torch.rand(6, 60)},
           lambda _: control.SelfDebiasing()),
    Target("control.word_filter"),
    Target("control.make_grader", {"name": "choice"}, {"name": lambda _: "profanity-check"}),
    Target("control.draw_harmless", {"below": "number"}, {"below": lambda _: 0.9}),
    Target("control.most_harmless"),
    Target("control.grade_values", {**_VALUES, "grader": "object"}, {"grader": lambda _: ConstantGrader()}),
    Target("control.grade_continuations", {"continuations": "table", "grader": "object"},
           {"continuations": lambda w: w.continuations[["prompt", "sample", "text"]],
            "grader": lambda _: ConstantGrader()}),
    Target("control.toxicity_estimates", {"changed": "table", "unchanged": "table"},
           {"changed": lambda w: w.continuations, "unchanged": lambda w: w.continuations}),
    # Annotation.
    Target("annotation.draw_concept_sample", {}, {"per_layer": lambda _: 2, "k": lambda _: 3}),
    Target("annotation.sheet_code"),
    Target("annotation.write_concept_sheets"),
    Target("annotation.read_concept_sheets", {"folder": "path read"},
           {"folder": lambda w: _saved(w, "sheets", lambda f: annotation.write_concept_sheets(w.sample, f))}),
    Target("annotation.read_concept_sample", {"path": "path read"}, {"path": _read("sample")}),
    Target("annotation.tally_concepts", {"annotations": "object"}, {"annotations": lambda w: _annotations(w)}),
    Target("annotation.annotator_agreement", {"annotations": "object"},
           {"annotations": lambda w: 2 * _annotations(w)}),
    Target("annotation.distinct_concepts",
           {"patterns": "table", "n": "whole", "words": "whole", "per_layer": "whole", "shared": "positive"},
           {"patterns": lambda w: w.patterns["values"]}),
    Target("annotation.find_patterns", {"ids": "ids"}, {"ids": lambda w: w.tokens.ids}),
    Target("annotation.pattern_shares", {"tables": "object", "model_name": "", "corpus": ""},
           {"tables": lambda w: w.patterns, "model_name": lambda _: "m", "corpus": lambda _: "c", "k": lambda _: 5}),
    Target("annotation.search_concepts", {}, {"k": lambda _: 3}),
    Target("annotation.make_plausibility_sheet", {"predictions": "table"},
           {"predictions": lambda w: w.table_of_predictions}),
    Target("annotation.plausibility_rates", {"predictions": "table", "sheet": "table"},
           {"predictions": lambda w: w.table_of_predictions, "sheet": lambda w: annotation.read_plausibility_sheet(
               _read("plausibility")(w))}),
    Target("annotation.read_plausibility_sheet", {"path": "path read"}, {"path": _read("plausibility")}),
    Target("annotation.write_sheet", {"path": "path written"}, {"path": lambda w: w.fresh("sheet.csv")}),
    # Plots.
    *[Target(f"plots.{name}", finish=_draw, good={"results": part}) for name, part in {
        "prediction": lambda w: _part(w, "prediction_quality"),
        "r2_heatmaps": lambda w: _part(w, "fit_quality"),
        "relative_depth": lambda w: _part(w, "prediction_quality"),
        "early_exit": lambda w: w.sweep,
        "saturation_figure": lambda w: ffn.saturation_frequency(w.trace),
    }.items()],
    *[Target(f"plots.{name}", {"results": "table", "table": "table", "clusters": "table", "size": "whole"},
             {"results": lambda w: _part(w, "fit_quality")})
      for name in ("across_corpora", "alternation", "by_fitting", "by_method", "concept_shares",
                   "toxicity_against_perplexity")],
    Target("plots.layer_ticks", {"last": "whole"}),
    Target("plots.literal", {"text": "text"}),
    Target("plots.model_title", {"model": "text", "corpus": "", "n": ""}, {"model": lambda _: "m"}),
    Target("plots.save", {"figure": "object", "name": "text"}, {"figure": _figure, "name": lambda _: "r2"}),
    Target("plots.token_table", {"tables": "object"}, {"tables": lambda w: {"a": w.table_of_predictions}}),
    # Storage.
    Target("storage.read_config", {"folder": "path read", "expected": ""},
           {"folder": _read("maps"), "expected": lambda _: "maps"}),
    Target("storage.read_table", {"path": "path read", "columns": "", "what": "", "made_by": ""},
           {"path": _read("predictions"), "columns": lambda _: ["prompt"], "what": lambda _: "a table",
            "made_by": lambda _: "The analysis writes it."}),
    # Study.
    Target("study.collect_parts", {"positions": "choice"}),
    Target("study.evaluate_maps", {"folder": "path read"}, {"folder": lambda w: w.study_folder}),
    Target("study.fit_maps", {"folder": "path read"}, {"folder": lambda w: w.study_folder, "pairs": lambda _: "all",
                                                      "ridge": lambda _: 1.0}),
    Target("study.plot_results", {"folder": "path read"}, {"folder": lambda w: w.study_folder}),
    Target("study.read_results", {"folder": "path read"}, {"folder": lambda w: w.study_folder}),
    Target("study.slug", {"name": "text"}),
    Target("study.Study.load", {"model": "model", "corpus": "corpus", "out": "path written", "device": ""},
           {"corpus": lambda w: w.corpus, "out": lambda w: w.fresh("study")}),
    # Metrics.
    Target("metrics.r2", {"prediction": "vectors", "truth": "vectors"},
           {"prediction": lambda w: w.activations[3], "truth": lambda w: w.activations[3]}),
    Target("metrics.rank", {"log_probs": "vectors", "token": "object"},
           {"log_probs": lambda _: torch.rand(4, 9), "token": lambda _: torch.arange(4)}),
    Target("metrics.surprisal", {"log_probs": "vectors", "token": "object"},
           {"log_probs": lambda _: torch.rand(4, 9), "token": lambda _: torch.arange(4)}),
    Target("metrics.proportion", {"hits": "object"}, {"hits": lambda _: torch.tensor([True, False])}),
    Target("metrics.mean", {"values": "object"}, {"values": lambda _: torch.rand(9)}),
]  # fmt: skip


def _annotations(world: World) -> list[Any]:
    from pandas import DataFrame

    marks = DataFrame({"item": [1] * 4, "rank": [1, 2, 3, 4], "pattern": [1] * 4})
    patterns = DataFrame({"item": [1], "pattern": [1], "description": ["x"], "class": ["semantic"]})
    return [annotation.Annotation("a", marks, patterns)]


# What takes nothing from a user, or is made by the library alone; and where it is tried instead.
EXEMPT = {
    "InputError": "an error",
    "models.Family": "made by the library",
    "models.block_hook": "a name",
    "models.require_finite": "a check of the library's own",
}


def untried() -> Iterator[str]:
    """Public functions and classes that no target calls, and that nothing is known to excuse."""
    tried = {target.name for target in TARGETS}
    tried |= {name.rpartition(".")[0] for name in tried}
    tried |= {name.split(".")[-1] for name in tried}
    for name, value in public_names():
        if name.split(".")[-1] not in tried and name not in EXEMPT and not _is_result(value):
            yield name


def _is_result(value: Any) -> bool:
    return inspect.isclass(value) and (is_dataclass(value) or issubclass(value, tuple))


def public_names() -> Iterator[tuple[str, Any]]:
    """Functions and classes of all faces."""
    root = Path(matlens.__file__).parent
    for face in (root / "__init__.pyi", *sorted(root.glob("*/__init__.pyi"))):
        room = "" if face.parent == root else face.parent.name
        module = importlib.import_module(f"matlens.{room}" if room else "matlens")
        for name in re.findall(r"^from \S+ import \w+ as (\w+)", face.read_text(), flags=re.MULTILINE):
            value = getattr(module, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{room}.{name}" if room else name, value
