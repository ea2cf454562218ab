"""Which replacements fit a model and each other, and which are refused with nothing left behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import N_LAYERS, make_tokenizer
from handpatched import jump_part, part, submodule_part
from patched_models import Models, hook_counts, linear, patched, replacement, vectors
from transformers import LEDConfig, LEDForConditionalGeneration

import matlens
from matlens import InputError, LinearMap, MapSet
from matlens.models.identity import ModelIdentity, Provenance
from matlens.patching.replacements import mat_attn


@contextmanager
def refused(model: Any, message: str) -> Iterator[None]:
    """An error that says so, nothing left in the model, and nothing remembered as taken."""
    vectors(model)
    before = hook_counts(model)
    with pytest.raises(InputError, match=message):
        yield
    assert hook_counts(model) == before
    assert not any("forward" in vars(block) for block in model.blocks)
    whole = [jump_part(0, N_LAYERS - 1), *(submodule_part(kind, 2) for kind in ("ln1", "attn", "ffn"))]
    with patched(model, [replacement(replaced) for replaced in whole]):
        pass


def test_neighbours_do_not_overlap(small_model: Models) -> None:
    parts = [jump_part(0, 1), jump_part(1, 2), *(submodule_part(kind, 2) for kind in ("ln1", "attn", "ffn"))]
    for order in itertools.permutations(parts):
        with patched(small_model("gptj"), [replacement(replaced) for replaced in order]):
            pass
    for place in range(3):  # maps over no blocks, at the ends of jumps and before a stand-in
        with patched(
            small_model("gptj"), [replacement(replaced) for replaced in (*parts[:3], jump_part(place, place))]
        ):
            pass


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("h.2", "h.1", "h.2 -> h.1 runs backwards"),
        ("h.-1", "h.1", "h.3 -> h.1 runs backwards"),
        ("attn_out.1", "attn_in.1", "attn_out.1 -> attn_in.1 runs backwards"),
        ("ffn_out.1", "h.1", "ffn_out.1 -> h.1 runs backwards"),
        ("ln1_out.1", "ln1_out.1", "ln1_out.1 -> ln1_out.1 .*ends where it starts"),
        ("h.0", "h.4", "Layer 4 of site 'h' is out of range"),
        ("ffn_in.3", "ffn_out.3", "Layer 3 of site 'ffn_in' is out of range"),
        ("ln2_in.0", "ln2_out.0", r"no site 'ln2_in' \(its blocks are parallel\)"),
        ("mid.0", "mid.0", "no site 'mid'"),
    ],
)
def test_sites_that_are_no_two_ends_are_refused(
    source: str, target: str, message: str, small_model: Models
) -> None:
    model = small_model("gptj")
    with refused(model, message), patched(model, [linear(jump_part(0, 1)), linear(part(source, target))]):
        pytest.fail("not refused")


def test_where_only_the_stream_is_known_only_jumps_are_taken(small_model: Models) -> None:
    model = small_model("bloom")
    with pytest.raises(InputError, match=r"no site 'attn_in'.*stream-only"):
        patched(model, [linear(submodule_part("attn", 0))]).__enter__()
    with patched(model, [linear(jump_part(0, 1))]):
        pass


@pytest.mark.refused
@pytest.mark.parametrize(
    "where",
    [
        "first", None, 3, [0, 1], torch.tensor([-1, 0]), torch.tensor([0.0, 1.0]), torch.tensor(1),
        torch.tensor([[1, 2]]), torch.tensor([True, False]),
    ],
    ids=str,
)  # fmt: skip
def test_what_says_no_tokens_is_refused(where: Any, small_model: Models) -> None:
    model, maps = small_model("gptj"), MapSet([linear(submodule_part("attn", 0))])
    with (
        refused(model, r"where\b|The positions of"),
        patched(model, mat_attn(maps, 0, 1, where=where)),
    ):
        pytest.fail("not refused")


def test_what_replaces_nothing_is_refused(small_model: Models) -> None:
    model, replaced = small_model("gptj"), linear(jump_part(0, 1))
    wrong: Any
    for wrong, message in (
        (replaced, r"^replacements must be"),
        (MapSet([replaced]), r"^replacements must be"),
        ([replaced, "h.1"], r"^replacements must be"),
    ):
        with refused(model, message), patched(model, wrong):
            pytest.fail("not refused")


def test_maps_fitted_on_another_model_are_refused(
    small_model: Models, model_folder: Callable[[str], Path]
) -> None:
    model = small_model("gptj")
    half = matlens.load(str(model_folder("gptj")), device="cpu", dtype=torch.bfloat16)
    native = linear(jump_part(0, 1), provenance=Provenance(ModelIdentity.from_model(model)))
    with patched(model, [native, linear(jump_part(1, 2))]):  # of one that says nothing nothing is known
        pass
    for other in (small_model("gpt2"), half):
        foreign = linear(jump_part(1, 2), provenance=Provenance(ModelIdentity.from_model(other)))
        for given in ([foreign], [native, foreign], [foreign, native]):
            models = [ModelIdentity.from_model(each).fingerprint for each in (other, model)]
            message = f"Their models are .*{models[0]}, and .*{models[1]}"
            with refused(model, message), patched(model, given):
                pytest.fail("not refused")


def test_a_model_in_compatibility_mode_is_refused(model_folder: Callable[[str], Path]) -> None:
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    model.enable_compatibility_mode()
    before = hook_counts(model)
    with (
        pytest.raises(InputError, match="compatibility mode"),
        patched(model, [linear(jump_part(0, 1))]),
    ):
        pytest.fail("not refused")
    assert hook_counts(model) == before


def test_blocks_that_carry_more_places_than_tokens_are_refused(tmp_path: Path) -> None:
    """The encoder of LED fills sentences up to its window, before its blocks."""
    sizes = {"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "attention_window": [16, 16]}
    torch.manual_seed(0)
    LEDForConditionalGeneration(
        LEDConfig(
            **sizes, **heads, encoder_ffn_dim=48, decoder_ffn_dim=48, max_encoder_position_embeddings=48
        )
    ).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model = matlens.load(str(tmp_path), device="cpu", stack="encoder")
    stand_in = LinearMap(torch.eye(32), None, "ffn_in.0", "ffn_out.0")
    with (
        pytest.raises(
            InputError, match=r"cannot be replaced: the hook .* carries a tensor \[batch, 16, 32\]"
        ),
        patched(model, [stand_in]),
    ):
        pass
