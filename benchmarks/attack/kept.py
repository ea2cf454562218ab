"""Good inputs that lie in files, what is done with a result, and kinds that many targets share."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import annotation
import numpy as np
import torch
from pandas import DataFrame, read_csv

import matlens
from attack.world import World
from matlens import activations, ffn, linear, models, patching, plots


def run_in(world: World, context: Any) -> Any:
    """What the model says inside of a context."""
    with context as model:
        return model(world.examples.head(1).batches(512).__next__().tokens, return_type="logits")


def patch_with(world: World, replacements: Any) -> Any:
    """What the model says with replacements."""
    with matlens.patched(world.model, replacements) as model:
        return model(torch.tensor([[5, 6, 7]]), return_type="logits")


def draw(world: World, figure: Any) -> Any:
    """Draw a figure, as saving it would."""
    figure.draw_without_rendering()
    import matplotlib.pyplot as plt

    plt.close(figure)
    return None


def kept(kind: str) -> Any:
    """Gives the path of a good file or folder of a kind."""
    return {
        "maps": lambda w: saved(w, "maps", lambda folder: w.stream_maps.save(folder)),
        "activations": lambda w: saved(
            w, "activations",
            lambda folder: matlens.collect(w.model, w.examples, folder=folder, progress=False),
        ),
        "trace": lambda w: saved(
            w, "trace", lambda folder: ffn.Trace.run(w.model, w.examples, k=4, folder=folder, progress=False)
        ),
        "clusters": lambda w: saved(
            w, "clusters", lambda folder: ffn.Clusters.fit(w.values, 20, folder=folder, progress=False)
        ),
        "predictions": lambda w: written(w, "predictions", w.table_of_predictions),
        "sample": lambda w: written(w, "sample", w.sample),
        "plausibility": lambda w: written(
            w, "plausibility",
            annotation.make_plausibility_sheet(w.table_of_predictions).assign(plausible="1"),
        ),
        "prompts": lambda w: prompts_file(w),
        "lens": lambda w: saved(w, "lens", lambda folder: w.lens.save(folder)),
        "moments": lambda w: saved(
            w, "moments",
            lambda folder: activations.stream_moments(
                w.model, w.examples, folder, pairs=[("h.0", "h.3")], positions="drawn", progress=False
            ),
        ),
        "published": lambda w: saved(w, "published", published),
    }[kind]  # fmt: skip


def published(folder: Path) -> None:
    """A map as the authors of paper A publish it."""
    folder.mkdir(parents=True)
    (folder / "0_3.pickle").write_bytes(pickle.dumps(np.eye(32, dtype=np.float32)))


def once(world: World, name: str, make: Callable[[], Any]) -> Any:
    """What takes a while to be made, made once."""
    if name not in world.made:
        world.made[name] = make()
    return world.made[name]


def saved(world: World, name: str, save: Any) -> Path:
    """A folder that is written once."""
    folder = world.root / "saved" / name
    if not folder.is_dir():
        save(folder)
    return folder


def written(world: World, name: str, table: Any) -> Path:
    """A table that is written once."""
    path = world.root / f"{name}.csv"
    if not path.exists():
        table.to_csv(path, index=False, lineterminator="\n")
    return path


def prompts_file(world: World) -> Path:
    """A file of prompts."""
    path = world.root / "prompts.jsonl"
    path.write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w4 w5"}\n')
    return path


def r2_figure(world: World) -> Any:
    """A figure."""
    return plots.r2_heatmaps(part_of(world, "fit_quality"))


def part_of(world: World, experiment: str) -> Any:
    """The rows of a table of results of one experiment."""
    return world.quality[world.quality["experiment"] == experiment]


def moments_of(world: World) -> linear.LeastSquares:
    """Sums of the pair of the first and the last layer."""
    return linear.LeastSquares(32, 32).update(world.activations[0], world.activations[3])


def scheme_of(world: World) -> patching.Scheme:
    """A scheme of alternation."""
    return patching.Scheme((0, 1, 3), "blocks")


def sheets_of(world: World) -> Path:
    """Sheets of concepts in which one pattern is filled in."""

    def fill(folder: Path) -> None:
        annotation.write_concept_sheets(world.sample, folder)
        tokens = read_csv(folder / "tokens.csv", dtype="str", keep_default_na=False)
        tokens.loc[:3, "patterns"] = "1"
        tokens.to_csv(folder / "tokens.csv", index=False)
        patterns = read_csv(folder / "patterns.csv", dtype="str", keep_default_na=False)
        patterns.loc[0, ["description", "class"]] = ["words", "semantic"]
        patterns.to_csv(folder / "patterns.csv", index=False)

    return saved(world, "sheets", fill)


def identity_of(world: World) -> models.ModelIdentity:
    """The identity of the model."""
    return models.ModelIdentity.from_model(world.model)


def active_of(world: World) -> Any:
    """Which clusters are active in the trace."""
    return ffn.active_clusters(world.trace, world.clusters)


def annotations_of(world: World) -> list[Any]:
    """What one annotator has filled in."""
    marks = DataFrame({"item": [1] * 4, "rank": [1, 2, 3, 4], "pattern": [1] * 4})
    patterns = DataFrame({"item": [1], "pattern": [1], "description": ["x"], "class": ["semantic"]})
    return [annotation.Annotation("a", marks, patterns)]


MAPS = {"maps": "maps, other maps"}
STREAM_MAPS = {"maps": lambda w: w.stream_maps}
RANGE = {"first": "layer", "last": "layer", "where": "where", "maps": "maps"}
VALUES = {"values": "values, other values"}
READOUT = {"readout": "readout, other readout"}
