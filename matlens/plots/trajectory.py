"""What a lens reads at every token and layer of a prompt: a cell for each, with the token predicted."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from matlens.arguments import require_choice
from matlens.errors import InputError
from matlens.models.vocabulary import visible
from matlens.plots.style import layer_ticks, literal, styled
from matlens.signatures import checked

_MOST = 60  # tokens side by side; more cannot be read
_LONGEST = 9  # characters of a token in a cell


class _Look(NamedTuple):
    """How a quantity is coloured: the map, its words, and whether small numbers are the dark ones."""

    colours: str
    words: str


_LOOKS = {
    "probability": _Look("Blues", "probability of the token"),
    "kl": _Look("Blues_r", "KL from the model's own distribution (nats)"),
    "rank": _Look("Blues_r", "rank of the model's own prediction"),
    "entropy": _Look("Blues_r", "entropy (nats)"),
}


@checked
@styled
def trajectory_figure(
    table: pd.DataFrame, *, colour: str = "probability", title: str | None = None
) -> Figure:
    """A cell for each token of a prompt and each layer, with the token predicted there.

    Dark is sure: probable, near to the model's own distribution, of low rank or entropy.

    Parameters
    ----------
    table
        What `Trajectory.to_dataframe` gives, or rows of some positions or layers of it.
    colour
        What colours the cells: ``"probability"``, ``"kl"``, ``"rank"`` or ``"entropy"``.
    title
        Title of the figure.

    Raises
    ------
    InputError
        It is no such table, or has more tokens than can be read side by side.
    """
    require_choice(colour, _LOOKS, "colour")
    grid = table.pivot(index="layer", columns="position", values=colour)
    words = table.pivot(index="layer", columns="position", values="predicted").reindex_like(grid)
    if grid.shape[1] > _MOST:
        raise InputError(
            f"The prompt has {grid.shape[1]} tokens, more than the {_MOST} that can be read side by side. "
            "Expected rows of fewer, such as table[table['position'] >= 40]."
        )
    tokens = table.drop_duplicates("position").set_index("position")["token"].reindex(grid.columns)
    layers, n = list(grid.index), grid.shape[1]
    figure = Figure(figsize=(max(3.2, 0.62 * n + 1.9), 0.19 * len(layers) + 1.5))
    ax = figure.subplots()
    values = grid.to_numpy(dtype=float)
    norm = _norm(colour, values)
    shown = values + 1 if colour == "rank" else values
    image = ax.imshow(shown, origin="lower", aspect="auto", cmap=_LOOKS[colour].colours, norm=norm)
    ax.grid(False)
    for row, column in np.ndindex(values.shape):
        red, green, blue, _ = image.cmap(image.norm(shown[row, column]))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        text = literal(_short(str(words.iat[row, column])))
        ax.text(column, row, text, ha="center", va="center", fontsize=6, color="white" if dark else "black")
    ax.set_xticks(range(n), [literal(_short(str(token))) for token in tokens], rotation=45, ha="right")
    ticks = [tick for tick in layer_ticks(layers[-1]) if tick in layers]
    ax.set_yticks([layers.index(tick) for tick in ticks], ticks)
    ax.set_xlabel("token of the prompt")
    ax.set_ylabel(r"layer $\ell$")
    figure.colorbar(image, ax=ax, fraction=0.05, pad=0.02).set_label(_LOOKS[colour].words)
    if title is not None:
        figure.suptitle(literal(title))
    return figure


def _norm(colour: str, values: np.ndarray) -> Any:
    if colour == "probability":
        return Normalize(0, 1)
    if colour == "rank":
        return LogNorm(1, max(10.0, float(values.max()) + 1))
    return Normalize(0, max(float(values[np.isfinite(values)].max(initial=0)), 1e-9))


def _short(token: str) -> str:
    shown = visible(token)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
