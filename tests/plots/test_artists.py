"""Points, bars, cells and bands of a panel are the numbers of its rows: figures that are more than lines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
import torch
from exits.outcomes import EvaluatedExits, summarize_exits
from figures import paper_b
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plot_tables import assert_legible, named
from sub_updates.events import saturation_frequency, update_scores
from sub_updates.extremes import ACTIVITY_COLUMNS
from traces import make_trace

from matlens.ffn import Trace, event_scores

Panels = dict[int, list[float]]  # what a panel must show
Case = tuple[Figure, Panels, list[str]]  # and what the legend names


def shown(ax: Axes) -> np.ndarray:
    """All numbers of a panel's artists."""

    def numbers() -> Iterator[np.ndarray]:
        for line in ax.lines:
            yield line.get_xydata()
        for bar in ax.patches:
            yield np.array([bar.get_height(), bar.get_y() + bar.get_height()])
        for each in ax.collections:
            yield np.asarray(each.get_offsets())
            yield from (path.vertices for path in each.get_paths())

    return np.concatenate([np.asarray(part, float).ravel() for part in numbers()])


def some_trace(n: int = 60) -> Trace:
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.randint(2, (n, 4), generator=generator) for _ in range(2))
    return make_trace(before, after, 3 * (before != after).long())


def control() -> Case:
    rows = []
    runs = [("unchanged", None, 0.5, 20.0), ("SD", None, 0.2, 24.0), ("filter", None, 0.4, None)]
    runs += [("words", value, 0.45 - value / 20, 20 + value) for value in (3.0, 1.0, 6.0)]
    for method, value, toxic, perplexity in runs:
        row = {"model": "gpt2", "corpus": "prompts.txt", "method": method, "coefficient": value, "n": 117}
        rows.append(row | {"metric": "toxic", "value": toxic, "low": toxic / 2, "high": toxic + 0.1})
        rows.append(row | {"metric": "score", "value": 0.9, "low": 0.8, "high": 1.0})
        if perplexity:
            row |= {"corpus": "news", "metric": "perplexity", "low": 1.0, "high": 90.0}
            rows.append(row | {"value": perplexity})
    table = pd.DataFrame(rows)
    toxic = table[table["metric"] == "toxic"]
    with_perplexity = toxic[toxic["method"] != "filter"]
    numbers = [*toxic["value"], *with_perplexity["low"], *with_perplexity["high"], 20, 24, 21, 23, 26]
    figure = paper_b.toxicity_against_perplexity(table)
    assert {text.get_text() for text in figure.axes[0].texts} == {"1", "3", "6"}
    return figure, {0: numbers}, ["unchanged", "SD", "filter", "words"]


def exits() -> Case:
    evaluated = {
        f"way {i}": [
            EvaluatedExits(0.9 - i / 20 + seed / 50, i + seed, 0.5, 0.4 - i / 30, 0.1) for seed in range(3)
        ]
        for i in range(10)
    }
    table = summarize_exits(evaluated, 12).assign(model="gpt2", corpus="words", n=2000)
    ends = [table["accuracy"] - table["accuracy_sd"], table["saved"] + table["saved_sd"]]
    numbers = np.concatenate([table["saved"], table["accuracy"], table["chance"], *ends]).tolist()
    return paper_b.exits_figure(table), {0: numbers}, [*evaluated, "random assignment"]


def extremes() -> Case:
    rows = []
    for read, (name, n) in itertools.product(("score", "lift"), (("extreme", 12), ("sampled", 30))):
        for i in range(n):
            common = 0.5 - i / 60 if read == "score" else i / n
            first = (40 + i, 1 - 2 * (i % 2), "other", 4, 0.5, n - i, (n - i) / 100, i % 3 / 2, 0.0, 0.1)
            rows.append((*first, i % 8, 0, 7, common, 0.25, "L0D0", "␣a$b, \uf8ff, third", name, read))
    table = pd.DataFrame(rows, columns=[*ACTIVITY_COLUMNS, "sub_updates", "read"])
    table = table.assign(model="gpt2", corpus="words")
    figure = paper_b.extremes_figure(table, 2000)
    panels = {}
    for panel, read in enumerate(("score", "lift")):
        part = table[table["read"] == read]
        panels[panel] = [*part["layer"], *(part["common"] - part["unseen"])]
        (dots,) = (dots for dots in figure.axes[panel].collections if len(dots.get_offsets()) == 12)
        assert np.allclose(dots.get_sizes() - 4, 1400 * part.head(12)["share"])
        colors = [tuple(color) for color in dots.get_facecolors()]
        assert [color == colors[1] for color in colors] == (part.head(12)["raised"] >= 0.5).tolist()
    return figure, panels, list(paper_b._EXTREME.values())


def events() -> Case:
    trace = some_trace()
    chosen = {"all examples": None, "some": torch.arange(len(trace)) % 3 > 0}
    doubled = {"score": None, "lift": {key: 2 * scores for key, scores in trace.score.items()}}
    parts = [
        event_scores(trace, scores=doubled[read], rows=rows).assign(examples=examples, read=read)
        for (examples, rows), read in itertools.product(chosen.items(), doubled)
    ]
    figure = paper_b.events_figure(pd.concat(parts))
    panels = {i: [*part["value"], *part["low"], *part["high"]] for i, part in enumerate(parts)}
    return figure, panels, ["max", "mean", "min"]


def layers() -> Case:
    trace = some_trace()
    rows = torch.arange(len(trace)) % 3 > 0
    parts = [update_scores(trace), update_scores(trace, rows=rows)]
    named_parts = [part.assign(examples=str(i), read="score") for i, part in enumerate(parts)]
    figure, panels = paper_b.layers_figure(pd.concat(named_parts)), dict[int, list[float]]()
    for i, part in enumerate(parts):
        part = part[(part["event"] == "update") & ~part["metric"].str.endswith("p50")]
        of_dominant = part["method"] == "dominant"
        panels[i] = part[of_dominant | part["metric"].isin(["max", "min"])]["value"].tolist()
    last = parts[1][(parts[1]["method"] == "dominant") & (parts[1]["metric"] == "max")]
    last = last[last["event"].isin(["saturation", "stays", "falls"])]
    assert (last["n"] < 10).any(), "no layer has few events, so this proves less"
    few = last[last["n"] < 10]["value"]
    assert not np.isin(few.round(6), shown(figure.axes[2]).round(6)).any()
    panels[2] = last[last["n"] >= 10]["value"].tolist()
    return figure, panels, named(figure)


def saturation() -> Case:
    table = saturation_frequency(some_trace())
    figure = paper_b.saturation_figure(table.sample(frac=1, random_state=0))
    return figure, {0: table["value"].tolist()}, ["by ffn", "by attention"]


@pytest.mark.parametrize("make", [control, exits, extremes, events, layers, saturation])
def test_panels_show_the_numbers_of_their_rows(make):
    figure, panels, legend = make()
    assert named(figure) == legend
    assert_legible(figure)
    assert len(figure.axes) == len(panels)
    for panel, expected in panels.items():
        assert len(expected) > 3
        drawn = shown(figure.axes[panel])
        missing = [x for x in expected if not np.isclose(drawn, x, rtol=1e-6, atol=1e-9).any()]
        assert not missing, f"panel {panel} does not show {missing}"
