"""Every figure of lines shows its table: the right values at the right places, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import pandas as pd
import pytest
from figures import paper_a, paper_b
from figures.beyond import plot_cosines
from matplotlib.figure import Figure
from plot_tables import (
    METHODS,
    across_table,
    alternation_table,
    assert_curve,
    assert_legible,
    early_table,
    fitting_table,
    lens_table,
    methods_table,
    named,
    prediction_table,
    removal_table,
    result,
    several_models,
    shares_table,
)

from matlens import plots

TITLE = "model, some-corpus, n = 1,234"
FITTED, REPLACED = ("all", "not-first", "not-sink"), ("all", "not-first", "not-sink", "predicted")
Curves = dict[tuple[int, str], pd.DataFrame]  # by panel and label


class Case(NamedTuple):
    """A figure, its table, its title, what its legend names, and its curves."""

    draw: Callable[[pd.DataFrame], Figure]
    table: pd.DataFrame
    title: str
    legend: list[str]
    curves: Curves


def halved(table: pd.DataFrame) -> pd.DataFrame:
    """Shares, their bounds too, that are no more than one."""
    return table.assign(**{column: table[column] / 2 for column in ("value", "low", "high")})


def both(table: pd.DataFrame, labels: Mapping[str, str], panels: tuple[int, int] = (0, 1)) -> Curves:
    """Precision@1 and surprisal of some methods."""
    curves = {}
    for method, label in labels.items():
        rows = table[table["method"] == method]
        curves[panels[0], label] = rows[rows["k"] == 1]
        curves[panels[1], label] = rows[rows["metric"] == "surprisal"]
    return curves


def prediction(last: int) -> Case:
    table = halved(prediction_table(last))
    curves = {(1, m): table[(table["method"] == m) & (table["metric"] == "surprisal")] for m in METHODS}
    for method, k in itertools.product(METHODS, (1, 5, 10)):
        curves[0, f"{method}, k = {k}"] = table[(table["method"] == method) & (table["k"] == k)]
    return Case(plots.plot_layers, table, TITLE, ["mat", "id", "k = 1", "k = 5", "k = 10"], curves)


def relative_depth() -> Case:
    table = halved(several_models())
    at_depth = table.assign(layer=table["layer"] / table["target"])
    names = {"org/small": "small", "/some/folder/large_one": "large_one", "other": "other"}
    curves: Curves = {}
    for model, name in names.items():
        curves |= both(at_depth[at_depth["model"] == model], {m: f"{m}, {name}" for m in METHODS})
    legend = [label for panel, label in curves if panel == 0]
    return Case(paper_a.relative_depth, table, "some-corpus, n = 1,234", legend, curves)


def across_corpora() -> Case:
    """One corpus has a name that is part of the other's, and one is a path."""
    corpora = {"news": "news", "folder/news-2020": "news-2020"}
    table = across_table(*corpora)
    curves = {}
    for (panel, tested), (fitted, name) in itertools.product(enumerate(corpora), corpora.items()):
        rows = table[(table["corpus"] == tested) & (table["method"] == f"mat of {fitted}")]
        curves[panel, f"mat of {name}"] = rows[rows["k"] == 1]
    legend = ["mat of news", "mat of news-2020", "tested on their own corpus", "on another"]
    return Case(paper_a.across_corpora, table, "model, n = 1,234", legend, curves)


def alternation() -> Case:
    table = alternation_table()
    labels = {"R2": "R2", "mat": "mat, fixed exit", "id": "id, fixed exit"}
    labels |= {name: name for name in ("WRR, blocks first", "WRR, mat first")}
    curves = {
        (0, label): table[(table["method"] == name) & (table["k"] == 1)] for name, label in labels.items()
    }
    legend = [labels[name] for name in ("WRR, blocks first", "WRR, mat first", "R2", "mat", "id")]
    return Case(paper_a.alternation, table, TITLE, legend, curves)


def by_method(count: int) -> Case:
    names = [f"mat_{i}" for i in range(count)]
    table = halved(methods_table(names))
    return Case(paper_a.by_method, table, TITLE, names, both(table, {name: name for name in names}))


def by_fitting() -> Case:
    table = fitting_table()
    wheres = ["replaced at all tokens", "at all but the first", "at all but sinks"]
    wheres.append("only at the predicted token")
    curves: Curves = {}
    for column, fitted in enumerate(FITTED):
        labels = {f"mat_ffn, fit {fitted}, replace {r}": w for r, w in zip(REPLACED, wheres, strict=True)}
        curves |= both(table, {"mat": "mat"} | labels, (column, column + 3))
    return Case(paper_a.by_fitting, table, f"mat_ffn: {TITLE}", ["mat", *wheres], curves)


def early_exit() -> Case:
    table = early_table()
    curves = {}
    for method in METHODS:
        rows = table[table["method"] == method]
        curves[0, f"{method}, early exit"] = rows[rows["lam"].notna()]
        curves[0, f"{method}, fixed exit"] = rows[rows["lam"].isna()]
    return Case(paper_a.early_exit, table, TITLE, [label for _, label in curves], curves)


def lens_measures(last: int, *methods: str) -> Case:
    table = lens_table(last, methods)
    curves = {}
    places = ((0, "precision", 1), (1, "precision", 10), (3, "surprisal", None), (4, "kl", None))
    for (panel, metric, k), method in itertools.product(places, methods):
        rows = table[(table["metric"] == metric) & (table["method"] == method)]
        curves[panel, method] = rows if k is None else rows[rows["k"] == k]
    return Case(plots.plot_report, table, TITLE, list(methods), curves)


def of_one_panel(draw: Callable[[pd.DataFrame], Figure], table: pd.DataFrame, title: str, label: str) -> Case:
    curves = {
        (0, label.format(method=method, n=rows["n"].iloc[0])): rows
        for method, rows in table.groupby("method", sort=False)
    }
    return Case(draw, table, title, [name for _, name in curves], curves)


def lens_cosines() -> Case:
    table = halved(methods_table(["mat and tuned", "two halves"]))
    return of_one_panel(plot_cosines, table[table["k"] == 1], "model, some-corpus", "{method}")


def shares(corpus: str, title: str) -> Case:
    draw = partial(paper_b.shares_by_layer, label="overlap")
    return of_one_panel(draw, shares_table(corpus), title, "{method}, n = {n}")


def removal() -> Case:
    table = removal_table()
    methods = list(table["method"].unique())
    places = itertools.product(("correlation", "common"), ("at the layer", "at the end"))
    curves = {}
    for (panel, (metric, effect)), method in itertools.product(enumerate(places), methods):
        rows = table[(table["metric"] == metric) & (table["effect"] == effect) & (table["method"] == method)]
        curves[panel, method] = rows.dropna(subset="layer")
    return Case(paper_b.removal_figure, table, "model, some-corpus", methods, curves)


def attention_heads() -> Case:
    rows = [
        result("linear", layer, 3, "r2", pd.NA, layer / 5 - head / 10, 0.1) | {"head": head, "share": None}
        for layer, head in itertools.product(range(3), range(4))
    ]
    rows += [
        result(name, 0, 3, "precision", 1, 0.9 - share / 2 - i / 10, 0.02) | {"head": None, "share": share}
        for (i, name), share in itertools.product(enumerate(("linear", "mean", "nothing")), (0.1, 0.5, 1.0))
    ]
    table = pd.DataFrame(rows)
    together = table[table["share"].notna()]
    together = together.assign(layer=together["share"].astype(float))
    curves = {(1, str(name)): part for name, part in together.groupby("method", sort=False)}
    return Case(paper_a.attention_heads, table, TITLE, ["linear", "mean", "nothing"], curves)


CASES: dict[str, Callable[[], Case]] = {
    **{f"prediction of {last} layers": lambda last=last: prediction(last) for last in (3, 30)},
    "relative depth": relative_depth,
    "across corpora": across_corpora,
    "alternation": alternation,
    **{f"{count} methods": lambda count=count: by_method(count) for count in (4, 12)},
    "by fitting": by_fitting,
    "early exit": early_exit,
    "lenses": lambda: lens_measures(12, "id", "mat", "polished", "tuned", "rank=64", "jacobian"),
    "cosines": lens_cosines,
    "shares of a corpus": lambda: shares("words", "gpt2, words"),
    "removal": removal,
    "heads": attention_heads,
}


@pytest.mark.parametrize("name", CASES)
def test_a_figure_shows_its_table(name):
    draw, table, title, legend, curves = CASES[name]()
    before = table.copy()
    figure = draw(table)
    pd.testing.assert_frame_equal(table, before)
    assert figure.get_suptitle() == title
    assert named(figure) == legend
    assert_legible(figure)
    colors: dict[str, str] = {}
    for panel, ax in enumerate(figure.axes):
        labels = [label for place, label in curves if place == panel]
        shown = [str(line.get_label()) for line in ax.lines if str(line.get_label())[0] != "_"]
        assert sorted(shown) == sorted(labels)
        lines = [assert_curve(ax, label, curves[panel, label]) for label in labels]
        looks = {(line.get_color(), str(line.get_linestyle()), line.get_marker()) for line in lines}
        assert len(looks) == len(lines)
        for label, line in zip(labels, lines, strict=True):
            assert max(line.get_ydata()) <= ax.get_ylim()[1], "a curve leaves the figure"
            assert line.get_color() == colors.setdefault(label, line.get_color())
