"""Variants are patched passes, one sentence at a time and whole, that share what they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near, make_sentences
from handpatched import submodules
from patched_models import counting, patched, run_variants
from torch import Tensor

from matlens import InputError, LinearMap, MapSet, Site, collect, make_examples
from matlens.data.examples import Examples
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement, jump, mat_attn, mat_ffn, mat_ln1_ln2
from matlens.patching.variants import Variant

N = 10
FEW = 4  # of them where every sentence runs alone, patched in every way
BUDGET = 20  # tokens, which makes several batches of several sentences
OPTIONS: dict[str, Any] = {"batch_tokens": BUDGET, "progress": False}


def examples_of(model: Any, seed: int = 8) -> Examples:
    """Sentences of 5 to 14 words, of which one has its position at the start."""
    return make_examples(model, make_sentences(), seed=seed).head(N)


def maps_of(name: str) -> MapSet:
    """Random maps between all layers and for all sub-modules; vectors stay about as long as they are."""
    pairs = [(f"h.{a}", f"h.{b}") for a in range(N_LAYERS + 1) for b in range(a, N_LAYERS + 1)]
    pairs += [(f"{part}_in.{i}", f"{part}_out.{i}") for part in submodules(name) for i in range(N_LAYERS)]
    weights = torch.randn(len(pairs), D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(0))
    return MapSet(LinearMap(w / D_MODEL**0.5, None, *pair) for w, pair in zip(weights, pairs, strict=True))


def variants_of(name: str, examples: Examples) -> dict[str, Variant]:
    """Jumps and stand-ins that start at every layer, at all tokens and at some."""
    maps, where = maps_of(name), torch.from_numpy(examples.positions)
    # At every second sentence's own position, and at every third token of all.
    some = torch.arange(int(examples.lengths.max())) % 3 == 1
    some = (
        some | (torch.arange(len(some)) == where[:, None]) & (torch.arange(len(examples)) % 2 == 1)[:, None]
    )
    return {
        "jump-0-2": Variant(0, jump(maps, 0, 2)),
        "jump-1-3": Variant(1, jump(maps, 1, 3)),
        "jumps": Variant(0, jump(maps, 0, 1) + jump(maps, 2, 3)),
        "between-2": Variant(2, jump(maps, 2, 2)),
        "attn-1": Variant(1, mat_attn(maps, 1, 3)),
        "ffn-2": Variant(2, mat_ffn(maps, 2, 3)),
        "norms-0": Variant(0, mat_ln1_ln2(maps, 0, 3)),
        "not-first-1": Variant(1, mat_attn(maps, 1, 3, where="not-first")),
        "some-1": Variant(1, mat_ffn(maps, 1, 3, where=some)),
        "one-0": Variant(0, mat_attn(maps, 0, 2, where=where)),
        "one-2": Variant(2, mat_ffn(maps, 2, 3, where=where)),
        "mixed-1": Variant(1, jump(maps, 1, 2) + mat_attn(maps, 2, 3, where=where) + mat_ffn(maps, 2, 3)),
        "none-0": Variant(0, []),
        "none-3": Variant(3, []),
    }


def at_sentence(replacement: Replacement, sentence: int) -> Replacement:
    """What is replaced in one sentence."""
    return (
        replacement
        if isinstance(replacement.where, str)
        else replace(replacement, where=replacement.where[sentence : sentence + 1])
    )


@torch.inference_mode()
def alone(model: Any, examples: Examples, replacements: Sequence[Replacement]) -> Tensor:
    """``h^L`` at the positions; the sentences run one at a time, without padding and without a cut."""
    final: list[Tensor] = []
    hook = ModelLayout.from_model(model).hook(N_LAYERS)
    for s, position in enumerate(examples.positions):
        tokens = torch.from_numpy(examples.tokens[examples.offsets[s] : examples.offsets[s + 1]])
        seen: list[Tensor] = []
        with (
            patched(model, [at_sentence(replacement, s) for replacement in replacements]),
            model.hooks(fwd_hooks=[(hook, lambda value, hook, seen=seen: seen.append(value))]),
        ):
            model(tokens[None])
        assert seen[0].shape == (1, len(tokens), D_MODEL)
        final.append(seen[0][0, position].clone())
    return torch.stack(final)


def assert_all_near(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].dtype == torch.float32
        assert_near(ours[name], theirs[name])


@pytest.mark.parametrize("name", ["bert", "gemma2"])
def test_variants_are_patched_passes_of_each_sentence_alone(name, small_model):
    """Whatever the batches, and wherever a variant starts."""
    model = small_model(name)
    examples = examples_of(model).head(FEW)
    variants = variants_of(name, examples)
    expected = {key: alone(model, examples, variant.replacements) for key, variant in variants.items()}
    assert_near(expected["none-0"], collect(model, examples, progress=False)[N_LAYERS])
    later = torch.from_numpy(examples.positions) > 0
    assert 0 < int(later.sum()) < FEW
    for key, other in expected.items():  # every replacement shows wherever it is read
        changed = (other - expected["none-0"]).abs().amax(1) > 1e-2
        read = later if "not-first" in key and name != "bert" else torch.ones_like(later)
        assert torch.equal(changed, read & (key[:4] != "none"))
    for batch_tokens in (1, BUDGET):
        final = run_variants(model, examples, variants, batch_tokens=batch_tokens, progress=False)
        assert_all_near(final, expected)
    from_the_start = {key: replace(variant, first=0) for key, variant in variants.items()}
    assert_all_near(run_variants(model, examples, from_the_start, **OPTIONS), expected)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_blocks_before_the_first_layer_run_once_for_all_variants(name, small_model):
    """And a decoder reads no further than the position."""
    model, maps = small_model(name), maps_of(name)
    ModelLayout.from_model(model)  # which runs the model once
    examples = examples_of(model)
    read = examples if name == "bert" else examples.up_to_positions()
    n = len(list(read.batches(BUDGET)))
    assert n > 2
    ModelLayout.from_model(model)  # which runs a pass, once

    def counted(*variants: Variant) -> list[float]:
        named = {str(i): variant for i, variant in enumerate(variants)}
        with counting(model) as counts:
            run_variants(model, examples, named, **OPTIONS)
        return [count / n for count in counts]

    assert counted(Variant(0, [])) == [1, 1, 1]
    assert counted(Variant(0, jump(maps, 0, 2))) == [0, 0, 1]
    later = Variant(2, mat_ffn(maps, 2, 3))
    assert counted(*[later] * 4) == [1, 1, 4]
    assert counted(*[later] * 4, Variant(1, jump(maps, 1, 3)), Variant(1, mat_attn(maps, 1, 3))) == [1, 2, 5]
    assert counted(later, Variant(0, mat_attn(maps, 0, 1))) == [2, 2, 2]
    assert counted(*[Variant(3, [])] * 3) == [1, 1, 1]


@pytest.fixture
def job(small_model):
    """A model, sentences, and a few variants with maps that are known to be of the model."""
    model = small_model("llama")
    examples = examples_of(model)
    variants = variants_of("llama", examples)
    return model, examples, {key: variants[key] for key in ("jump-1-3", "one-0", "mixed-1")}


def test_stored_vectors_are_those_in_memory(job, tmp_path):
    model = job[0]
    in_memory = run_variants(*job, **OPTIONS)
    stored = run_variants(*job, folder=tmp_path / "out", **OPTIONS)
    with counting(model) as counts:  # opened, not run, whatever the batches would be
        again = run_variants(*job, folder=tmp_path / "out", progress=False)
    assert counts == [0] * N_LAYERS
    assert list(again) == list(stored) == list(in_memory)
    for key in in_memory:
        assert torch.equal(stored[key], in_memory[key])
        assert torch.equal(again[key], in_memory[key])


@pytest.mark.parametrize(
    ("first", "make", "message"),
    [
        (2, lambda maps: jump(maps, 1, 3), r"h\.1 -> h\.3 in bad must be after layer 2"),
        (2, lambda maps: mat_ffn(maps, 1, 3), r"ffn_in\.1 -> ffn_out\.1 in bad must be after layer 2"),
        (0, lambda maps: jump(maps, 0, 2) + jump(maps, 1, 3), "overlaps"),
        (9, lambda maps: [], "out of range"),
        (0, lambda maps: mat_attn(maps, 0, 2, where=torch.zeros(2, dtype=torch.long)), f"must have {N} rows"),
    ],
)
def test_variants_are_checked_before_anything_is_run(first, make, message, small_model, tmp_path):
    model = small_model("llama")
    ModelLayout.from_model(model)  # which runs the model once
    variants = {"good": Variant(1, []), "bad": Variant(first, make(maps_of("llama")))}
    with counting(model) as counts, pytest.raises(InputError, match=message):
        run_variants(model, examples_of(model), variants, folder=tmp_path / "out", **OPTIONS)
    assert counts == [0] * N_LAYERS
    assert not (tmp_path / "out").exists()
    other = collect(small_model("gpt2"), examples_of(small_model("gpt2")), progress=False)
    foreign = {"0": Variant(0, jump(MapSet.fit(other, pairs="last", progress=False), 0, N_LAYERS))}
    with pytest.raises(InputError):
        run_variants(model, examples_of(model), foreign, progress=False)
    for names in ((), ("tokens",)):
        with pytest.raises(InputError, match="variants must have names other than"):
            run_variants(model, examples_of(model), {name: Variant(3, []) for name in names}, **OPTIONS)


def test_a_variant_that_overflows_changes_no_other(small_model):
    model, maps = small_model("llama"), maps_of("llama")
    examples = examples_of(model)
    infinite = Replacement(lambda h: h * float("inf"), Site("h", 1), Site("h", 2))
    variants = {"good": Variant(1, jump(maps, 1, 2)), "bad": Variant(1, [infinite]), "none": Variant(-1, [])}
    final = run_variants(model, examples, variants, **OPTIONS)
    assert not final["bad"].isfinite().any()
    for key in ("good", "none"):
        assert_near(final[key], alone(model, examples, variants[key].replacements))
