"""The style sheet, titles, ticks, and whole files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from plot_tables import prediction_table

from matlens import drawing
from matlens.plots import plot_layers, save


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
