"""What all figures share: the style sheet, files, titles, ticks, legends, and text that is no formula."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, ParamSpec

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import FuncFormatter, MaxNLocator

from matlens.errors import InputError, checked
from matlens.io.files import write_files

LAYER = r"layer $\ell$"
SUFFIXES = (".png", ".pdf")
# What matplotlib writes of the time, by format: the same figure has the same bytes at any time.
_UNDATED: Mapping[str, dict[str, None]] = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
SHEET = Path(__file__).with_name("matlens.mplstyle")
Place = Literal[
    "outside lower center", "outside lower left", "outside lower right", "outside right center"
]  # fmt: skip
_OF_ANY_MODEL = re.compile(  # names that checkpoints and converters give to every model's file
    r"(checkpoint|(ggml-)?model)([-_.]?(best|last|b?f\d+|q\d\w*|\d+))*\.(pt|gguf)", re.IGNORECASE
)
_Parameters = ParamSpec("_Parameters")


def styled(draw: Callable[_Parameters, Figure]) -> Callable[_Parameters, Figure]:
    """Let a function with checked arguments draw by the style sheet, whatever the settings are."""

    @functools.wraps(draw)
    def drawn(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> Figure:
        for table in (*arguments, *options.values()):
            if isinstance(table, pd.DataFrame | Mapping) and not len(table):
                raise InputError(f"The table of {draw.__name__} must have rows, got none.")
        with style_sheet():
            figure = draw(*arguments, **options)
            for ax in figure.axes:  # ticks follow the settings of the moment when they are first asked for
                ax.xaxis.get_major_ticks()
                ax.yaxis.get_major_ticks()
        return figure

    return checked(drawn)


def style_sheet() -> AbstractContextManager[None]:
    """Context with matplotlib's settings of all figures."""
    return style.context(SHEET)


@checked
def save(figure: Figure, path: str | Path, *, title: str | None = None) -> list[Path]:
    """Write a figure to ``path``, or as ``path.png`` and ``path.pdf``, both or neither; return the paths.

    Parameters
    ----------
    path
        A name that ends in ``.png``, ``.pdf`` or ``.svg``, or one that the first two are appended to.
    title
        Replaces the title of the figure.
    """
    path = Path(path)
    paths = [path] if path.suffix in _UNDATED else [path.with_name(path.name + each) for each in SUFFIXES]
    drawn: dict[Path, bytes] = {}
    with style_sheet():
        if title is not None:
            figure.suptitle(literal(title))
        for each in paths:
            content = io.BytesIO()
            figure.savefig(content, format=each.suffix[1:], metadata=_UNDATED[each.suffix])
            drawn[each] = content.getvalue()
    write_files(drawn)
    return paths


# Titles and other text


def short_name(name: str) -> str:
    """Name of a model or of a corpus without its folders or its organisation.

    A file whose name says nothing of the model, such as ``checkpoint.pt``, is named with its folder.
    """
    *folders, last = re.split(r"[/\\]", name.rstrip("/\\"))
    if folders and folders[-1] and _OF_ANY_MODEL.fullmatch(last):
        return f"{folders[-1]}/{last}"
    return last or name


def title_of(results: pd.DataFrame, *columns: str) -> str:
    """Short names of the first row, by default of model and corpus, and how many examples the rows have."""
    parts = [short_name(str(results[column].iloc[0])) for column in columns or ("model", "corpus")]
    if not columns:
        parts.append(examples_of(results))
    return literal(", ".join(parts))


def examples_of(results: pd.DataFrame) -> str:
    """How many examples the rows of a table have, the fewest and the most where these differ."""
    counts = sorted({int(results["n"].min()), int(results["n"].max())})
    return f"n = {' to '.join(f'{count:,}' for count in counts)}"


def literal(text: str, style: Literal["normal", "italic"] = "normal") -> str:
    """Write text that is no formula; what the font cannot draw is shown by its code point."""
    font = get_font(findfont(FontProperties(style=style)))
    characters = (c if font.get_char_index(ord(c)) or c == "\n" else f"\\u{ord(c):04x}" for c in text)
    return "".join(characters).replace("$", r"\$")


# Ticks and legends


def layer_ticks(last: int) -> list[int]:
    """Round layers, and the last one whatever it is."""
    ticks = [int(t) for t in MaxNLocator(nbins=7, integer=True).tick_values(0, last) if 0 <= t <= last]
    gap = np.diff(ticks).min() if len(ticks) > 1 else 1
    return [*(t for t in ticks if last - t >= gap / 2), last]


def layer_axis(ax: Axes, last: float, label: str = LAYER) -> None:
    """Label the horizontal axis and write its layers."""
    ax.set_xlabel(label)
    ax.set_xticks(layer_ticks(int(last)))


def percent_ticks(axis: Axis) -> None:
    """Write the shares of an axis as percentages, with no more digits than they have."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))


def finish(
    figure: Figure,
    title: str,
    handles: Sequence[Any] | None = None,
    *,
    columns: int = 4,
    place: Place = "outside lower center",
) -> Figure:
    """Add the title, and a legend outside the panels, by default of all that the first panel labels."""
    figure.suptitle(title)
    named = figure.axes[0].get_legend_handles_labels()[0] if handles is None else handles
    figure.legend(handles=list(named), loc=place, ncols=columns)
    return figure
