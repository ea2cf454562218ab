"""Targets of plans, studies, heads, stored samples, and of parts of models, FFNs and control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paper_a
import torch
from safetensors.torch import save_file

import matlens
from attack.kept import draw, kept, once, saved
from attack.signatures import Target
from attack.world import World
from matlens import activations, ffn, io, linearity, models
from matlens import study as studies

_ALL_ROWS: Any = {name: lambda _: torch.ones(60, dtype=torch.bool) for name in ("rows", "validation_rows")}


def exported(world: World) -> Path:
    """A folder that another engine has written."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        examples = world.prompts
        vectors = matlens.collect(world.model, examples, ["h.0", "h.3"], positions="all", progress=False)
        both = torch.stack([vectors["h.0"], vectors["h.3"]], 1)
        for number, (start, end) in enumerate(zip(examples.offsets[:-1], examples.offsets[1:], strict=True)):
            tensors = {
                "token_ids": torch.from_numpy(examples.tokens[start:end].astype(np.int64)),
                "hidden_states": both[start:end].contiguous(),
            }
            save_file(tensors, folder / f"{number}.safetensors")

    return saved(world, "exported", write)


def _stored(world: World) -> activations.StoredMoments:
    return activations.StoredMoments(kept("moments")(world))


def _layout(world: World) -> models.ModelLayout:
    return models.ModelLayout.from_model(world.model)


def _heads(world: World) -> Any:
    return once(
        world,
        "heads",
        lambda: world.collected(sites=[*sum(linearity.head_pairs(_layout(world)), ()), "h.3"]),
    )


def _head_maps(world: World) -> Any:
    return matlens.MapSet.fit(
        _heads(world), pairs=linearity.head_pairs(_layout(world)), ridge=1.0, progress=False
    )


def _identity(world: World) -> models.ModelIdentity:
    return models.ModelIdentity.from_model(world.model)


def _plan(_: World) -> studies.Plan:
    return studies.plan_study(studies.Shape(n_layers=3, d_model=32), 100, 20)


def _fitted_rule(world: World) -> ffn.ExitRule:
    active = ffn.active_clusters(world.trace, world.clusters)
    made_at = ffn.find_saturation(world.trace).layer.numpy()
    return ffn.ExitRule().fit(active, made_at, np.arange(30))


PARTS: list[Target] = [
    # Plans and studies.
    Target(
        "study.Shape",
        dict.fromkeys(("n_layers", "d_model", "d_vocab", "parameter_bytes"), "whole")
        | dict.fromkeys(("d_mlp", "n_parameters"), "seed"),
        {"n_layers": lambda _: 3, "d_model": lambda _: 32},
    ),
    Target("study.Shape.from_model"),
    Target(
        "study.Shape.from_name",
        {"name": "text", "parameter_bytes": "whole"},
        {"name": lambda w: str(w.model_folder("gpt2"))},
    ),
    Target(
        "study.plan_study",
        {
            "shape": "object",
            "n_train": "whole",
            "n_validation": "whole",
            "positions": "choice",
            "pairs": "choice",
            "train_tokens": "whole",
        },
        {"shape": lambda _: studies.Shape(n_layers=3, d_model=32)},
        takes={"n_validation=0": lambda _, plan: plan.weights > 0},
    ),
    *[
        Target(f"study.Plan.{name}", {"step": "text"}, {"step": lambda w: next(iter(_plan(w).needs))}, _plan)
        for name in ("__getitem__", "memory")
    ],
    Target(
        "study.Study.shard_moments",
        {"number": "whole", "of": "whole"},
        {"number": lambda _: 1, "of": lambda _: 2},
        lambda w: w.make_study(w.fresh("study")),
    ),
    Target("study.Study.submodule_maps", {"fitted": "choice"}, owner=lambda w: w.study),
    Target("study.Study.trace", owner=lambda w: w.make_study(w.fresh("study"))),
    Target("study.Study.collect_validation", owner=lambda w: w.make_study(w.fresh("study"))),
    Target(
        "study.Study.clusters",
        {"memory": "positive", "disk": "positive"},
        {"n_clusters": lambda _: 20},
        lambda w: w.make_study(w.fresh("study")),
    ),
    # Heads.
    Target("linearity.head_pairs", {"layout": "object"}, {"layout": _layout}),
    # Samples of others, and moments in folders.
    Target(
        "activations.read_exported",
        {
            "source": "path read",
            "entries": "sites",
            "positions": "choice",
            "n_checked": "whole",
            "name": "text",
        },
        {"source": exported, "entries": lambda _: ["h.0", "h.3"]},
        takes={"name=''": lambda _, read: len(read) == 2},
    ),
    Target("activations.StoredMoments", {"folder": "path read"}, {"folder": kept("moments")}),
    *[
        Target(f"activations.StoredMoments.{name}", {"source": "site"}, {"source": lambda _: "h.0"}, _stored)
        for name in ("moments", "norms")
    ],
    Target("activations.merge_moments", {"moments": "object"}, {"moments": _stored}),
    Target(
        "data.Examples.rows_of",
        {"index": "object"},
        {"index": lambda _: np.array([0, 1])},
        lambda w: w.examples,
        takes={"index=[]": lambda _, rows: len(rows[0]) == 0},
    ),
    Target(
        "data.Examples.copies",
        {"sentence": "row", "n": "whole"},
        {"sentence": lambda _: 0},
        lambda w: w.examples,
    ),
    Target(
        "data.Examples.from_arrays",
        {"arrays": "object", "data": "object"},
        {"arrays": lambda w: w.examples.arrays, "data": lambda w: w.examples.provenance},
        takes={f"data={none}": lambda _, examples: len(examples) == 60 for none in ("{}", "None")},
    ),
    # Models.
    *[
        Target(f"models.ModelLayout.{name}", owner=_layout)
        for name in ("written_at", "order", "write_order", "names")
    ],
    Target("models.ModelLayout.start_of_block", {"layer": "layer"}, owner=_layout),
    *[
        Target(
            f"models.ModelIdentity.{name}",
            {"other": "object", "ours": "", "theirs": ""},
            {"other": _identity, "ours": lambda _: "the maps", "theirs": lambda _: "the model"},
            _identity,
        )
        for name in ("same_but_rounded", "check_same_changes", "difference")
    ],
    Target(
        "models.Provenance.resolve",
        owner=lambda w: w.activations.provenance,
        takes={"site='bogus.1'": lambda _, site: site.kind == "bogus"},  # its layer is one of the model's
    ),
    Target("models.Provenance.to_json", owner=lambda w: w.activations.provenance),
    Target(
        "models.Provenance.from_config",
        {"config": "object"},
        {"config": lambda w: io.read_config(kept("activations")(w), "activations")},
    ),
    Target(
        "models.Readout.check_same",
        {"other": "object", "theirs": ""},
        {"other": lambda w: w.stream_maps.provenance},
        lambda w: w.readout,
    ),
    Target("models.Readout.features", owner=lambda w: w.readout),
    Target(
        "models.Readout.token_scores",
        {"features": "any vectors", "tokens": "object"},
        {"features": lambda w: w.readout.features(w.activations[3])},
        lambda w: w.readout,
        takes={
            f"features=with_{label}": lambda _, s: not s.isfinite().all() for label in ("nan", "infinity")
        },
    ),
    Target("models.Readout.top_ids", {"h": "vectors"}, owner=lambda w: w.readout),
    Target(
        "models.Readout.top_ids_and_ranks",
        {"h": "vectors", "ids": "object"},
        {"ids": lambda _: torch.full((60,), 5)},
        lambda w: w.readout,
    ),
    # FFNs and control.
    Target("ffn.Projection.through_head"),
    Target("ffn.Projection.blocks", {"vectors": "vectors"}, owner=lambda w: w.projection),
    Target(
        "ffn.Projection.check_same",
        {"other": "object", "theirs": ""},
        {"other": lambda w: w.values.identity},
        lambda w: w.projection,
    ),
    *[Target(f"ffn.ValueVectors.{name}", owner=lambda w: w.values) for name in ("matrix", "column")],
    Target(
        "ffn.ValueVectors.vector",
        {"column": "row"},
        {"column": lambda _: 1},
        lambda w: w.values,
        takes={"column=-1": lambda _, vector: vector.index == 47},
    ),
    Target(
        "ffn.ValueVectors.scale",
        {"outputs": "vectors"},
        {"outputs": lambda w: w.activations[1]},
        lambda w: w.values,
        takes={"outputs": lambda _, scale: bool((scale == 1).all())},  # no norm follows these FFNs
    ),
    Target("ffn.Updates.scales", owner=lambda w: w.updates),
    Target(
        "ffn.ExitRule.signals",
        {"active": "object", "rows": "numbers"},
        {"active": lambda w: ffn.active_clusters(w.trace, w.clusters), "rows": lambda _: np.arange(30)},
        lambda w: _fitted_rule(w),
    ),
    # Figures.
    Target(
        "plots.attention_heads",
        good={
            "results": lambda w: once(
                w,
                "ablation",
                lambda: paper_a.head_ablation(
                    w.readout,
                    w.model,
                    _head_maps(w),
                    _heads(w),
                    _heads(w),
                    **{name: all_rows(w) for name, all_rows in _ALL_ROWS.items()},
                ),
            )
        },
        finish=draw,
    ),
    Target(
        "plots.save_as",
        {"figure": "object", "path": "file written"},
        {"figure": lambda w: w.trajectory.plot(), "path": lambda w: w.fresh("figure.png")},
    ),
]
