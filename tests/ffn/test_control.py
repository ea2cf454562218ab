"""A model under control is the plain model with coefficients overwritten by hand, and only for as long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from conftest import (
    ARCHITECTURES,
    MASKED,
    N_LAYERS,
    RESIDUAL_MULTIPLIER,
    WIRINGS,
    assert_near,
    plain_vectors,
)
from hand_controlled import CHOSEN, controlled_by_hand, output_layer, parsed
from handpatched import jump_part, submodule_part
from patched_models import SENTENCES, assert_as_before, assert_same, linear, patched, state, vectors
from torch import Tensor

import matlens
from matlens import InputError
from matlens.ffn.control import controlled
from matlens.ffn.values import ValueVectors
from matlens.models.layout import ModelLayout

Models = Callable[[str], Any]

N_NEW = 8

TEXTS = ["w4 w40 w11 w0 w29 w9", "w17", "w8 w8 w30 w21 w2 w35 w45 w13 w7 w26 w1 w19"]


def hand_vectors(name: str, plain: Any, chosen: Mapping[str, float]) -> list[dict[str, Tensor]]:
    """Vectors and logits of every sentence read alone."""
    with controlled_by_hand(name, plain, chosen):
        by_sentence = [plain_vectors(name, plain, torch.tensor(sentence)) for sentence in SENTENCES]
    return [{site: value[0] for site, value in one.items()} for one in by_sentence]


def logits(model: Any) -> list[Tensor]:
    return [one["logits"] for one in vectors(model)]


# What control does


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_the_plain_model_with_its_coefficients_overwritten(
    name: str, side: str, small_model: Models, plain_model: Models
) -> None:
    """Everything behind, in a padded batch of sentences of different lengths, as in each read alone."""
    model, expected = small_model(name), hand_vectors(name, plain_model(name), CHOSEN)
    before = vectors(model)
    with controlled(model, CHOSEN, CHOSEN) as same:
        assert same is model
        controlled_vectors = vectors(model, side=side)
    for ours, theirs, unchanged in zip(controlled_vectors, expected, before, strict=True):
        for site in {*ours} & {*theirs}:
            assert_near(ours[site], theirs[site])
        assert float((ours["logits"] - unchanged["logits"]).abs().max()) > 1e-3


@pytest.mark.parametrize("name", WIRINGS)
def test_the_ffns_output_changes_by_value_less_coefficient_times_the_value_vector(
    name: str, small_model: Models, plain_model: Models
) -> None:
    model, plain = small_model(name), plain_model(name)
    weight = output_layer(name, plain, 1).weight.detach()
    v = (weight if name == "gpt2" else weight.T)[9] * (RESIDUAL_MULTIPLIER if name == "granite" else 1)
    with controlled(model, ["L1D9"], 3.0):
        controlled_vectors = vectors(model)
    for ours, sentence in zip(controlled_vectors, SENTENCES, strict=True):
        theirs = {
            site: value[0] for site, value in plain_vectors(name, plain, torch.tensor(sentence)).items()
        }
        added = (3.0 - theirs["ffn_post.1"][:, 9])[:, None] * v
        assert_near(ours["ffn_out.1"] - theirs["ffn_out.1"], added)
        assert_near(ours["ffn_out.0"], theirs["ffn_out.0"])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_coefficient_set_to_what_it_is_changes_no_bit(name: str, small_model: Models) -> None:
    model, token = small_model(name), torch.tensor([[7]])
    seen: dict[str, Tensor] = {}
    hooks = [
        (
            ModelLayout.from_model(model).hook(f"ffn_post.{layer}"),
            lambda value, hook: seen.update({hook.name: value.clone()}),
        )
        for layer in range(N_LAYERS)
    ]
    with torch.inference_mode():
        before = model.run_with_hooks(token, fwd_hooks=hooks)
        coefficients = {
            f"L{layer}D{index}": float(
                seen[ModelLayout.from_model(model).hook(f"ffn_post.{layer}")][0, 0, index]
            )
            for layer in range(N_LAYERS)
            for index in (0, 13, 47)
        }
        with controlled(model, coefficients, coefficients):
            assert torch.equal(model(token), before)
        with controlled(model, coefficients, {**coefficients, "L1D13": coefficients["L1D13"] + 1}):
            assert not torch.equal(model(token), before)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_in_gated_ffns_it_is_the_product_of_gate_and_up_that_is_set(name: str, small_model: Models) -> None:
    model = small_model(name)
    with controlled(model, ["L1D9"], 3.0):
        for one in vectors(model):
            assert (one["ffn_post.1"][:, 9] == 3).all()


def test_names_may_be_written_in_any_way_and_count_from_the_end(small_model: Models) -> None:
    model = small_model("gpt2")
    with controlled(
        model, [(0, 5), "L-3D11", matlens.ffn.ValueVector(2, 7)], {"l0d5": 3, "L0D11": -2.5, (2, 7): 4}
    ):
        at_first = logits(model)
    with controlled(model, CHOSEN, CHOSEN):
        assert all(torch.equal(a, b) for a, b in zip(logits(model), at_first, strict=True))


def test_half_precision_is_kept(model_folder: Callable[[str], Any], plain_model: Models) -> None:
    model = matlens.load(str(model_folder("llama")), device="cpu", dtype=torch.bfloat16)
    with controlled(model, CHOSEN, CHOSEN):
        controlled_vectors = vectors(model)
    for ours, theirs in zip(
        controlled_vectors, hand_vectors("llama", plain_model("llama"), CHOSEN), strict=True
    ):
        assert ours["logits"].dtype == torch.bfloat16
        assert_near(ours["logits"].float(), theirs["logits"], 0.1)


def test_gradients_flow_past_it(small_model: Models) -> None:
    model = small_model("gpt2")
    with controlled(model, ["L1D9"]):
        model(torch.tensor(SENTENCES[:1])).square().sum().backward()
    weight = output_layer("gpt2", model.original_model, 1).original_component.weight
    assert bool(weight.grad.any())
    model.zero_grad()


# Around every way to run a model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_cache_of_activations_holds_what_is_set(
    name: str, small_model: Models, plain_model: Models
) -> None:
    model, expected = small_model(name), hand_vectors(name, plain_model(name), CHOSEN)[0]
    with controlled(model, CHOSEN, CHOSEN), torch.inference_mode():
        logits_of_model, cache = model.run_with_cache(torch.tensor(SENTENCES[:1]))
    assert_near(logits_of_model[0], expected["logits"])
    for layer, index, number in parsed(CHOSEN):
        assert (cache[ModelLayout.from_model(model).hook(f"ffn_post.{layer}")][0, :, index] == number).all()


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in MASKED])
def test_prompts_of_different_lengths_go_on_as_the_plain_model_finds_likeliest(
    name: str, cached: bool, small_model: Models, plain_model: Models
) -> None:
    model, plain = small_model(name), plain_model(name)
    with controlled(model, CHOSEN, CHOSEN):
        generated = model.generate(
            TEXTS, N_NEW, use_past_kv_cache=cached, output_logits=True, return_type="tokens",
            stop_at_eos=False, do_sample=False, verbose=False,
        )  # fmt: skip
    ours = torch.stack(generated.logits, dim=1)
    for row, logits_of_row, text in zip(generated.sequences, ours, TEXTS, strict=True):
        sentence = row[-len(text.split()) - N_NEW :]
        with controlled_by_hand(name, plain, CHOSEN), torch.inference_mode():
            theirs = plain(sentence[None]).logits[0, -N_NEW - 1 : -1]
        assert_near(logits_of_row, theirs)
        assert torch.equal(sentence[-N_NEW:], logits_of_row.argmax(-1))


def test_hooks_around_it_keep_the_coefficients_that_the_model_had(small_model: Models) -> None:
    model, kept = small_model("gpt2"), []
    hooks = [(ModelLayout.from_model(model).hook("ffn_post.1"), lambda value, hook: kept.append(value))]
    with torch.inference_mode(), model.hooks(fwd_hooks=hooks):
        model(torch.tensor(SENTENCES[:1]))
        with controlled(model, ["L1D9"]):
            model(torch.tensor(SENTENCES[:1]))
    assert torch.equal(kept[0], kept[1])


# The model is as before


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_afterwards_the_model_is_as_before(name: str, small_model: Models) -> None:
    model = small_model(name)
    vectors(model)
    before = state(model)
    for _ in range(2):
        with controlled(model, CHOSEN):
            assert state(model)[0] != before[0]
        assert_as_before(model, before)


@pytest.mark.parametrize("inside", [False, True], ids=["body", "pass"])
def test_after_a_failure_the_model_is_as_before(inside: bool, small_model: Models) -> None:
    model = small_model("llama")
    vectors(model)
    before = state(model)

    def fail(value: Tensor, hook: Any) -> None:
        raise ZeroDivisionError

    def run() -> None:
        if not inside:
            raise ZeroDivisionError
        hooks = [(ModelLayout.from_model(model).hook("ffn_out.1"), fail)]
        model.run_with_hooks(torch.tensor(SENTENCES[:1]), fwd_hooks=hooks)

    with pytest.raises(ZeroDivisionError), controlled(model, CHOSEN):
        run()
    assert_as_before(model, before)
    with controlled(model, CHOSEN):  # and is free again
        pass
    with pytest.raises(ZeroDivisionError), controlled(model, ["L0D1"]), controlled(model, ["L0D2"]):
        raise ZeroDivisionError
    assert_as_before(model, before)


# Contexts in contexts


def test_nested_contexts_are_one_with_both(small_model: Models) -> None:
    model = small_model("neox")
    with controlled(model, ["L0D5"], 3.0):
        only_outer = vectors(model)
        with controlled(model, ["L0D11", "L2D7"], {"L0D11": -2.5, "L2D7": 4.0}):
            both = vectors(model)
        assert_same(vectors(model), only_outer, 0)
    with controlled(model, CHOSEN, CHOSEN):
        assert_same(vectors(model), both, 0)


@pytest.mark.parametrize("patched_first", [True, False])
def test_it_goes_together_with_replacements_of_other_parts(patched_first: bool, small_model: Models) -> None:
    """A jump over block 0, attention of block 1 and control of its FFN: each does what it does alone."""
    model = small_model("llama")
    jump, attn = linear(jump_part(0, 1)), linear(submodule_part("attn", 1))
    with patched(model, [jump, attn]):
        alone = vectors(model)
        if patched_first:
            with controlled(model, ["L1D9"], 3.0):
                controlled_vectors = vectors(model)
    if not patched_first:
        with controlled(model, ["L1D9"], 3.0), patched(model, [jump, attn]):
            controlled_vectors = vectors(model)
    v = ValueVectors(model).vectors(["L1D9"])
    for ours, theirs in zip(controlled_vectors, alone, strict=True):
        assert_near(ours["ffn_in.1"], theirs["ffn_in.1"])
        added = (3.0 - theirs["ffn_post.1"][:, 9])[:, None] * v
        assert_near(ours["ffn_out.1"] - theirs["ffn_out.1"], added)


@pytest.mark.parametrize("name", ["llama", "bert", "gptj"])
@pytest.mark.parametrize("part", [jump_part(0, 2), submodule_part("ffn", 1)], ids=["jump", "stand-in"])
def test_control_of_an_ffn_that_is_replaced_is_refused_whichever_comes_first(
    name: str, part: Any, small_model: Models
) -> None:
    """It would do nothing, and nobody would see."""
    model = small_model(name)
    before = state(model)
    with patched(model, [linear(part)]):
        with pytest.raises(
            InputError, match=r"Value vectors of layer 1 cannot be controlled: .* is replaced"
        ):
            controlled(model, ["L1D9"]).__enter__()
        with controlled(model, ["L2D9"]):
            pass
    for names in (["L1D9"], ["L2D3", "L1D9"]):
        with (
            controlled(model, names),
            pytest.raises(InputError, match=r"\.1.* is replaced or controlled"),
        ):
            patched(model, [linear(part)]).__enter__()
    assert_as_before(model, before)


# What cannot be done


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        ("L0D1", 3.0, "^names must be a list"),
        (["L0D1", "wine"], 3.0, "'wine' is not a value vector"),
        (["L3D1"], 3.0, "Layer 3 is out of range"),
        (["L0D48"], 3.0, "Index 48 of L0D48 is out of range"),
        (["L0D1", "L1D1", (0, 1)], 3.0, "L0D1 is named twice"),
        (["L2D1", "L-1D1"], 3.0, "L2D1 is named twice"),
        (["L0D1"], float("nan"), "^value must be"),
        (["L0D1"], {"L0D1": "3"}, "^value must be"),
        (["L0D1", "L0D2"], {"L0D1": 3.0}, "L0D2 has no value"),
        (["L0D1"], {"L0D1": 3.0, "L0D2": 1.0}, "L0D2 has a value but is not named"),
    ],
)
def test_what_is_no_control_is_told_and_nothing_is_hooked(
    names: Any, value: Any, message: str, small_model: Models
) -> None:
    model = small_model("llama")
    before = state(model)
    with pytest.raises(InputError, match=message):
        controlled(model, names, value).__enter__()
    assert_as_before(model, before)


def test_a_vector_that_is_under_control_is_refused(small_model: Models) -> None:
    model = small_model("llama")
    with controlled(model, ["L0D1", "L1D2"], 3.0):
        with pytest.raises(InputError, match="L1D2 is under control already"):
            controlled(model, ["L0D3", "L1D2"], 2.0).__enter__()
        with controlled(model, ["L0D3"], 2.0):
            pass
    with controlled(model, ["L1D2"]):
        pass


def test_a_model_without_value_vectors_is_refused(small_model: Models) -> None:
    with pytest.raises(InputError, match="no value vectors that are known"):
        controlled(small_model("bloom"), ["L0D1"]).__enter__()
