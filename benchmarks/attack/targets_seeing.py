"""Targets of what people look at: annotation and plots."""

from __future__ import annotations

from attack.kept import annotations_of, draw, kept, part_of, r2_figure, sheets_of
from attack.signatures import Target
from matlens import annotation, ffn

SEEING: list[Target] = [
    # Annotation.
    Target("annotation.draw_concept_sample", {}, {"per_layer": lambda _: 2, "k": lambda _: 3}),
    Target("annotation.sheet_code"),
    Target("annotation.write_concept_sheets", {"describe": ""}),
    Target(
        "annotation.read_concept_sheets",
        {"folder": "path read"},
        {"folder": sheets_of},
    ),
    Target("annotation.read_concept_sample", {"path": "path read"}, {"path": kept("sample")}),
    Target(
        "annotation.tally_concepts", {"annotations": "object"}, {"annotations": lambda w: annotations_of(w)}
    ),
    Target(
        "annotation.annotator_agreement",
        {"annotations": "object"},
        {"annotations": lambda w: 2 * annotations_of(w)},
    ),
    Target(
        "annotation.distinct_concepts",
        {"patterns": "table", "n": "whole", "words": "whole", "per_layer": "whole", "shared": "positive"},
        {"patterns": lambda w: w.patterns["values"]},
    ),
    Target("annotation.find_patterns", {"ids": "ids"}, {"ids": lambda w: w.tokens.ids}),
    Target(
        "annotation.pattern_shares",
        {"tables": "object", "model_name": "", "corpus": ""},
        {
            "tables": lambda w: w.patterns,
            "model_name": lambda _: "m",
            "corpus": lambda _: "c",
            "k": lambda _: 5,
        },
    ),
    Target("annotation.search_concepts", {}, {"k": lambda _: 3}),
    Target(
        "annotation.make_plausibility_sheet",
        {"predictions": "table"},
        {"predictions": lambda w: w.table_of_predictions},
    ),
    Target(
        "annotation.plausibility_rates",
        {"predictions": "table", "sheet": "table"},
        {
            "predictions": lambda w: w.table_of_predictions,
            "sheet": lambda w: annotation.read_plausibility_sheet(kept("plausibility")(w)),
        },
    ),
    Target("annotation.read_plausibility_sheet", {"path": "path read"}, {"path": kept("plausibility")}),
    Target(
        "annotation.write_sheet",
        {"path": "path written"},
        {"path": lambda w: w.fresh("sheet.csv")},
        takes={"table=another_table": lambda _, nothing: nothing is None},  # any table is written
    ),
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
