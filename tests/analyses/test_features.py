"""What works with a model is what has been tried on it."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import WIRING_OF
from studies import FEATURES, compatibility
from transformer_lens.model_bridge import TransformerBridge

from matlens import InputError, load

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "analyses" / "compatibility.py"))
Models = Callable[[str], TransformerBridge]


@pytest.mark.parametrize("name", [*WIRING_OF, "roberta"])
def test_every_feature_works_with_the_claimed_families(name: str, small_model: Models) -> None:
    offered = compatibility(small_model(name))
    assert offered["wiring"] == WIRING_OF.get(name, "post-norm")
    assert {offered[feature] for feature in FEATURES} == {""}


def test_where_only_the_stream_is_known_only_maps_between_layers_work(small_model: Models) -> None:
    offered = compatibility(small_model("bloom"))
    assert (offered["wiring"], offered["sites"]) == ("stream-only", "h")
    assert [feature for feature in FEATURES if not offered[feature]] == ["read-out", "mat"]
    assert "stream-only" in offered["mat_ffn"]
    assert "no value vectors" in offered["control"]


def test_a_model_is_left_as_it_was(small_model: Models) -> None:
    model = small_model("gpt2")
    before = [len(point.fwd_hooks) for point in model.hook_dict.values()]
    compatibility(model)
    assert [len(point.fwd_hooks) for point in model.hook_dict.values()] == before


@pytest.mark.parametrize(("name", "refused"), [("gpt_oss", {*FEATURES[5:]}), ("mamba", {*FEATURES[1:]})])
def test_the_table_tells_what_an_architecture_lacks(name: str, refused: set[str], tmp_path: Path) -> None:
    row = SCRIPT["attempt"](name, tmp_path, 0)
    assert {feature for feature in FEATURES if row[feature] != "yes"} == refused
    assert all(row[feature].endswith(".") for feature in refused)


@pytest.mark.parametrize(
    ("name", "stack"),
    [("mixtral", None), ("granitemoe", None), ("t5", "decoder"), ("t5", "encoder"), ("vit", None)],
)
def test_other_kinds_of_models_have_everything(name: str, stack: Any, tmp_path: Path) -> None:
    row = SCRIPT["attempt"](name, tmp_path, 0, stack)
    lacking = {feature for feature in FEATURES if row[feature] != "yes"}
    assert lacking == ({"read-out"} if stack == "encoder" else set())


def test_blocks_that_cannot_be_skipped_are_named(tmp_path: Path) -> None:
    assert "SSMBlockBridge" in SCRIPT["attempt"]("mamba", tmp_path, 0)["mat"]


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_blocks_without_attention_are_the_reason_why_it_is_not_replaced(name: str, tmp_path: Path) -> None:
    """Linear attention and convolutions stand in its place in some layers."""
    row = SCRIPT["attempt"](name, tmp_path, 0)
    assert {feature: row[feature] for feature in FEATURES if feature != "mat_attn"} == dict.fromkeys(
        set(FEATURES) - {"mat_attn"}, "yes"
    )
    assert "attn" not in row["sites"]
    assert "Not every block of this model has a module for attn" in row["mat_attn"]


def test_a_type_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'encodec' is not a model type"):
        SCRIPT["save_small_model"]("encodec", tmp_path, 0)
    with pytest.raises(InputError, match="'nothing' is not a model type"):
        SCRIPT["attempt"]("nothing", tmp_path, 0)


def test_a_model_that_cannot_run_is_refused_in_words(tmp_path: Path) -> None:
    configurations: dict[str, Any] = SCRIPT["CONFIGURATIONS"]
    before = configurations["stablelm"]
    configurations["stablelm"] = {**before, "num_key_value_heads": 32}
    try:
        SCRIPT["save_small_model"]("stablelm", tmp_path, 0)
    finally:
        configurations["stablelm"] = before
    with pytest.raises(InputError, match="StableLmForCausalLM cannot be run by TransformerLens"):
        compatibility(load(str(tmp_path)))
