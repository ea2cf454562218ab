"""The style sheet, titles, ticks, text that is no formula, and whole files."""

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

from matlens.errors import InputError
from matlens.plots import plot_layers, style

# The style sheet


def test_figures_follow_the_sheet_and_leave_settings_alone() -> None:
    with mpl.rc_context({"axes.grid": False, "axes.spines.top": True, "legend.frameon": True}):
        before = dict(mpl.rcParams)
        figure = plot_layers(prediction_table(3))
        assert dict(mpl.rcParams) == before
    for ax in figure.axes:
        assert not ax.spines["top"].get_visible()
        assert not ax.spines["right"].get_visible()
        assert all(line.get_visible() and line.get_alpha() == 0.3 for line in ax.get_xgridlines())
    (legend,) = figure.legends
    assert not legend.get_frame_on()


# Titles


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
        ("/some/folder/small-bert/", "small-bert"),
        ("C:\\folder\\gpt2", "gpt2"),
        ("/data/news.txt (validation)", "news.txt (validation)"),
        ("/some/small-wikilm/checkpoint.pt", "small-wikilm/checkpoint.pt"),
        ("small-wikilm/checkpoint_best.pt", "small-wikilm/checkpoint_best.pt"),
        ("/adaptive_lm_wiki103.v2/model.pt", "adaptive_lm_wiki103.v2/model.pt"),
        ("C:\\gpt2\\ggml-model-Q4_0.gguf", "gpt2/ggml-model-Q4_0.gguf"),
        ("/some/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("/some/models/model-of-mine.pt", "model-of-mine.pt"),
        ("/some/checkpoint", "checkpoint"),
        ("/checkpoint.pt", "checkpoint.pt"),
        ("checkpoint.pt", "checkpoint.pt"),
        ("/", "/"),
    ],
)
def test_short_names_have_no_folders_but_where_the_file_says_nothing(name: str, short: str) -> None:
    assert style.short_name(name) == short


def test_titles_name_the_model_the_corpus_and_how_many_examples() -> None:
    table = prediction_table(3)
    assert style.title_of(table.assign(model="a/$gpt$"), "model") == r"\$gpt\$"
    assert style.title_of(table) == "model, some-corpus, n = 1,234"
    table.loc[0, "n"] = 5
    assert style.title_of(table) == "model, some-corpus, n = 5 to 1,234"


# Ticks


@given(st.integers(1, 100))
def test_the_last_layer_is_among_the_ticks(last: int) -> None:
    ticks = style.layer_ticks(last)
    assert ticks[0] == 0
    assert ticks[-1] == last
    assert all(isinstance(tick, int) for tick in ticks)
    gaps = np.diff(ticks)
    assert (gaps > 0).all()
    assert len(ticks) <= 10
    # Round layers are evenly spaced, and the last does not touch the one before it.
    assert len(set(gaps[:-1])) <= 1
    assert len(gaps) == 1 or gaps[-1] >= gaps[0] / 2


def test_shares_are_written_as_percentages() -> None:
    axis = Figure().subplots().yaxis
    style.percent_ticks(axis)
    shares = (0, 0.07, 0.005, 0.0001, 1)
    assert [axis.get_major_formatter()(share) for share in shares] == ["0%", "7%", "0.5%", "0.01%", "100%"]


# Files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def small() -> Figure:
    return Figure(figsize=(1, 1))


def test_a_figure_is_written_as_png_and_pdf(tmp_path: Path) -> None:
    paths = style.save(plot_layers(prediction_table(3)), tmp_path / "new" / "folder" / "r2")
    assert paths == [tmp_path / "new" / "folder" / "r2.png", tmp_path / "new" / "folder" / "r2.pdf"]
    written = contents(tmp_path / "new" / "folder")
    assert sorted(written) == ["r2.pdf", "r2.png"]
    assert written["r2.png"].startswith(b"\x89PNG\r\n")
    assert written["r2.png"].endswith(b"IEND\xaeB`\x82")
    assert written["r2.pdf"].startswith(b"%PDF-")
    assert written["r2.pdf"].rstrip().endswith(b"%%EOF")


def test_another_title_can_be_given(tmp_path: Path) -> None:
    figure = plot_layers(prediction_table(3))
    style.save(figure, tmp_path / "named", title="What $5 buys")
    assert figure.get_suptitle() == r"What \$5 buys"
    style.save(figure, tmp_path / "kept")
    assert figure.get_suptitle() == r"What \$5 buys"


def test_names_with_dots_are_kept(tmp_path: Path) -> None:
    assert [path.name for path in style.save(small(), tmp_path / "smollm2.135m")] == [
        "smollm2.135m.png", "smollm2.135m.pdf",
    ]  # fmt: skip


@pytest.mark.parametrize("failing", ["png", "pdf"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError),
        (RuntimeError("defect"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_what_fails_leaves_no_part_and_no_harm(
    error: BaseException,
    raised: type[BaseException],
    failing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    style.save(small(), tmp_path / "r2")
    before = contents(tmp_path)
    savefig = Figure.savefig

    def fails(self: Figure, file: Any, **options: Any) -> None:
        if options["format"] != failing:
            return savefig(self, file, **options)
        file.write(b"half a figure")
        raise error

    monkeypatch.setattr(Figure, "savefig", fails)
    with pytest.raises(raised):
        style.save(Figure(figsize=(2, 2)), tmp_path / "r2")
    with pytest.raises(raised):
        style.save(small(), tmp_path / "new")
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        style.save(small(), tmp_path / "file" / "below" / "r2")
    assert sorted(contents(tmp_path)) == ["file"]
