"""Targets of lenses that are judged against each other, and of figures of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from attack.kept import saved
from attack.signatures import Target
from attack.world import World
from matlens import lens

LENSES = "lenses, other lenses"
ACTIVATIONS = "activations, other activations"
ROWS: dict[str, Any] = {
    "h": lambda w: w.activations[1],
    "last": lambda w: w.activations[3],
    "start": lambda _: lens.LayerMap(torch.eye(32)),
}


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


def _judged(world: World) -> lens.Judgement:
    scores = {"mat": lens.lens_scores(world.lens, world.activations[1], 1)}
    return lens.judge_scores(world.readout, world.activations[3], scores, progress=False)["mat"]


JUDGING: list[Target] = [
    # Judging.
    Target("lens.default_methods"),
    Target("lens.default_layers"),
    *[
        Target(
            f"lens.{name}",
            dict.fromkeys(sizes, "whole"),
            dict.fromkeys(sizes, lambda _: 64),
            takes={f"{size}=0": lambda _, n: n > 0 for size in ("rows", "pilot", "d_vocab")},
        )
        for name, sizes in {
            "closed_form_flops": ("n", "d"),
            "jacobian_flops": ("tokens", "d", "parameters", "at_once"),
            "training_flops": ("rows", "d", "tokens", "pilot", "d_vocab"),
        }.items()
    ],
    Target(
        "lens.fit_members",
        {"train": ACTIVATIONS, "prompts": "corpus", "longest": "whole"},
        {"train": lambda w: w.activations, "methods": lambda _: ["mat"]},
        takes={"prompts": lambda _, members: {*members} == {"mat"}},  # of which Jacobians alone are taken
    ),
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
    Target("lens.lens_exit_sweep", {"lenses": LENSES, "validation": ACTIVATIONS}),
    Target(
        "lens.lens_savings",
        {"precision": "positive"},
        {"table": lambda w: lens.lens_exit_sweep({"mat": w.lens}, w.activations, progress=False)},
    ),
    Target(
        "lens.lens_r2",
        {"lens": "lens", "h": "vectors", "last": "vectors"},
        ROWS,
        takes={
            f"last=with_{label}": lambda _, score: (
                score.value != score.value or abs(score.value) == float("inf")
            )
            for label in ("nan", "infinity")
        },
    ),
    Target(
        "lens.lens_scores",
        {"lens": "lens", "h": "vectors"},
        {"h": lambda w: w.activations[1]},
        finish=lambda _, scores: scores(slice(0, 3)),
    ),
    Target(
        "lens.judge_scores",
        {"members": "lenses"},
        {"members": lambda w: {"mat": lens.lens_scores(w.lens, w.activations[1], 1)}},
    ),
    Target("lens.Judgement.differences", {"other": "object"}, {"other": _judged}, owner=_judged),
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
        finish=lambda w, item: lens.evaluate_lenses({"mat": w.lens}, {"multihop": [item]}, progress=False),
        takes={
            "name=''": lambda _, table: len(table) == 3,
            "words=[]": lambda _, table: table["value"].isna().all(),  # an item that cannot be scored
        },
    ),
    Target(
        "lens.evaluate_lenses",
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
