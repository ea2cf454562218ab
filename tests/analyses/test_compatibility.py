"""The table of architectures says of each what the library says of a model of its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from analysing import run
from studies import FEATURES, compatibility


def test_each_architecture_has_what_works_with_a_model_of_its_kind(
    small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    run("compatibility", "--type", "gptj", "--type", "bert", "--type", "t5", "--out", tmp_path)
    table = pd.read_csv(tmp_path / "compatibility.csv", keep_default_na=False).set_index("model_type")
    assert list(table.index) == ["gptj", "bert", *(f"t5 {stack}" for stack in ("encoder", "decoder"))]
    for name in ("gptj", "bert"):
        offered = compatibility(small_model(name))
        for column in ("wiring", "sites"):
            assert table.loc[name, column] == str(offered[column])
        for feature in FEATURES:
            assert (table.loc[name, feature] == "yes") == (offered[feature] == "")
    assert not table.loc["gptj"].equals(table.loc["bert"])
    assert not table.loc["t5 encoder"].equals(table.loc["t5 decoder"])
