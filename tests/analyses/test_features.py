"""What works with a model is what has been tried on it."""

from __future__ import annotations

import pandas as pd
import pytest
from analysing import run
from compatibility import FEATURES, compatibility
from conftest import WIRING_OF


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gemma2", "bert", "bloom"])
def test_every_feature_works_with_the_claimed_families(name, small_model):
    offered = compatibility(small_model(name))
    assert offered["wiring"] == WIRING_OF.get(name, "stream-only")
    works = FEATURES if name in WIRING_OF else ("readout", "mat")  # only the stream of others is known
    assert tuple(feature for feature in FEATURES if not offered[feature]) == works


def test_the_script_writes_a_row_per_architecture_and_stack(tmp_path):
    run("compatibility", "--type", "gptj", "--type", "t5", "--out", tmp_path)
    table = pd.read_csv(tmp_path / "compatibility.csv", keep_default_na=False).set_index("model_type")
    assert list(table.index) == ["gptj", "t5 encoder", "t5 decoder"]
    assert (table.loc["gptj", list(FEATURES)] == "yes").all()
    assert not table.loc["t5 encoder"].equals(table.loc["t5 decoder"])
