"""A patched pass is a Hugging Face forward pass patched by hand, in every family and for every scheme."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    APART,
    ARCHITECTURES,
    D_MODEL,
    KINDS,
    LAYERS,
    N_LAYERS,
    SITE_MODULES,
    WIRINGS,
    assert_near,
    load_plain,
    plain_vectors,
)
from handpatched import Part, hand_vectors, jump_part, part, submodule_part, submodules
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import (
    LENGTHS,
    RANGES,
    SENTENCES,
    Models,
    Vectors,
    assert_same,
    differ,
    patched,
    replacement,
    vectors,
)
from torch import Tensor

import matlens
from matlens.models.layout import ModelLayout

# As if patched by hand


def at_modules(name: str, model: Any) -> Vectors:
    """What matlens' sites carry where a plain model has a module that begins or ends there."""
    return [
        {site: value for site, value in found.items() if site.split(".")[0] not in APART.get(name, ())}
        for found in vectors(model)
    ]


@pytest.mark.parametrize("name", [*WIRINGS, *KINDS, "bloom"])
def test_every_jump_is_the_plain_model_with_those_layers_replaced(
    name: str, small_model: Models, plain_model: Models
) -> None:
    unpatched = vectors(small_model(name))
    for seed, (first, last) in enumerate(RANGES):
        replaced = jump_part(first, last, seed, bias=seed % 2 == 0)
        with patched(small_model(name), [replacement(replaced)]):
            ours = at_modules(name, small_model(name))
        assert_same(ours, hand_vectors(name, plain_model(name), [replaced], SENTENCES))
        assert differ(ours, unpatched)


FLAGS = ((False, True, True, False), (True, False, True, False), (True,) * 4, (False,) * 4)


@pytest.mark.parametrize(
    "where",
    ["all", "not-first", "last", (4, 3, 0, 0), FLAGS],
    ids=["all", "not-first", "last", "positions", "flags"],
)
@pytest.mark.parametrize("name", [*WIRINGS, *KINDS])
def test_every_stand_in_is_the_plain_model_with_that_module_replaced(
    name: str, where: Any, small_model: Models, plain_model: Models
) -> None:
    for seed, (module, layer) in enumerate(itertools.product(submodules(name), range(N_LAYERS))):
        replaced = submodule_part(module, layer, seed, where=where)
        with patched(small_model(name), [replacement(replaced)]):
            ours = at_modules(name, small_model(name))
        assert_same(ours, hand_vectors(name, plain_model(name), [replaced], SENTENCES))


@st.composite
def schemes(draw: st.DrawFn, name: str) -> list[Part]:
    """Jumps and stand-ins in blocks of their own, in any order, and maps between blocks."""
    parts: list[Part] = []
    seeds, biases = itertools.count(draw(st.integers(0, 10**6))), st.booleans()
    wheres = [
        st.just("all"),
        st.just("not-first"),
        st.just("last"),
        st.tuples(*(st.integers(0, n - 1) for n in LENGTHS)),
    ]
    # As many truth values as the longest sentence has tokens, or fewer.
    for width in (1, 4, max(LENGTHS)):
        wheres.append(st.tuples(*[st.tuples(*[st.booleans()] * width)] * len(LENGTHS)))
    layer = 0
    while layer <= N_LAYERS:
        if draw(st.integers(0, 3)) == 0:
            parts.append(jump_part(layer, layer, next(seeds), bias=draw(biases)))
        kind = draw(st.sampled_from(["kept", "jump", "inside"]))
        if layer < N_LAYERS and kind == "inside":
            for module in sorted(draw(st.sets(st.sampled_from(submodules(name)), min_size=1))):
                where = draw(st.one_of(wheres))
                parts.append(submodule_part(module, layer, next(seeds), bias=draw(biases), where=where))
        if layer < N_LAYERS and kind == "jump":
            last = draw(st.integers(layer + 1, N_LAYERS))
            parts.append(jump_part(layer, last, next(seeds), bias=draw(biases)))
            layer = last
        else:
            layer += 1
    return draw(st.permutations(parts))


@pytest.mark.parametrize("name", [*ARCHITECTURES, "neox-sequential"])
def test_any_scheme_is_the_plain_model_patched_by_hand(
    name: str, small_model: Models, plain_model: Models
) -> None:
    @settings(derandomize=True, max_examples=25)
    @given(parts=schemes(name), side=st.sampled_from(["right", "left"]))
    def check(parts: list[Part], side: str) -> None:
        with patched(small_model(name), [replacement(replaced) for replaced in parts]):
            ours = vectors(small_model(name), side=side)
        assert_same(ours, hand_vectors(name, plain_model(name), parts, SENTENCES))

    check()


# Exact stand-ins change nothing


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_identity_over_no_blocks_changes_no_bit(name: str, small_model: Models) -> None:
    model = small_model(name)
    before = vectors(model)
    for layer in range(N_LAYERS + 1):
        same = part(f"h.{layer}", f"h.{layer}", bias=False)._replace(weight=torch.eye(D_MODEL))
        with patched(model, [replacement(same)]):
            for ours, theirs in zip(vectors(model), before, strict=True):
                assert all(torch.equal(ours[site], theirs[site]) for site in theirs)


class _Ones(torch.nn.Module):
    """In the place of a gate's activation it lets everything through."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


def made_linear(name: str, folder: Path) -> tuple[Any, Any]:
    """A model, ours and plain, whose activations let all pass and whose norms are fixed matrices.

    One token alone attends to itself alone, so that over sentences of one token all blocks are linear.
    """
    ours, plain = matlens.load(str(folder), device="cpu"), load_plain(name, folder)
    ModelLayout.from_model(ours)
    gated = name in ("llama", "gemma2", "gemma3")
    for model in (ours.original_model, plain):
        for module in list(model.modules()):
            for attribute in {"act", "act_fn", "intermediate_act_fn"} & set(module._modules):
                setattr(module, attribute, _Ones() if gated else torch.nn.Identity())
        for block in model.get_submodule(LAYERS[name][0]):
            for path in {SITE_MODULES[name][kind][0] for kind in SITE_MODULES[name] if kind.startswith("ln")}:
                norm = block.get_submodule(path)
                vars(norm)["forward"] = _fixed(
                    getattr(norm, "hook_in", None), getattr(norm, "hook_out", None)
                )
    return ours, plain


def _fixed(hook_in: Any, hook_out: Any) -> Callable[[Tensor], Tensor]:
    weight = jump_part(0, 1, seed=9).weight
    if hook_in is None:
        return lambda x: x @ weight.T
    return lambda x: hook_out(hook_in(x) @ weight.T)


def true_map(name: str, plain: Any, source: str, target: str, given: Tensor) -> Part:
    """The affine map between two sites of a plain model, from what it makes of these sentences."""
    carried = plain_vectors(name, plain, given)
    x, y = carried[source].flatten(0, 1).double(), carried[target].flatten(0, 1).double()
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], 1), y, driver="gelsd").solution
    fitted = Part(source, target, solution[:-1].T, solution[-1])
    assert_near(fitted.apply(x), y, 1e-5)  # it is linear, and not only nearly
    return fitted


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_true_matrix_of_what_is_linear_changes_nothing(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    model, plain = made_linear(name, model_folder(name))
    jumps = [(f"h.{first}", f"h.{last}") for first, last in RANGES if first < last]
    inside = itertools.product(submodules(name), range(N_LAYERS))
    for source, target in jumps + [(f"{module}_in.{i}", f"{module}_out.{i}") for module, i in inside]:
        if source.startswith(("h.", "attn")):  # attention looks at other tokens
            samples, given = torch.arange(60)[:, None], [[token] for token in (7, 3, 41, 12, 59)]
        else:
            samples, given = (
                torch.randint(60, (20, 40), generator=torch.Generator().manual_seed(0)),
                SENTENCES,
            )
        true, before = true_map(name, plain, source, target, samples), vectors(model, given)
        with patched(model, [replacement(true)]):
            after = vectors(model, given)
        with patched(model, [replacement(part(source, target))]):  # the logits can tell
            assert differ(vectors(model, given), before)
        for ours, theirs in zip(after, before, strict=True):
            for site in ours:
                assert_near(ours[site], theirs[site], 1e-5)


# Half precision


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_half_precision_is_kept(
    name: str, model_folder: Callable[[str], Path], small_model: Models, plain_model: Models
) -> None:
    model = matlens.load(str(model_folder(name)), device="cpu", dtype=torch.bfloat16)
    parts = [jump_part(0, 1), submodule_part("ffn", 1, 1), submodule_part("attn", 2, 2, where="not-first")]
    parts.append(jump_part(2, 2, 3))
    expected = hand_vectors(name, plain_model(name), parts, SENTENCES)
    with patched(model, [replacement(replaced) for replaced in parts]):
        carried = vectors(model)
    for ours, theirs in zip(carried, expected, strict=True):
        assert set(ours) == set(theirs)
        for site in ours:
            assert ours[site].dtype == torch.bfloat16
            assert_near(ours[site].float(), theirs[site], 0.1)
