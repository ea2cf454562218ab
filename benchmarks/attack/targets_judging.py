"""Targets of lenses that are judged against each other, and of figures of them."""

from __future__ import annotations

import json
from pathlib import Path

from attack.kept import saved
from attack.signatures import Target
from attack.world import World
from matlens import lens

LENSES = "lenses, other lenses"
ACTIVATIONS = "activations, other activations"
SIZES = ("rows", "d", "tokens", "pilot", "d_vocab")


def evaluation_items(world: World) -> dict[str, list[lens.EvaluationItem]]:
    """An evaluation of two questions."""
    prompts = zip(world.sentences[:2], ("w1", "w2"), strict=True)
    return {"multihop": [lens.EvaluationItem(text, text, ((word,),)) for text, word in prompts]}


def _evaluations(world: World) -> Path:
    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        items = [{"prompt": text, "intermediates": ["w1"]} for text in world.sentences[:2]]
        (folder / "lens-eval-multihop.json").write_text(json.dumps({"items": items}))

    return saved(world, "evaluations", write)


def _evaluated(world: World) -> lens.Evaluation:
    predictions = {"id": world.activations[1]}
    return lens.evaluate(world.readout, world.activations[3], predictions, progress=False)["id"]


JUDGING: list[Target] = [
    # Judging.
    Target("lens.default_methods"),
    Target(
        "lens.training_flops",
        dict.fromkeys(SIZES, "whole"),
        dict.fromkeys(SIZES, lambda _: 64),
        takes={f"{size}=0": lambda _, n: n > 0 for size in ("rows", "pilot", "d_vocab")},
    ),
    Target(
        "lens.fit_members",
        {"train": ACTIVATIONS},
        {"train": lambda w: w.activations, "methods": lambda _: ["mat"]},
    ),
    Target(
        "lens.LensConfig",
        {
            "ridge": "positive",
            "toward": "choice",
            "rank": "whole",
            "sinks": "choice",
            **dict.fromkeys(("intercept", "standardise", "weighted", "shared_map"), "truth"),
        },
    ),
    Target("lens.parse_methods"),
    Target(
        "lens.Member",
        {"lens": "lens", "seconds": "positive", "flops": "positive"},
        takes={"lens=of_other_weights": lambda w, member: member.lens is w.other_lens},
    ),
    Target(
        "lens.report_table",
        {"members": "lenses", "validation": ACTIVATIONS, "against": "choice", "sinks": "marks"},
    ),
    Target("lens.report_by_member", good={"table": lambda w: w.report}),
    Target("lens.exit_sweep", {"lenses": LENSES, "validation": ACTIVATIONS, "lams": "object"}),
    Target("lens.Evaluation.differences", {"other": "object"}, {"other": _evaluated}, owner=_evaluated),
    Target(
        "lens.matrix_cosine",
        {"first": "vectors", "second": "vectors"},
        {"first": lambda w: w.activations[1], "second": lambda w: w.activations[3]},
        takes={
            f"{part}=with_{label}": lambda _, cosine: cosine != cosine
            for part in ("first", "second")
            for label in ("nan", "infinity")
        },
    ),
    Target(
        "lens.cosine_table",
        {"lenses": LENSES, "halves": "lenses"},
        {"lenses": lambda w: {"mat": w.lens, "again": w.lens}},
        takes={"halves={}": lambda _, table: len(table) > 0},
    ),
    Target(
        "lens.EvaluationItem",
        {"name": "text", "text": "text", "words": "object"},
        {"words": lambda _: (("w1",),)},
        finish=lambda w, item: lens.evaluate_open_sets({"mat": w.lens}, {"multihop": [item]}, progress=False),
        takes={
            "name=''": lambda _, table: len(table) == 3,
            "words=[]": lambda _, table: table["value"].isna().all(),  # an item that cannot be scored
        },
    ),
    Target(
        "lens.evaluate_open_sets",
        {"lenses": LENSES, "evaluations": "lenses"},
        {"evaluations": evaluation_items},
    ),
    Target(
        "lens.read_evaluations",
        {"folder": "path read", "names": "names"},
        {"folder": _evaluations, "names": lambda _: None},
    ),
    Target(
        "lens.word_tokens",
        {"spellings": "sentences"},
        {"spellings": lambda _: ["w1", "w2"]},
        takes={f"spellings={none}": lambda _, tokens: tokens == [] for none in ("{}", "[]")},
    ),
    Target(
        "lens.compare_lenses",
        {
            "parts": "object",
            "against": "choice",
            "n_prompts": "whole",
            "longest": "whole",
            "evaluations": "lenses",
        },
        {
            "parts": lambda w: w.corpus.split(n_train=40, n_validation=10),
            "methods": lambda _: ["mat", "id"],
        },
        takes={
            "folder=a_folder_of_others": lambda _, comparison: len(comparison.report) > 0,
        },
    ),
    # Plots of them.
    Target(
        "plots.lens_measures",
        good={"results": lambda w: w.report},
        finish=lambda _, figure: figure.axes and None,
    ),
    Target(
        "plots.lens_cosines",
        good={
            "results": lambda w: lens.cosine_table(
                {"mat": w.lens, "jacobian": w.lens}, {"jacobian": (w.lens, w.lens)}
            )
        },
        finish=lambda _, figure: figure.axes and None,
    ),
    Target(
        "plots.trajectory_figure",
        {"table": "table", "colour": "choice", "title": "text"},
        {"table": lambda w: w.trajectory.to_dataframe()},
        finish=lambda _, figure: figure.axes and None,
        takes={"title=''": lambda _, nothing: nothing is None},
    ),
]
