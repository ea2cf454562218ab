"""Style of all figures: colors, lines and cells, axes, titles and legends.

Every method has its own color and line style in all figures, from the palette of Okabe and Ito for
color-blind readers, with two greys. `styled` makes a figure of a function that draws a table.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from matlens.errors import InputError, checked, short
from matlens.io.tables import check_one

LAYER = r"layer $\ell$"
SHEET = Path(__file__).with_name("matlens.mplstyle")
Place = Literal[
    "outside lower center", "outside lower left", "outside lower right", "outside right center"
]  # fmt: skip
_OF_ANY_MODEL = re.compile(  # names that checkpoints and converters give to every model's file
    r"(checkpoint|(ggml-)?model)([-_.]?(best|last|b?f\d+|q\d\w*|\d+))*\.(pt|gguf)", re.IGNORECASE
)
_ROW, _LETTER = 9.0, 3.6  # points between two rows about infinite values, and of a letter
_Parameters = ParamSpec("_Parameters")

# Colors

BLACK, DARK, GREY = "#000000", "#4d4d4d", "#a6a6a6"
ORANGE, SKY, GREEN = "#e69f00", "#56b4e9", "#009e73"
BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"

SOLID, DASHED, DOTTED = "-", "--", ":"
STYLES: tuple[Any, ...] = (SOLID, DASHED, DOTTED, "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 4)))
_FREE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, DARK)  # for methods without a fixed color
_MARKERS = "osD^v<>"
_WITHOUT_SINKS = re.compile(r"( without sinks|\+?sinks=exclude)$")


class Look(NamedTuple):
    """Color, line style, marker and fill of a method."""

    color: str
    line: Any = SOLID
    marker: str = "o"
    hollow: bool = False


MAT, ID = Look(BLUE), Look(VERMILLION, marker="s")
LOOKS = {
    # Linear maps and replacements of sub-modules
    "mat": MAT,
    "id": ID,
    "mat_attn": Look(GREEN, marker="^"),
    "mat_ffn": Look(ORANGE, marker="D"),
    "mat_ln1_ln2": Look(PURPLE, marker="v"),
    # Lenses
    "affine": Look(SKY, marker="^"),
    "ridge=loo+toward=identity": Look(SKY, DOTTED, "v"),
    "weighted": Look(PURPLE, marker="<"),
    "standardise": Look(GREEN, marker="D"),
    "standardise+intercept": Look(GREEN, DOTTED, "d"),
    "shared_map": Look(DARK, marker=">"),
    "scaled": Look(ORANGE, DOTTED, "P"),
    "polished": Look(BLACK),
    "tuned": Look(ORANGE, marker="D"),
    "jacobian": Look(PURPLE, DOTTED, "X"),
}
"""The looks of methods; analyses add those of theirs."""


def method_looks(methods: Iterable[str]) -> dict[str, Look]:
    """Look of each method of a figure: fixed for known methods, a free one for others."""
    names = list(dict.fromkeys(methods))
    looks = {name: look for name in names if (look := _own_look(name)) is not None}
    taken = {(look.color, look.line) for look in looks.values()}
    free = (
        Look(color, line, marker)
        for line, marker in itertools.cycle(zip(STYLES, _MARKERS, strict=True))
        for color in _FREE
        if (color, line) not in taken
    )
    return {name: looks[name] if name in looks else next(free) for name in names}


def _own_look(name: str) -> Look | None:
    if _WITHOUT_SINKS.search(name) and name not in LOOKS:
        look = LOOKS.get(_WITHOUT_SINKS.sub("", name) or "mat")
        return look and look._replace(line=DASHED, hollow=True)
    return LOOKS.get(re.sub(r", \d+ vectors$", "", name))


# Figures


def styled(draw: Callable[_Parameters, Figure]) -> Callable[_Parameters, Figure]:
    """Make a plot function check its arguments and use the style sheet."""

    @functools.wraps(draw)
    def draw_styled(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> Figure:
        for table in (*arguments, *options.values()):
            if isinstance(table, pd.DataFrame | Mapping) and not len(table):
                raise InputError(f"The table of {draw.__name__} must have rows, got none.")
        with style_sheet():
            figure = draw(*arguments, **options)
            for ax in figure.axes:  # ticks follow the settings of the moment when they are first asked for
                ax.xaxis.get_major_ticks()
                ax.yaxis.get_major_ticks()
        return figure

    return checked(draw_styled)


def style_sheet() -> AbstractContextManager[None]:
    """Context with matplotlib's settings of all figures."""
    return style.context(SHEET)


# Titles and other text


def short_name(name: str) -> str:
    """Name of a model or of a corpus without its folders or its organisation.

    Generic file names, such as ``checkpoint.pt``, are shown with their folder.
    """
    *folders, last = re.split(r"[/\\]", name.rstrip("/\\"))
    if folders and folders[-1] and _OF_ANY_MODEL.fullmatch(last):
        return f"{folders[-1]}/{last}"
    return last or name


def title_of(results: pd.DataFrame, *columns: str) -> str:
    """Title of a table of one model and corpus: these, or some columns, and the number of examples."""
    named = columns or ("model", "corpus")
    if not columns:  # a figure of several corpora names its columns
        check_one(results)
    parts = [short_name(str(results[column].iloc[0])) for column in named]
    if not columns:
        parts.append(examples_of(results))
    return literal(", ".join(parts))


def examples_of(results: pd.DataFrame) -> str:
    """How many examples the rows of a table have, the fewest and the most where these differ."""
    counts = sorted({int(results["n"].min()), int(results["n"].max())})
    return f"n = {' to '.join(f'{count:,}' for count in counts)}"


def literal(text: str, style: Literal["normal", "italic"] = "normal") -> str:
    """Escape text for matplotlib; glyphs that the font lacks become code points."""
    font = get_font(findfont(FontProperties(style=style)))
    characters = (c if font.get_char_index(ord(c)) or c == "\n" else f"\\u{ord(c):04x}" for c in text)
    return "".join(characters).replace("$", r"\$")


# Ticks and legends


def layer_ticks(last: int) -> list[int]:
    """Round layers, and always the last one."""
    ticks = [int(t) for t in MaxNLocator(nbins=7, integer=True).tick_values(0, last) if 0 <= t <= last]
    gap = np.diff(ticks).min() if len(ticks) > 1 else 1
    return [*(t for t in ticks if last - t >= gap / 2), last]


def layer_axis(ax: Axes, last: float, label: str = LAYER) -> None:
    """Label the horizontal axis and write its layers."""
    ax.set_xlabel(label)
    ax.set_xticks(layer_ticks(int(last)))


def percent_ticks(axis: Axis) -> None:
    """Format an axis of shares as percentages, with as few digits as possible."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))


def finish(
    figure: Figure,
    title: str,
    handles: Sequence[Any] | None = None,
    *,
    columns: int = 4,
    place: Place = "outside lower center",
) -> Figure:
    """Add the title, and a legend outside the panels."""
    figure.suptitle(title)
    named = figure.axes[0].get_legend_handles_labels()[0] if handles is None else handles
    figure.legend(handles=list(named), loc=place, ncols=columns)
    return figure


# Lines


def draw_line(ax: Axes, rows: pd.DataFrame, look: Look, label: str, x: str = "layer") -> None:
    """Draw values over layers or another column, with a band from low to high."""
    check_one(rows)
    rows = rows.astype({x: float, "value": float, "low": float, "high": float}).sort_values(x)
    ax.plot(
        rows[x], rows["value"], color=look.color, ls=look.line, marker=look.marker, label=label,
        mfc="white" if look.hollow else look.color,
    )  # fmt: skip
    ax.fill_between(rows[x], rows["low"], rows["high"], color=look.color, alpha=0.12, lw=0)


def draw_methods(ax: Axes, rows: pd.DataFrame, looks: Mapping[str, Look], x: str = "layer") -> None:
    """Draw a line over layers for each method."""
    check_unique(rows[rows["method"].isin(looks)], ["method", x])
    for method, look in looks.items():
        draw_line(ax, rows[rows["method"] == method], look, literal(method), x)


def of_metric(results: pd.DataFrame, metric: str, k: int | None = None) -> pd.DataFrame:
    """Rows of a metric, and of one ``k``."""
    return results[(results["metric"] == metric) & (results["k"].isna() if k is None else results["k"] == k)]


def line_key(label: str, color: str = DARK, **look: Any) -> Line2D:
    """The handle of a legend entry."""
    return Line2D([], [], color=color, label=label, **look)


def precision_axis(ax: Axes, label: str = "Precision@1") -> None:
    """Label and limit an axis of shares once all curves are there, so that they are seen whole."""
    ax.set_ylabel(label)
    ax.set_ylim(0, 1.02)
    percent_ticks(ax.yaxis)


def surprisal_axis(ax: Axes) -> None:
    """Label and limit a surprisal axis, and mark infinite values."""
    ax.set_ylabel("Surprisal (nats)")
    ax.set_ylim(bottom=0)
    mark_infinite(ax)


def mark_infinite(ax: Axes) -> None:
    """Mark infinite values above the top edge, one row per curve, with a label.

    Labels are next to the marks of their curve, or above them if space is short.
    """
    curves = [line for line in ax.get_lines() if np.isinf(np.asarray(line.get_ydata(), dtype=float)).any()]
    if not curves:
        return
    everywhere = np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in ax.get_lines()])
    margin = 0.05 * np.ptp(everywhere)  # autoscaling ignores places without finite values
    x_limits = (
        min(ax.get_xlim()[0], everywhere.min() - margin),
        max(ax.get_xlim()[1], everywhere.max() + margin),
    )
    y_limits = ax.get_ylim()
    figure, height = ax.figure, 6.0
    assert isinstance(figure, Figure)
    columns = getattr(ax.get_gridspec(), "ncols", 1)
    width = 0.85 * 72 * figure.get_figwidth() / columns  # points, about
    for line in curves:
        x, y = (np.asarray(data, dtype=float) for data in line.get_data())
        lost = np.sort(x[np.isinf(y)])
        marks = ax.get_xaxis_transform() + ScaledTranslation(0, height / 72, figure.dpi_scale_trans)
        ax.scatter(
            lost, np.ones(len(lost)), s=14, marker="^", edgecolor=line.get_color(), lw=0.7, transform=marks,
            facecolor=line.get_markerfacecolor(), clip_on=False,
        )  # fmt: skip
        words = f"infinite {_where_infinite(lost, x)}"
        start = (lost[-1] - x_limits[0]) / (x_limits[1] - x_limits[0])
        if start * width + len(words) * _LETTER > width:
            start, height = 0.0, height + _ROW
        place = ax.transAxes + ScaledTranslation(6 / 72, height / 72, figure.dpi_scale_trans)
        ax.text(start, 1, words, transform=place, fontsize=7, va="center", color=DARK)
        height += _ROW + 2
    ax.set_xlim(x_limits)
    ax.set_ylim(y_limits)
    if ax.get_title():
        ax.set_title(ax.get_title(), pad=height)


def _where_infinite(lost: np.ndarray, layers: np.ndarray) -> str:
    finite = np.setdiff1d(layers, lost)
    if not len(finite):
        return "at every layer"
    if lost[-1] < finite[0]:
        return f"before layer {finite[0]:g}"
    return f"at layer{'s' * (len(lost) > 1)} {', '.join(f'{layer:g}' for layer in lost)}"


def check_unique(rows: pd.DataFrame, places: Sequence[str]) -> None:
    """Raise InputError if a line or a heatmap would have several values at one place."""
    repeated = rows[rows.duplicated(list(places), keep=False)]
    if repeated.empty:
        return
    at = ", ".join(f"{name} {repeated[name].iloc[0]}" for name in places)
    others = repeated.columns.difference([*places, "value", "low", "high"], sort=False)
    differing = [name for name in others if repeated[name].nunique(dropna=False) > 1]
    raise InputError(
        f"The table must have one value at {at}, got several"
        f"{f' that differ in {short(differing)}' if differing else ''}. Select the rows to draw."
    )


# Cells


def cells_of(table: pd.DataFrame, index: str, columns: str, values: str) -> pd.DataFrame:
    """A matrix of a column of a table, with one row for each cell."""
    check_unique(table, [index, columns])
    return table.pivot(index=index, columns=columns, values=values)


def draw_cells(ax: Axes, grid: pd.DataFrame, **options: Any) -> Any:
    """Draw a matrix of values as an image."""
    image = ax.imshow(grid.to_numpy(float), **options)
    ax.grid(False)
    return image


def write_cells(ax: Axes, image: Any, texts: pd.DataFrame, **options: Any) -> None:
    """Write into each cell, in white on dark cells."""
    values = np.ma.getdata(image.get_array())
    for row, column in np.ndindex(values.shape):
        red, green, blue, _ = image.cmap(image.norm(values[row, column]))
        ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "black"
        ax.text(column, row, str(texts.iat[row, column]), ha="center", va="center", color=ink, **options)
