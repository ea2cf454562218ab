"""Figures of the lens report next to those that matlens draws."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from matlens.drawing import (
    draw_methods,
    finish,
    layer_axis,
    method_looks,
    styled,
    title_of,
)


@styled
def plot_cosines(results: pd.DataFrame) -> Figure:
    """Cosine of two lenses' matrices at each layer, and of two halves of the data."""
    figure = Figure(figsize=(5.6, 4.0))
    ax = figure.subplots()
    draw_methods(ax, results, method_looks(results["method"]))
    ax.set_ylim(min(0.0, float(results["value"].min()) - 0.05), 1.02)
    ax.set_ylabel("cosine of matrices")
    layer_axis(ax, results["target"].max())
    return finish(figure, title_of(results, "model", "corpus"), columns=2)
