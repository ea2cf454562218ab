"""Methods look the same in all figures, and those drawn together differ for a color-blind reader."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from figures.looks import CLASSES, REPLACED, SUMMARIES, UPDATES
from matplotlib.colors import to_rgb

from matlens.drawing import Look, method_looks

TOGETHER = {
    "figure 4": ("mat", "id"),
    "figure 6": ("WRR, blocks first", "WRR, mat first", "R2", "mat", "id"),
    "figure 10": (
        "mat", "mat_attn", "mat_ffn", "mat_ffn without sinks", "mat_ln1_ln2", "mat_ln1_ln2 without sinks",
    ),
    "overlap": ("values", "random", "shuffled"),
    "control": (
        "unchanged", "picked, 10 vectors", "words, 9 vectors", "graded, 10 vectors", "Self-Debiasing",
        "WordFilter",
    ),
    "others": tuple(f"method {i}" for i in range(7)),
}  # fmt: skip
LOOKS = {name: list(method_looks(methods).values()) for name, methods in TOGETHER.items()} | {
    "summaries": [Look(color) for color in SUMMARIES.values()],
    "updates": list(UPDATES.values()),
    "replaced": [*method_looks(["mat"]).values(), *REPLACED.values()],
    "classes": [Look(color) for color in CLASSES.values()],
}
# What a reader without middle cones sees of linear red, green and blue (Machado et al., 2009).
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)


def seen(color: str) -> np.ndarray:
    """A color in CIELAB, as a reader with deuteranopia sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(DEUTERANOPIA @ linear, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("name", LOOKS)
def test_colors_of_one_figure_differ_under_deuteranopia(name: str) -> None:
    for first, second in itertools.combinations(LOOKS[name], 2):
        if first.color != second.color:
            distance = np.linalg.norm(seen(first.color) - seen(second.color))
            assert distance > 15, (first.color, second.color)
        else:
            assert (first.line, first.hollow) != (second.line, second.hollow)
    assert np.linalg.norm(seen("#bb5544") - seen("#668844")) < 15  # red and green would not pass
