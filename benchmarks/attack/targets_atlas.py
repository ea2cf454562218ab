"""Targets of the atlas of linear parts, and of the text that it is judged on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attack.kept import draw, once, saved
from attack.signatures import Target
from attack.world import World
from matlens import data, linearity


def _text(world: World) -> data.JudgedText:
    return data.make_judged_text(world.model, world.corpus, size=12)


def _table(world: World) -> Any:
    def make() -> Any:
        judged = data.make_judged_text(world.model, world.corpus, size=12, most=3)
        return linearity.linearity_atlas(world.model, _text(world), judged, jumps=[2], progress=False)

    return once(world, "atlas", make)


def _folder(world: World) -> Any:
    def save(folder: Path) -> None:
        judged = data.make_judged_text(world.model, world.corpus, size=12, most=3)
        linearity.linearity_atlas(world.model, _text(world), judged, folder=folder, jumps=[2], progress=False)

    return saved(world, "atlas", save)


def _correlations(world: World) -> Any:
    return linearity.rank_correlations(_table(world), resamples=9)


_OF_ATLAS = {"table": _table}

ATLAS: list[Target] = [
    Target(
        "data.JudgedText",
        {"truth": "object"},
        {"examples": lambda w: _text(w).examples, "truth": lambda w: _text(w).truth},
    ),
    Target("data.make_judged_text", {"most": "whole"}, {"size": lambda _: 12}),
    Target(
        "linearity.linearity_atlas",
        {"fitted": "object", "judged": "object", "jumps": "object"},
        {"fitted": _text, "judged": _text, "jumps": lambda _: [2]},
        takes={"jumps=[]": lambda _, table: not table["kind"].str.startswith("jump").any()},
    ),
    Target("linearity.atlas_seconds", {"folder": "path read"}, {"folder": _folder}),
    Target(
        "linearity.rank_correlations",
        {"resamples": "whole"},
        _OF_ATLAS | {"resamples": lambda _: 9},
    ),
    Target(
        "linearity.first_parts",
        {"n": "whole", "group": "choice", "tokens": "object"},
        _OF_ATLAS | {"group": lambda _: "ffn"},
    ),
    Target(
        "linearity.added_rise",
        {"parts": "text", "tokens": "object"},
        _OF_ATLAS | {"parts": lambda _: "ffn 1"},
    ),
    Target("linearity.atlas_summary", good=_OF_ATLAS),
    Target(
        "plots.linearity_figure",
        {"correlations": "table"},
        {"results": _table, "correlations": _correlations},
        finish=draw,
    ),
]
