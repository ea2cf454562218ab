"""Targets of what people look at: annotation and plots."""

from __future__ import annotations

from attack.kept import draw, part_of, r2_figure
from attack.signatures import Target
from matlens import ffn

SEEING: list[Target] = [
    # Annotation.
    # Plots.
    *[
        Target(f"plots.{name}", finish=draw, good={"results": part})
        for name, part in {
            "prediction": lambda w: part_of(w, "prediction_quality"),
            "r2_heatmaps": lambda w: part_of(w, "fit_quality"),
            "relative_depth": lambda w: part_of(w, "prediction_quality"),
            "early_exit": lambda w: w.sweep,
            "saturation_figure": lambda w: ffn.saturation_frequency(w.trace),
        }.items()
    ],
    Target("plots.layer_ticks", {"last": "whole"}, takes={"last=0": lambda _, ticks: ticks == [0]}),
    Target("plots.literal", {"text": "text"}, takes={"text=''": lambda _, text: text == ""}),
    Target(
        "plots.model_title",
        {"model": "text", "corpus": "", "n": ""},
        {"model": lambda _: "m"},
        takes={"model=''": lambda _, text: text == ""},
    ),
    Target(
        "plots.save",
        {"figure": "object", "name": "text"},
        {"figure": r2_figure, "name": lambda _: "r2"},
        takes={
            "folder=a_folder_of_others": lambda _, paths: (paths[0].parent / "other.txt").is_file(),
            "title=''": lambda _, paths: len(paths) == 2,
        },
    ),
    Target("plots.token_table", {"tables": "object"}, {"tables": lambda w: {"a": w.table_of_predictions}}),
]
