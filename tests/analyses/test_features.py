"""What works with a model is what has been tried on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pandas as pd
import pytest
from analysing import run
from compatibility import FEATURES, compatibility
from conftest import WIRING_OF
from transformer_lens.model_bridge import TransformerBridge

from matlens.models import Stack

Models = Callable[[str], TransformerBridge]


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gemma2", "bert"])
def test_every_feature_works_with_the_claimed_families(name, small_model):
    offered = compatibility(small_model(name))
    assert offered["wiring"] == WIRING_OF[name]
    assert {offered[feature] for feature in FEATURES} == {""}


def test_where_only_the_stream_is_known_only_maps_between_layers_work(small_model):
    offered = compatibility(small_model("bloom"))
    assert (offered["wiring"], offered["sites"]) == ("stream-only", "h")
    assert [feature for feature in FEATURES if not offered[feature]] == ["readout", "mat"]
    assert "stream-only" in offered["mat_ffn"]
    assert "value vectors" in offered["control"]


def test_the_script_writes_a_row_per_architecture_and_stack(tmp_path):
    run("compatibility", "--type", "gptj", "--type", "t5", "--out", tmp_path)
    table = pd.read_csv(tmp_path / "compatibility.csv", keep_default_na=False).set_index("model_type")
    assert list(table.index) == ["gptj", *(f"t5 {stack}" for stack in get_args(Stack))]
    assert (table.loc["gptj", list(FEATURES)] == "yes").all()
    assert not table.loc["t5 encoder"].equals(table.loc["t5 decoder"])
