"""Artists of every figure hold the values of its table, at the right places, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from exits.outcomes import EvaluatedExits, summarize_exits
from figures import paper_a, paper_b
from figures.beyond import plot_cosines
from figures.paper_a import token_table, transfer_heatmaps
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.cbook import is_math_text
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
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
from sub_updates.events import saturation_frequency, update_scores
from sub_updates.extremes import ACTIVITY_COLUMNS
from traces import make_trace

from matlens import drawing, plots
from matlens.drawing import literal
from matlens.ffn import Trace, event_scores
from matlens.io.tables import COLUMNS
from matlens.linearity import rank_correlations
from matlens.plots import plot_atlas, plot_layers, plot_r2, plot_report, plot_trajectory, save

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


Panels = dict[int, list[float]]  # what a panel must show
Drawn = tuple[Figure, Panels, list[str]]  # and what the legend names


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


def control() -> Drawn:
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


def exits() -> Drawn:
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


def extremes() -> Drawn:
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


def events() -> Drawn:
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


def layers() -> Drawn:
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


def saturation() -> Drawn:
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


def test_r2_has_the_source_across_and_the_target_up_on_one_color_scale():
    last, nan = 5, float("nan")
    rows = [
        result(method, a, b, "r2", pd.NA, (1 if method == "mat" else -0.5) * (a / last - b / (3 * last)), nan)
        for method, a, b in itertools.product(METHODS, range(last), range(1, last + 1))
        if a < b
    ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    figure = plot_r2(table)
    *panels, bar = figure.axes
    for ax, method in zip(panels, METHODS, strict=True):
        (image,) = ax.images
        assert image.get_clim() == bar.get_ylim() == (-1, 1)
        assert list(image.get_extent()) == [-0.5, last + 0.5, -0.5, last + 0.5]
        assert image.origin == "lower"
        assert not ax.yaxis_inverted()
        expected = np.full((last + 1, last + 1), np.nan)
        for _, row in table[table["method"] == method].iterrows():
            expected[row["target"], row["layer"]] = row["value"]
        np.testing.assert_allclose(np.ma.filled(image.get_array(), np.nan), expected, rtol=1e-6)
    assert_legible(figure)
    assert figure.get_suptitle() == "model, some-corpus, n = 1,234"


def trajectory_table(tokens: int = 4, layers: tuple[int, ...] = (0, 2, 3)) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    rows = [
        (i, f" t{i}", layer, f" p{layer}{i}", generator.uniform(), generator.uniform(0, 5),
         0.0 if layer == 3 else generator.uniform(0, 9), int(generator.integers(0, 50)))
        for i in range(tokens) for layer in layers
    ]  # fmt: skip
    names = ["position", "token", "layer", "predicted", "probability", "entropy", "kl", "rank"]
    return pd.DataFrame(rows, columns=names).sample(frac=1, random_state=1)


@pytest.mark.parametrize("color", ["probability", "kl", "rank", "entropy"])
def test_every_cell_of_a_trajectory_is_that_of_its_token_and_layer(color):
    table = trajectory_table()
    figure = plot_trajectory(table, color=color, title="mat: a $prompt$")
    ax = figure.axes[0]
    shown = np.asarray(ax.images[0].get_array())
    texts = {(round(t.get_position()[0]), round(t.get_position()[1])): t.get_text() for t in ax.texts}
    for row in table.to_dict("records"):
        line = (0, 2, 3).index(row["layer"])
        assert shown[line, row["position"]] == pytest.approx(row[color])
        assert texts[row["position"], line] == literal(f"␣{row['predicted'].strip()}")
    assert len(texts) == 12
    assert [label.get_text() for label in ax.get_yticklabels()][-1] == "3"
    assert ax.get_xticklabels()[2].get_text().endswith("t2")
    assert figure.get_suptitle() == r"mat: a \$prompt\$"


def test_the_atlas_has_a_cell_for_each_part_and_a_point_for_each_score(tmp_path):
    generator, rows = np.random.default_rng(0), []
    kinds, modes = ("ln1", "attn", "ffn", "block"), ("all", "no sinks")
    for kind, layer, tokens in itertools.product(kinds, range(7), modes):
        for method, metric in (
            ("map", "loss increase"), ("map", "r2 of the variance"), ("map", "nbl bound"),
            ("removed", "loss increase"),
        ):  # fmt: skip
            if method == "map" or tokens == "all":
                row = result(method, layer, layer + 1, metric, pd.NA, float(generator.exponential()), 0.1)
                rows.append(row | {"kind": kind, "tokens": tokens, "parts": ""})
    table = pd.DataFrame(rows)
    figure = plot_atlas(table, rank_correlations(table, resamples=9))
    maps = [ax for ax in figure.axes if ax.images]
    rises = table[table["metric"] == "loss increase"].set_index(["method", "tokens", "kind", "layer"])[
        "value"
    ]
    rises = rises.sort_index()
    ways = [("map", "all"), ("map", "no sinks"), ("removed", "all")]
    for ax, (method, tokens) in zip(maps, ways, strict=True):
        cells = np.asarray(ax.images[0].get_array())
        for row, kind in enumerate(kinds):
            assert cells[row].tolist() == rises[method, tokens, kind].tolist()
    scatter = next(ax for ax in figure.axes if "variance" in ax.get_xlabel())
    scores = table[(table["metric"] == "r2 of the variance") & (table["tokens"] == "no sinks")]
    (line,) = (line for line in scatter.lines if line.get_label() == "ffn")
    assert sorted(line.get_xdata()) == sorted(scores[scores["kind"] == "ffn"]["value"])
    save(figure, tmp_path / "linearity")


def test_matrices_have_a_row_for_each_corpus_fitted_on_and_a_column_for_each_evaluated_on():
    corpora, metrics = ("news", "folder/wiki", "messages"), ("r2", "precision", "surprisal")
    value = {
        (metric, fitted, tested): 10 * i + 3 * j + k
        for k, metric in enumerate(metrics)
        for i, fitted in enumerate(corpora)
        for j, tested in enumerate(corpora)
    }
    rows = [
        result(f"mat of {fitted}", pd.NA, 3, metric, 1 if metric == "precision" else pd.NA, number, 0.0)
        | {"corpus": tested}
        for (metric, fitted, tested), number in value.items()
    ]
    rows += [row | {"k": 5, "value": 99.0} for row in rows if row["metric"] == "precision"]
    figure = transfer_heatmaps(pd.DataFrame(rows))
    assert [ax.get_title() for ax in figure.axes] == ["$r^2$", "Precision@1", "surprisal (nats)"]
    for ax, metric in zip(figure.axes, metrics, strict=True):
        shown = ax.images[0].get_array()
        for (i, fitted), (j, tested) in itertools.product(enumerate(corpora), enumerate(corpora)):
            assert shown[i, j] == value[metric, fitted, tested]
        assert [text.get_text() for text in ax.texts][:2] == [f"{float(shown[0, j]):.2f}" for j in (0, 1)]
        assert [tick.get_text() for tick in ax.get_xticklabels()] == ["news", "wiki", "messages"]
    assert_legible(figure)


def read_cell(cell: Any) -> str:
    """What a cell shows: nothing of it is read as a formula, and dollars are escaped for that."""
    text = cell.get_text().get_text()
    assert not is_math_text(text)
    return text.replace(r"\$", "$")


def test_a_token_table_shows_whatever_the_tokens_are(tmp_path):
    odd = ["日本", "🙂", "ﷺ", "\u200b", "\x00", "�"]
    tables = {
        "a $5 [MASK] and $6": pd.DataFrame(
            {"id_0": ["$x$", "_y_"], "mat_0": ["a^b", "␣c"], "id_3": ["\\alpha", "%"]}
        ),
        "an_other": pd.DataFrame({"id_0": ["{", "}"], "mat_0": ["$", "$$"], "id_3": ["&", "#"]}),
    }
    figure = token_table(tables)
    figure.draw_without_rendering()
    for ax, (prompt, table) in zip(figure.axes, tables.items(), strict=True):
        title = ax.get_title(loc="left")
        assert not is_math_text(title)
        assert title.replace(r"\$", "$") == f"Input: {prompt}"
        (drawn,) = ax.tables
        cells = {place: read_cell(cell) for place, cell in drawn.get_celld().items()}
        shown = [[cells[row, column] for column in range(3)] for row in range(3)]
        assert shown == [list(table.columns), *table.to_numpy().tolist()]
    paths = save(token_table({"".join(odd): pd.DataFrame({"id_0": odd, "mat_0": odd})}), tmp_path / "tokens")
    assert all(path.stat().st_size > 2_000 for path in paths)


def marks(ax: Axes) -> list[PathCollection]:
    return [dots for dots in ax.collections if isinstance(dots, PathCollection)]


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([0, 1], "infinite before layer 2"), ([2], "infinite at layer 2"),
        ([0, 3], "infinite at layers 0, 3"), ([0, 1, 2, 3, 4], "infinite at every layer"),
    ],
)  # fmt: skip
def test_infinite_values_are_marked_above_the_top_edge_and_named(lost, words):
    table = methods_table(["mat_ffn", "id", "mat_ln1_ln2"])
    rows = (table["metric"] == "surprisal") & table["layer"].isin(lost) & (table["method"] != "id")
    table.loc[rows, ["value", "low", "high"]] = float("inf"), float("nan"), float("nan")
    left, right = paper_a.by_method(table).axes
    assert_legible(right.figure)
    assert marks(left) == []
    assert [text.get_text() for text in right.texts] == [words, words]
    assert right.get_ylim()[0] == 0
    assert np.isfinite(right.get_ylim()[1])
    curves = [line for line in right.lines if line.get_label() != "id"]
    heights = set()
    for row, line in zip(marks(right), curves, strict=True):
        assert row.get_offsets()[:, 0].tolist() == lost
        assert np.isinf(line.get_ydata()).sum() == len(lost)
        assert tuple(row.get_edgecolor()[0][:3]) == to_rgb(line.get_color())
        places = row.get_offset_transform().transform(row.get_offsets())
        inside = right.transData.transform([[layer, 0] for layer in lost])
        np.testing.assert_allclose(places[:, 0], inside[:, 0])
        assert (places[:, 1] > right.get_window_extent().y1).all()
        heights.add(round(places[0, 1], 3))
    assert len(heights) == 2


@pytest.mark.parametrize("methods", [("mat",), ("id", "mat", "polished", "tuned")])
def test_lenses_have_a_bar_of_seconds_and_a_logarithmic_axis_of_kl(methods):
    _, _, costs, surprisal, kl = plot_report(lens_table(12, methods)).axes
    assert (surprisal.get_yscale(), kl.get_yscale()) == ("linear", "log")
    labels = [tick.get_text() for tick in kl.get_yticklabels()]
    assert {"1", "2", "5", "10", "20"} <= set(labels)
    assert not any(is_math_text(label) or "e" in label for label in labels)
    assert [bar.get_width() for bar in costs.patches] == pytest.approx(
        [23.4 * i for i in range(len(methods))]
    )
    assert [tick.get_text() for tick in costs.get_yticklabels()] == list(methods)


def test_titles_name_the_model_the_corpus_and_how_many_examples():
    table = prediction_table(3)
    assert drawing.title_of(table.assign(model="a/$gpt$"), "model") == r"\$gpt\$"
    assert drawing.title_of(table) == "model, some-corpus, n = 1,234"
    table.loc[0, "n"] = 5
    assert drawing.title_of(table) == "model, some-corpus, n = 5 to 1,234"
    axis = Figure().subplots().yaxis
    drawing.percent_ticks(axis)
    shares = (0, 0.07, 0.005, 0.0001, 1)
    assert [axis.get_major_formatter()(share) for share in shares] == ["0%", "7%", "0.5%", "0.01%", "100%"]


@given(st.integers(1, 100))
def test_the_last_layer_is_one_of_the_ticks(last):
    ticks = drawing.layer_ticks(last)
    assert (ticks[0], ticks[-1]) == (0, last)
    gaps = np.diff(ticks)
    assert (gaps > 0).all()
    assert len(ticks) <= 10
    # Round layers are evenly spaced, and the last does not touch the one before it.
    assert len(set(gaps[:-1])) <= 1
    assert len(gaps) == 1 or gaps[-1] >= gaps[0] / 2


# Files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_figure_is_written_as_png_and_pdf_or_by_its_suffix(tmp_path):
    folder, figure = tmp_path / "new" / "folder", plot_layers(prediction_table(3))
    paths = save(figure, folder / "smollm2.135m")
    assert paths == [folder / "smollm2.135m.png", folder / "smollm2.135m.pdf"]
    written = contents(folder)
    assert written["smollm2.135m.png"].startswith(b"\x89PNG\r\n")
    assert written["smollm2.135m.pdf"].startswith(b"%PDF-")
    assert save(figure, folder / "smollm2.135m") == paths  # the same figure has the same bytes
    assert contents(folder) == written
    (drawn,) = save(figure, folder / "a.svg")
    assert drawn.read_bytes().startswith(b"<?xml")
