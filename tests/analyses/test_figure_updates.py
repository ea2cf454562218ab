"""Figures about events show what is in their tables."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from figures.paper_b import events_figure, layers_figure, saturation_figure
from matplotlib.axes import Axes
from plot_tables import assert_legible, named
from sub_updates.events import saturation_frequency, update_scores
from traces import make_trace

from matlens.ffn.events import event_scores
from matlens.ffn.trace import Trace

READS = {"score": "score", "lift": "score above the vocabulary's mean"}


def some_trace(n: int = 60) -> Trace:
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.randint(2, (n, 4), generator=generator) for _ in range(2))
    return make_trace(before, after, 3 * (before != after).long())


def labelled(table: pd.DataFrame, examples: str, read: str = "score") -> pd.DataFrame:
    return table.assign(examples=examples, read=read)


def lines(ax: Axes) -> dict[str, list[float]]:
    return {
        str(line.get_label()): [float(y) for y in line.get_ydata()]
        for line in ax.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def values(table: pd.DataFrame, **chosen: object) -> list[float]:
    for column, value in chosen.items():
        table = table[table[column] == value]
    return table.sort_values("layer")["value"].tolist()


def test_events_have_a_point_for_every_mean_with_its_interval() -> None:
    trace = some_trace()
    rows = torch.arange(len(trace)) % 3 > 0
    table = pd.concat(
        labelled(event_scores(trace, scores=scores, rows=chosen), examples, read)
        for read, scores in (("score", None), ("lift", {key: 2 * s for key, s in trace.score.items()}))
        for examples, chosen in (("all examples", None), ("some", rows))
    ).sample(frac=1, random_state=0)
    figure = events_figure(table)
    assert len(figure.axes) == 4
    assert named(figure) == ["max", "mean", "min"]
    assert_legible(figure)
    titles = {ax.get_title(): ax for ax in figure.axes}
    ticks = [label.get_text() for label in figure.axes[0].get_yticklabels()]  # shared by all panels
    assert ticks == [
        f"{event}, {method}" for method in ("dominant", "random") for event in ("saturation", "elimination")
    ]
    for read, label in READS.items():
        for examples in ("all examples", "some"):
            ax = titles[f"{label}, {examples}"]
            part = table[(table["read"] == read) & (table["examples"] == examples)]
            for container in ax.containers:
                points, _, (bars,) = container.lines
                for place, (x, tick) in enumerate(zip(points.get_xdata(), ticks, strict=True)):
                    event, method = tick.split(", ")
                    row = part[(part["event"] == event) & (part["method"] == method)]
                    row = row[row["metric"] == container.get_label()].iloc[0]
                    assert x == pytest.approx(row["value"])
                    ends = bars.get_segments()[place][:, 0]
                    assert list(ends) == pytest.approx([row["low"], row["high"]])


def test_layers_are_lines_with_bands_and_kinds_with_enough_updates() -> None:
    trace = some_trace()
    rows = torch.arange(len(trace)) % 3 > 0
    tables = {"all examples": update_scores(trace), "some": update_scores(trace, rows=rows)}
    table = pd.concat(labelled(scores, examples) for examples, scores in tables.items())
    figure = layers_figure(table.sample(frac=1, random_state=0).sort_values("examples"))
    *panels, last = figure.axes
    for ax, (examples, scores) in zip(panels, tables.items(), strict=True):
        assert ax.get_title().startswith(f"top candidate, {examples}, n = ")
        drawn = lines(ax)
        for metric in ("max", "mean", "min"):
            assert drawn[f"{metric} of dominant"] == pytest.approx(
                values(scores, event="update", method="dominant", metric=metric)
            )
        for metric in ("max", "min"):
            assert drawn[f"{metric} of random"] == pytest.approx(
                values(scores, event="update", method="random", metric=metric)
            )
        band = ax.collections[0].get_paths()[0].vertices[:, 1]
        for end, metric in ((band.min(), "max_p05"), (band.max(), "max_p95")):
            bounds = values(scores, event="update", method="dominant", metric=metric)
            assert end == pytest.approx((min if metric == "max_p05" else max)(bounds))
    scores = tables["some"]
    drawn = lines(last)
    for event, label in (
        ("saturation", "predicted token, where it is made"), ("stays", "candidate that stays"),
        ("falls", "candidate that falls"),
    ):  # fmt: skip
        part = scores[
            (scores["event"] == event) & (scores["method"] == "dominant") & (scores["metric"] == "max")
        ]
        by_layer = part.set_index("layer")
        expected = [
            by_layer.loc[layer, "value"] if by_layer["n"].get(layer, 0) >= 10 else float("nan")
            for layer in range(4)
        ]
        assert drawn[label] == pytest.approx(expected, nan_ok=True)
    assert len(named(figure)) == 8
    assert_legible(figure)
    few = scores[(scores["event"] == "saturation") & (scores["n"] < 10)]
    assert len(few), "no layer has few events, so this proves less"


def test_saturation_is_stacked_to_all_predictions() -> None:
    table = saturation_frequency(some_trace())
    figure = saturation_figure(table.sample(frac=1, random_state=0))
    assert_legible(figure)
    (ax,) = figure.axes
    bars = {container.get_label(): container for container in ax.containers}
    for method in ("ffn", "attention"):
        heights = [bar.get_height() for bar in bars[f"by {method}"]]
        assert heights == pytest.approx(values(table, method=method))
    tops = [bar.get_y() + bar.get_height() for bar in bars["by attention"]]
    assert tops == pytest.approx(values(table, method="either"))
    assert sum(tops) == pytest.approx(1)
