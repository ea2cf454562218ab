"""Figures about feed-forward layers show what is in their table."""

from __future__ import annotations

import pandas as pd
import pytest
from figures.paper_b import concept_shares, pattern_sizes
from plot_tables import (
    assert_legible,
    named,
)

from matlens.io.tables import COLUMNS


def rows(
    experiment: str, method: str, metric: str, k: int, by_layer: list[float], n: int
) -> list[tuple[object, ...]]:
    estimates = [
        (None, sum(by_layer) / len(by_layer), n * len(by_layer)),
        *((i, v, n) for i, v in enumerate(by_layer)),
    ]
    return [
        (
            experiment,
            "folder/gpt2",
            "words",
            method,
            layer,
            layer,
            metric,
            k,
            value,
            value * 0.9,
            value * 1.1,
            size,
        )
        for layer, value, size in estimates
    ]


def test_concepts_are_stacked_by_class_up_to_what_is_covered() -> None:
    classes = {"semantic": [0.1, 0.2], "syntactic": [0.2, 0.1], "names": [0.0, 0.1], "stopwords": [0.3, 0.0]}
    lines = []
    for kind, factor in (("values", 1.0), ("random", 0.5)):
        for name, shares in classes.items():
            lines += rows("concepts", kind, name, 30, [factor * share for share in shares], 10)
        lines += rows("concepts", kind, "covered", 30, [factor * 0.6, factor * 0.4], 10)
        lines += rows("concepts", kind, "concepts", 30, [2.0, 1.0], 10)
    results = pd.DataFrame(lines, columns=list(COLUMNS)).astype({"layer": "Int64", "target": "Int64"})
    figure = concept_shares(results)
    assert_legible(figure)
    assert named(figure) == list(classes)
    assert figure.get_suptitle() == "gpt2"
    axes = figure.axes
    assert [ax.get_title() for ax in axes] == [
        "values, 50% of the tokens, n = 20", "random, 25% of the tokens, n = 20",
    ]  # fmt: skip
    for ax, factor in zip(axes, (1.0, 0.5), strict=True):
        assert [bars.get_label() for bars in ax.containers] == list(classes)
        floor = [0.0, 0.0]
        for bars, shares in zip(ax.containers, classes.values(), strict=True):
            assert [bar.get_height() for bar in bars] == pytest.approx([factor * share for share in shares])
            assert [bar.get_y() for bar in bars] == pytest.approx(floor)
            floor = [low + factor * share for low, share in zip(floor, shares, strict=True)]
        assert floor == pytest.approx([factor * 0.6, factor * 0.4])


def test_patterns_are_drawn_by_size_and_by_layer_and_what_is_never_seen_is_not() -> None:
    lines = []
    for method, factor in (("values", 1.0), ("random", 0.0)):
        for size in (4, 5, 6):
            lines += rows("concept_search", method, "pattern", size, [factor / size, factor / size / 3], 50)
        lines += rows("concept_search", method, "known", 30, [0.1, 0.2], 50)
    results = pd.DataFrame(lines, columns=list(COLUMNS)).astype({"layer": "Int64", "target": "Int64"})
    figure = pattern_sizes(results, 5)
    assert_legible(figure)
    left, right = figure.axes
    values, random = left.get_lines()
    assert values.get_label() == "value vectors, n = 100"
    assert list(values.get_xdata()) == [4, 5, 6]
    assert list(values.get_ydata()) == pytest.approx([2 / 3 / size for size in (4, 5, 6)])
    assert len(random.get_xdata()) == 0
    assert [list(line.get_ydata()) for line in right.get_lines()] == [
        pytest.approx([0.2, 0.2 / 3]), [0, 0],
    ]  # fmt: skip
    assert right.get_ylabel() == "share with a pattern of 5 words or more"
