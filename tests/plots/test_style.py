"""The style sheet, titles, ticks, and whole files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from plot_tables import prediction_table

from matlens import drawing
from matlens.plots import plot_layers, save


def test_figures_follow_the_sheet_and_leave_settings_alone() -> None:
    with mpl.rc_context({"axes.grid": False, "axes.spines.top": True, "legend.frameon": True}):
        before = dict(mpl.rcParams)
        figure = plot_layers(prediction_table(3))
        assert dict(mpl.rcParams) == before
    for ax in figure.axes:
        assert not ax.spines["top"].get_visible()
        assert all(line.get_visible() and line.get_alpha() == 0.3 for line in ax.get_xgridlines())
    (legend,) = figure.legends
    assert not legend.get_frame_on()


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"), ("/some/folder/small-bert/", "small-bert"),
        ("C:\\folder\\gpt2", "gpt2"), ("/data/news.txt (validation)", "news.txt (validation)"),
        ("/some/small-wikilm/checkpoint.pt", "small-wikilm/checkpoint.pt"),
        ("/adaptive_lm_wiki103.v2/model.pt", "adaptive_lm_wiki103.v2/model.pt"),
        ("C:\\gpt2\\ggml-model-Q4_0.gguf", "gpt2/ggml-model-Q4_0.gguf"),
        ("/some/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("/some/models/model-of-mine.pt", "model-of-mine.pt"), ("checkpoint.pt", "checkpoint.pt"), ("/", "/"),
    ],
)  # fmt: skip
def test_short_names_have_no_folders_but_where_the_file_says_nothing(name: str, short: str) -> None:
    assert drawing.short_name(name) == short


def test_titles_name_the_model_the_corpus_and_how_many_examples() -> None:
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
def test_the_last_layer_is_one_of_the_ticks(last: int) -> None:
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


def test_a_figure_is_written_under_the_names_that_are_meant(tmp_path: Path) -> None:
    folder, figure = tmp_path / "new" / "folder", plot_layers(prediction_table(3))
    paths = save(figure, folder / "smollm2.135m", title="What $5 buys")
    assert paths == [folder / "smollm2.135m.png", folder / "smollm2.135m.pdf"]
    assert figure.get_suptitle() == r"What \$5 buys"
    written = contents(folder)
    assert written["smollm2.135m.png"].startswith(b"\x89PNG\r\n")
    assert written["smollm2.135m.pdf"].startswith(b"%PDF-")
    assert save(figure, folder / "smollm2.135m") == paths  # the same figure has the same bytes
    assert contents(folder) == written
    assert save(Figure(figsize=(1, 1)), folder / "a.png") == [folder / "a.png"]
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        save(figure, tmp_path / "file" / "below" / "r2")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_what_fails_leaves_no_part_and_no_harm(
    error: BaseException, raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(Figure(figsize=(1, 1)), tmp_path / "r2")
    before = contents(tmp_path)
    savefig = Figure.savefig

    def fails(self: Figure, file: Any, **options: Any) -> None:
        if options["format"] != "pdf":
            return savefig(self, file, **options)
        file.write(b"half a figure")
        raise error

    monkeypatch.setattr(Figure, "savefig", fails)
    for name in ("r2", "new"):
        with pytest.raises(raised):
            save(Figure(figsize=(2, 2)), tmp_path / name)
    assert contents(tmp_path) == before
