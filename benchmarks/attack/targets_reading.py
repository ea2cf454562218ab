"""Targets of what is read off a model: the lens, feed-forward layers, control and metrics."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from attack.badness import _short
from attack.kept import MAPS, READOUT, STREAM_MAPS, VALUES, active_of, kept, run_in
from attack.signatures import Target
from attack.world import World
from matlens import ffn

NOT_FINITE = ("with_nan", "with_infinity")


def _has(part: str, number: int, _: World, vector: Any) -> bool:
    return bool(getattr(vector, part) == number)


def shows_none(_: World, table: Any) -> bool:
    """Maps that are no numbers have no r2 and predict nothing right, and the identity is as it was."""
    of_maps = table[(table["method"] == "mat") & (table["layer"] < table["target"])]
    values = of_maps["value"][of_maps["metric"] != "precision"]
    hits = of_maps["value"][of_maps["metric"] == "precision"]
    return not values.map(math.isfinite).any() and bool((hits == 0).all())


READING: list[Target] = [
    # FFNs.
    Target(
        "ffn.Updates",
        {"activations": "activations"},
        {"activations": lambda w: w.updates.activations, "values": lambda w: w.values},
    ),
    Target("ffn.Updates.run", {"layers": "layers"}, {"examples": lambda w: w.prompts}),
    *[
        Target(f"ffn.Updates.{name}", owner=lambda w: w.updates)
        for name in ("coefficients", "outputs", "sub_updates", "contributions", "shares", "dominant")
    ],
    Target("ffn.dominant_table", {"projection": "projection, other projection"}),
    Target("ffn.Trace.run"),
    Target("ffn.Trace.load", {"folder": "path read"}, {"folder": kept("trace")}),
    Target(
        "ffn.ValueVector",
        {"layer": "whole", "index": "whole"},
        {"index": lambda _: 2},
        takes={  # from the end, where a model is known
            **{f"{part}={n}": partial(_has, part, n) for part in ("layer", "index") for n in (0, -1)},
            **{f"expert={_short(n)}": partial(_has, "expert", n) for n in (-1, 10**6, 10**40)},
        },
    ),
    Target("ffn.ValueVector.parse", {"text": "name read"}, {"text": lambda _: "L0D1"}),
    Target("ffn.ValueVectors"),
    *[
        Target(f"ffn.ValueVectors.{name}", owner=lambda w: w.values)
        for name in ("resolve", "resolve_layer", "at", "layer", "bias", "vectors", "norms")
    ],
    Target("ffn.ValueVectors.random", owner=lambda w: w.values),
    Target("ffn.Clusters.fit", {}, {"n_clusters": lambda _: 20}),
    Target("ffn.Clusters.load", {"folder": "path read"}, {"folder": kept("clusters")}),
    Target("ffn.Clusters.members", {"cluster": "row"}, {"cluster": lambda _: 1}, lambda w: w.clusters),
    Target(
        "ffn.Clusters.holding",
        VALUES,
        owner=lambda w: w.clusters,
        takes={"names=[]": lambda _, clusters: clusters == []},
    ),
    Target("ffn.Clusters.directions", VALUES, owner=lambda w: w.clusters),
    Target(
        "ffn.Clusters.cosines",
        {"directions": "vectors"},
        {"directions": lambda w: w.clusters.directions(w.values, [0, 1])},
        lambda w: w.clusters,
    ),
    Target("ffn.cluster_table", {**VALUES, "projection": "projection, other projection"}),
    Target("ffn.Projection.from_model"),
    Target("ffn.Projection.after_norm"),
    Target("ffn.Projection.scores", {"vectors": "any vectors"}, owner=lambda w: w.projection),
    Target("ffn.Projection.top", owner=lambda w: w.projection),
    Target("ffn.Projection.bottom", owner=lambda w: w.projection),
    Target("ffn.top_tokens_of_all", {**VALUES, "projection": "projection, other projection"}),
    Target("ffn.values_promoting", {**VALUES, "projection": "projection, other projection"}),
    Target("ffn.values_with_tokens", {**VALUES, "projection": "projection, other projection"}),
    Target("ffn.token_table", {**VALUES, "projection": "projection, other projection"}),
    Target("ffn.find_events"),
    Target("ffn.find_saturation"),
    Target("ffn.updates_by_effect"),
    Target("ffn.saturation_frequency"),
    Target("ffn.event_scores"),
    Target("ffn.update_scores"),
    Target("ffn.lift_scores"),
    Target("ffn.odds_scores"),
    Target(
        "ffn.Events.among",
        {},
        {"rows": lambda w: torch.ones(len(w.examples), dtype=torch.bool)},
        owner=lambda w: ffn.find_events(w.trace)["elimination"],
        takes={  # events know which examples they are in, and not how many there are
            "rows=one_too_many": lambda w, events: (
                len(events.layer) == len(ffn.find_events(w.trace)["elimination"].layer)
            ),
            "rows=none_true": lambda _, events: len(events.layer) == 0,
        },
    ),
    Target("lens.prediction_confidence"),
    Target("ffn.active_clusters"),
    Target("ffn.ExitRule", {"others": "choice"}),
    Target(
        "ffn.ExitRule.fit",
        {"active": "object", "made_at": "object", "rows": "numbers"},
        {
            "active": active_of,
            "made_at": lambda w: ffn.find_saturation(w.trace).layer.numpy(),
            "rows": lambda _: np.arange(30),
        },
        lambda _: ffn.ExitRule(),
    ),
    # Lens.
    Target(
        "lens.exit_confidences",
        {"predictions": "object"},  # of plain vectors no model is known
        {"predictions": lambda w: w.substitutes},
    ),
    Target(
        "lens.exit_layers",
        {"confidence": "any vectors", "threshold": "vector"},
        {"confidence": lambda w: w.confidence.difference, "threshold": lambda w: torch.full((60,), 0.5)},
        takes={  # of how many layers is not known
            "confidence=too_narrow": lambda _, layers: int(layers.max()) <= 31,
            "confidence=too_wide": lambda _, layers: int(layers.max()) <= 64,
        },
    ),
    Target(
        "lens.layers_saved",
        {"precision": "positive"},
        {"table": lambda w: w.sweep, "precision": lambda _: 0.5},
    ),
    Target(
        "lens.least_lam",
        {"positions": "object", "mean_length": "positive", "wanted": "number"},
        {
            "positions": lambda w: torch.from_numpy(w.examples.positions),
            "mean_length": lambda _: 7.0,
            "wanted": lambda _: 0.5,
        },
    ),
    Target(
        "lens.thresholds",
        {"positions": "object", "lam": "number", "mean_length": "positive"},
        {"positions": lambda w: torch.from_numpy(w.examples.positions), "lam": lambda _: 0.5},
    ),
    Target(
        "lens.predictions_table",
        {"prompt": "text"},
        {"table": lambda w: w.table_of_predictions, "prompt": lambda w: w.table_of_predictions["prompt"][0]},
    ),
    Target(
        "lens.side_by_side",
        {"prompt": "text"},
        {"table": lambda w: w.table_of_predictions, "prompt": lambda w: w.table_of_predictions["prompt"][0]},
    ),
    Target(
        "lens.prompt_texts",
        {**READOUT, "prompts": "activations"},
        {"prompts": lambda w: w.prompt_activations},
    ),
    Target("lens.read_predictions", {"path": "path read"}, {"path": kept("predictions")}),
    Target(
        "lens.top_predictions",
        {**MAPS, **READOUT, "prompts": "activations, other activations"},
        {**STREAM_MAPS, "prompts": lambda w: w.prompt_activations},
    ),
    Target(
        "lens.fit_quality",
        {**MAPS, "validation": "activations, other activations"},
        STREAM_MAPS,
        takes={"maps=with_nan": shows_none},
    ),
    Target(
        "lens.prediction_quality",
        {**MAPS, **READOUT, "validation": "activations, other activations", "methods": "names"},
        {**STREAM_MAPS, "methods": lambda _: ["mat"]},
        takes={"maps=with_nan": shows_none},
    ),
    Target(
        "lens.evaluate",
        {"predictions": "object", "kl": "truth"},  # of plain vectors no model is known
        {"predictions": lambda w: {"id": w.substitutes[0]}},
    ),
    Target("lens.layer_table"),
    Target("lens.r2_matrix"),
    # Control.
    Target("ffn.controlled", {"value": "number"}, finish=run_in),
    Target("ffn.added", {"number": "number"}, {"number": lambda _: 1.0}),
    Target("ffn.scaled", {"factor": "number"}, {"factor": lambda _: 2.0}),
    Target("ffn.text_losses", {"texts": "object"}, {"texts": lambda w: w.corpus}),
    Target("ffn.perplexity_estimate"),
    Target("ffn.perplexity_ratio"),
    # Metrics.
    Target(
        "metrics.r2",
        {"prediction": "vectors", "truth": "vectors"},
        {"prediction": lambda w: w.activations[3], "truth": lambda w: w.activations[3]},
        takes={  # a number that nobody takes for a result
            f"{part}={label}": lambda _, value: not math.isfinite(value)
            for part in ("prediction", "truth")
            for label in NOT_FINITE
        },
    ),
    Target(
        "metrics.rank",
        {"log_probs": "vectors", "token": "object"},
        {"log_probs": lambda _: torch.rand(4, 9), "token": lambda _: torch.arange(4)},
    ),
    Target(
        "metrics.surprisal",
        {"log_probs": "vectors", "token": "object"},
        {"log_probs": lambda _: torch.rand(4, 9), "token": lambda _: torch.arange(4)},
    ),
    Target("metrics.proportion", {"hits": "object"}, {"hits": lambda _: torch.tensor([True, False])}),
    Target(
        "metrics.mean",
        {"values": "object"},
        {"values": lambda _: torch.rand(9)},
        takes={"values=a_tensor": lambda _, mean: (mean.value, mean.n) == (0.0, 4)},
    ),
]
