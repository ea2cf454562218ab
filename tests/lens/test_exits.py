"""Early exit by a lens is that of the maps that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from matlens import InputError, Lens, MapSet, Readout
from matlens.lens.early_exit import SWEEP_ID, exit_sweep, layers_saved
from matlens.lens.exits import lens_exit_sweep, lens_savings

Settings = Callable[[str], Any]


def test_mat_as_a_lens_leaves_where_maps_do(setting: Settings) -> None:
    model, train, validation = setting("llama")
    maps = MapSet.fit(train, pairs="last")
    lenses = {"mat": Lens.from_maps(maps, model=model), "id": Lens.identity(model)}
    ours = lens_exit_sweep(lenses, validation, progress=False)
    theirs = exit_sweep(Readout(model), maps, validation, progress=False)
    for method in lenses:
        keep = [lam for lam in SWEEP_ID if lam in set(theirs.loc[theirs["method"] == method, "lam"])]
        a, b = (
            t[(t["method"] == method) & (t["lam"].isin(keep) | t["lam"].isna())].sort_values(["lam", "layer"])
            for t in (ours, theirs)
        )
        columns = ["metric", "k", "layer", "target", "value", "low", "high", "n", "lam"]
        pd.testing.assert_frame_equal(
            a[columns].reset_index(drop=True), b[columns].reset_index(drop=True), check_dtype=False, rtol=1e-6
        )
    saved = lens_savings(ours).set_index("method")
    assert saved.loc["mat", "saved"] == layers_saved(ours, "mat")
    assert saved.loc["id", "share"] == pytest.approx(saved.loc["id", "saved"] / model.cfg.n_layers)


def test_a_factor_on_the_scores_changes_when_the_model_is_left(setting: Settings) -> None:
    model, _, validation = setting("gpt2")
    lens = Lens.identity(model)
    unsure = replace(lens, maps={layer: replace(held, scale=0.01) for layer, held in lens.maps.items()})
    table = lens_exit_sweep({"sure": lens, "unsure": unsure}, validation, layers=[2], progress=False)
    means = table[table["lam"] == 0.0].set_index("method")["layer"]
    assert means["unsure"] > means["sure"]
    assert set(table.loc[table["lam"].isna(), "layer"]) == {2, 3}


@pytest.mark.refused
def test_there_must_be_something_to_leave_by(setting: Settings) -> None:
    model, _, validation = setting("gpt2")
    lens = Lens.identity(model)
    with pytest.raises(InputError, match="nothing to leave"):
        lens_exit_sweep({}, validation)
    with pytest.raises(InputError, match="no layer to leave"):
        lens_exit_sweep({"id": lens}, validation, layers=[0])
    with pytest.raises(InputError, match="do not belong together"):
        lens_exit_sweep({"id": lens}, setting("llama").validation)
    with pytest.raises(InputError, match="lens_exit_sweep"):
        lens_savings(pd.DataFrame())
