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

from matlens.errors import InputError, NonNegativeInt, checked, short
from matlens.io.files import system_errors, write_together

LAYER = r"layer $\ell$"
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
def save(figure: Figure, folder: str | Path, name: str, *, title: str | None = None) -> list[Path]:
    """Write a figure as ``name.png`` and ``name.pdf``, both whole or neither; returns both paths.

    Parameters
    ----------
    title
        Replaces the title of the figure.
    """
    if not name or Path(name).name != name:
        raise InputError(f"The name of the figure is {short(name)}. Expected the name of a file.")
    drawn: dict[Path, bytes] = {}
    with system_errors(folder), style_sheet():
        if title is not None:
            figure.suptitle(literal(title))
        for suffix in ("png", "pdf"):
            content = io.BytesIO()
            # The same figure has the same bytes at any time.
            figure.savefig(content, format=suffix, metadata={"CreationDate": None} if suffix == "pdf" else {})
            drawn[Path(folder) / f"{name}.{suffix}"] = content.getvalue()
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_together(drawn)
    return list(drawn)


@checked
def save_as(figure: Figure, path: str | Path) -> Path:
    """Write a figure as one file whose name ends in ``.png`` or ``.pdf``; returns the path."""
    path = Path(path)
    check_figure_name(path)
    content = io.BytesIO()
    with system_errors(path), style_sheet():
        figure.savefig(content, format=path.suffix[1:])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_together({path: content.getvalue()})
    return path


def check_figure_name(path: Path) -> None:
    """Refuse a name that ends in neither ``.png`` nor ``.pdf``."""
    if path.suffix not in (".png", ".pdf"):
        raise InputError(f"The name of a figure must end in .png or .pdf, got {short(str(path))}.")


# Titles and other text


def short_name(name: str) -> str:
    """Name of a model or of a corpus without its folders or its organisation.

    A file whose name says nothing of the model, such as ``checkpoint.pt``, is named with its folder.
    """
    *folders, last = re.split(r"[/\\]", name.rstrip("/\\"))
    if folders and folders[-1] and _OF_ANY_MODEL.fullmatch(last):
        return f"{folders[-1]}/{last}"
    return last or name


@checked
def model_title(model: str, corpus: str | None = None, n: int | tuple[int, int] | None = None) -> str:
    """Title of a figure: the model by its short name, the corpus, and how many examples."""
    parts = [short_name(name) for name in (model, corpus) if name is not None]
    if n is not None:
        parts.append(f"n = {' to '.join(f'{count:,}' for count in ((n,) if isinstance(n, int) else n))}")
    return literal(", ".join(parts))


def title_of(results: pd.DataFrame) -> str:
    """Title that a table of results tells: its model, its corpus, and the examples of its rows."""
    first = results.iloc[0]
    return model_title(first["model"], first["corpus"], examples_of(results))


def examples_of(results: pd.DataFrame) -> int | tuple[int, int]:
    """How many examples the rows of a table have, the fewest and the most where these differ."""
    fewest, most = int(results["n"].min()), int(results["n"].max())
    return most if fewest == most else (fewest, most)


@checked
def literal(text: str, style: Literal["normal", "italic"] = "normal") -> str:
    """Write text that is no formula; what the font cannot draw is shown by its code point."""
    font = get_font(findfont(FontProperties(style=style)))
    characters = (c if font.get_char_index(ord(c)) or c == "\n" else f"\\u{ord(c):04x}" for c in text)
    return "".join(characters).replace("$", r"\$")


# Ticks and legends


@checked
def layer_ticks(last: NonNegativeInt) -> list[int]:
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
