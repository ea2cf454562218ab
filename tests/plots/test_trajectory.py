"""The picture of a trajectory has a cell for each token and layer, coloured and written as the table says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from matlens import InputError
from matlens.plots import literal, save_as, trajectory_figure


def make_table(tokens: int = 4, layers: tuple[int, ...] = (0, 2, 3)) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    rows = [
        (i, f" t{i}", layer, f" p{layer}{i}", generator.uniform(), generator.uniform(0, 5),
         0.0 if layer == 3 else generator.uniform(0, 9), int(generator.integers(0, 50)))
        for i in range(tokens) for layer in layers
    ]  # fmt: skip
    names = ["position", "token", "layer", "predicted", "probability", "entropy", "kl", "rank"]
    return pd.DataFrame(rows, columns=names).sample(frac=1, random_state=1)


@pytest.mark.parametrize("colour", ["probability", "kl", "rank", "entropy"])
def test_every_cell_is_that_of_its_token_and_layer(colour: str) -> None:
    table = make_table()
    figure = trajectory_figure(table, colour=colour, title="mat: a $prompt$")
    ax = figure.axes[0]
    shown = np.asarray(ax.images[0].get_array())
    texts = {(round(t.get_position()[0]), round(t.get_position()[1])): t.get_text() for t in ax.texts}
    for row in table.to_dict("records"):
        line = (0, 2, 3).index(row["layer"])
        assert shown[line, row["position"]] == pytest.approx(row[colour] + (colour == "rank"))
        assert texts[row["position"], line] == literal(f"␣{row['predicted'].strip()}")
    assert len(texts) == 12
    assert [label.get_text() for label in ax.get_yticklabels()][-1] == "3"
    assert ax.get_xticklabels()[2].get_text().endswith("t2")
    assert figure.get_suptitle() == r"mat: a \$prompt\$"


def test_sure_cells_are_dark() -> None:
    table = make_table()
    for colour, dark in (("probability", 1.0), ("kl", 0.0), ("rank", 0), ("entropy", 0.0)):
        table[colour] = np.where(table["layer"] == 3, dark, 5.0 if dark == 0 else 0.1)
        image = trajectory_figure(table, colour=colour).axes[0].images[0]
        lightness = np.asarray(image.cmap(image.norm(image.get_array())))[..., :3].mean(-1)
        assert (lightness[2] < 0.35).all()
        assert (lightness[:2] > lightness[2].max()).all()


def test_a_figure_is_written_as_its_name_says(tmp_path: Path) -> None:
    figure = trajectory_figure(make_table())
    assert save_as(figure, tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    assert save_as(figure, tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(InputError, match="ends in"):
        save_as(figure, tmp_path / "a.exe")


@pytest.mark.refused
def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(InputError, match="colour is 'blue'"):
        trajectory_figure(make_table(), colour="blue")
    with pytest.raises(InputError, match="70 tokens, more than the 60"):
        trajectory_figure(make_table(70))
    with pytest.raises(InputError, match="cannot draw this table"):
        trajectory_figure(make_table().drop(columns="predicted"))
