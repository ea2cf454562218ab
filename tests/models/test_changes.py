"""Whatever is replaced, set or hooked is named, and what is read meanwhile is not the plain model's."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import D_MODEL, load_plain, make_sentences, make_tokenizer
from patched_models import patched
from small_maps import random_map
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

import matlens
from matlens import InputError, MapSet, collect
from matlens.activations.collecting import stream
from matlens.ffn import Trace, ValueVectors, controlled
from matlens.models.changes import changes_of
from matlens.models.identity import ModelIdentity, Provenance
from matlens.patching.replacements import Replacement
from matlens.patching.variants import Variant, run_variants

Models = Callable[[str], Any]


def examples_of(model: Any, n: int = 12) -> Any:
    return matlens.make_examples(model, make_sentences()).head(n)


@pytest.fixture
def model(model_folder: Callable[[str], Path]) -> Any:
    return matlens.load(str(model_folder("gpt2")), device="cpu")


def doubled(value: Tensor, hook: Any) -> Tensor:
    return 2 * value


class Doubling:
    """A callable that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, value: Tensor, hook: Any) -> Tensor:
        return 2 * value

    def method(self, value: Tensor, hook: Any) -> Tensor:
        return 2 * value


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


# What somebody else can do to a model


@contextlib.contextmanager
def added_hook(model: Any, function: Any, *, permanent: bool = False) -> Iterator[None]:
    model.add_hook("blocks.1.hook_out", function, is_permanent=permanent)
    try:
        yield
    finally:
        model.reset_hooks(including_permanent=True)


@contextlib.contextmanager
def torch_hook(register: Any, function: Any) -> Iterator[None]:
    handle = register(function)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def other_forward(owner: Any) -> Iterator[None]:
    before = owner.forward
    owner.forward = lambda *args, **kwargs: before(*args, **kwargs)
    yield
    if isinstance(owner, type):
        owner.forward = before
    else:
        del owner.forward


@contextlib.contextmanager
def parametrized(module: Any) -> Iterator[None]:
    parametrize.register_parametrization(module, "weight", Twice())
    yield
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


@contextlib.contextmanager
def training(model: Any) -> Iterator[None]:
    model.train()
    yield
    model.eval()


def mlp(model: Any) -> Any:
    return model.blocks[1].mlp.original_component


FOREIGN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (lambda m: m.hooks(fwd_hooks=[("blocks.1.hook_out", doubled)]), r"doubled.*blocks\.1\.hook_out"),
    "object": (lambda m: m.hooks(fwd_hooks=[("blocks.1.hook_out", Doubling())]), "Doubling"),
    "permanent": (lambda m: added_hook(m, doubled, permanent=True), "doubled"),
    "forward hook": (lambda m: torch_hook(mlp(m).register_forward_hook, doubled), "forward hook"),
    "pre-hook": (lambda m: torch_hook(mlp(m).register_forward_pre_hook, doubled), "forward pre-hook"),
    "backward": (lambda m: m.hooks(bwd_hooks=[("blocks.1.hook_out", lambda g, hook: g)]), "lambda"),
    "backward hook": (lambda m: torch_hook(mlp(m).register_full_backward_hook, doubled), "a backward hook"),
    "everywhere": (lambda m: torch_hook(register_module_forward_hook, lambda *_: None), "at all modules"),
    "forward": (lambda m: other_forward(mlp(m)), "another forward"),
    "method of a class": (lambda m: other_forward(type(mlp(m))), "of a class"),
    "parametrization": (lambda m: parametrized(mlp(m).c_proj.original_component), "parametrization"),
    "training": (training, "dropout"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_others_hang_on_a_model_is_named(kind: str, model: Any) -> None:
    change, message = FOREIGN[kind]
    assert changes_of(model) == ()
    with change(model):
        assert any(re.search(message, named) for named in changes_of(model))
        assert changes_of(model) == changes_of(model)
    assert changes_of(model) == ()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "gemma3"])
def test_a_plain_model_of_any_family_has_no_changes(kind: str, small_model: Models) -> None:
    assert changes_of(small_model(kind)) == ()
    small_model(kind)(torch.tensor([[3, 4, 5]]))
    assert changes_of(small_model(kind)) == ()


def test_dropout_that_only_the_configuration_knows_is_named(model_folder: Callable[[str], Path]) -> None:
    llama = matlens.load(str(model_folder("llama")), device="cpu")
    llama.train()
    assert changes_of(llama) == ()  # it drops nothing
    llama.original_model.config.attention_dropout = 0.1
    assert "dropout" in changes_of(llama)[0]


def test_hooks_that_only_look_alike_are_told_apart(model: Any) -> None:
    """Nobody can see what a function will do, so another function is another change."""

    def make(factor: float) -> Any:
        return lambda value, hook: factor * value

    def named(function: Any) -> tuple[str, ...]:
        with model.hooks(fwd_hooks=[("blocks.1.hook_out", function)]):
            return changes_of(model)

    two, three = make(2), make(3)
    assert named(two) != named(three)
    assert named(two) == named(two)
    assert named(Doubling()) != named(Doubling())


def test_a_copy_of_a_patched_model_is_not_plain(model: Any) -> None:
    with patched(model, [random_map()]):
        other = copy.deepcopy(model)
    assert changes_of(model) == ()
    assert changes_of(other)


# What this library does to a model


def test_replacements_and_coefficients_are_named_by_their_numbers(model: Any) -> None:
    def named(context: Any) -> tuple[str, ...]:
        with context:
            return changes_of(model)

    first = named(patched(model, [random_map()]))
    assert len(first) == 1
    assert first[0].startswith("h.0 -> h.1 replaced by the map ")
    assert named(patched(model, [random_map()])) == first  # another object with the same numbers
    assert named(patched(model, [random_map(seed=1)])) != first
    with_bias = replace(random_map(), bias=torch.zeros(D_MODEL))
    assert named(patched(model, [with_bias])) != first
    ffn = random_map("ffn_in.1", "ffn_out.1")
    wheres: list[Any] = ["all", "not-first", torch.tensor([1, 2]), torch.tensor([1, 3])]
    changes = {named(patched(model, [Replacement.from_map(ffn, where=where)])) for where in wheres}
    assert len(changes) == len(wheres)
    assert named(controlled(model, ["L0D1"], 3.0)) != named(controlled(model, ["L0D1"], 4.0))
    assert named(controlled(model, ["L0D1"], 3.0)) != named(controlled(model, ["L0D2"], 3.0))


# Vectors of a changed model

READ: dict[str, Callable[[Any, Any, Any], Any]] = {
    "collect": lambda m, x, folder: collect(m, x, ["h.2", "h.3"], folder=folder, progress=False),
    "trace": lambda m, x, folder: Trace.run(m, x, k=3, folder=folder, progress=False),
    "variants": lambda m, x, folder: run_variants(m, x, {"as it is": Variant(2, [])}, folder=folder),
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "patched": lambda m: patched(m, [random_map("ffn_in.0", "ffn_out.0")]),
    "controlled": lambda m: controlled(m, ["L0D5"]),
    "hooked": lambda m: m.hooks(fwd_hooks=[("blocks.0.hook_out", doubled)]),
}


@pytest.mark.parametrize(("read", "change"), [*zip(READ, CHANGES, strict=True)])
def test_a_folder_of_the_plain_model_is_refused_for_a_changed_one_and_the_other_way_round(
    read: str, change: str, model: Any, tmp_path: Path
) -> None:
    examples = examples_of(model)
    contexts = (contextlib.nullcontext(), CHANGES[change](model), contextlib.nullcontext())
    for i, (first, second) in enumerate(pairwise(contexts)):
        folder = tmp_path / str(i)
        if i:
            first = CHANGES[change](model)
        with first:
            READ[read](model, examples, folder)
        with second, pytest.raises(InputError, match=r"belongs to another job.*model\.changes"):
            READ[read](model, examples, folder)


@pytest.mark.parametrize("change", CHANGES)
def test_results_in_memory_carry_what_was_changed(change: str, model: Any) -> None:
    examples = examples_of(model)
    plain = collect(model, examples, progress=False)
    context = CHANGES[change](model)
    with context:
        changes = changes_of(model)
        activations = collect(model, examples, progress=False)
        trace = Trace.run(model, examples, k=3, progress=False)
        rows = next(iter(stream(model, examples, ["h.3"], progress=False)))
        values = ValueVectors(model)
    assert activations.provenance.identity.changes == trace.provenance.identity.changes == changes
    assert rows.provenance.identity.changes == changes
    assert values.identity == ValueVectors(model).identity  # weights are weights, whatever hangs there
    with pytest.raises(InputError, match=r"do not belong together.*nothing replaced or hooked"):
        activations.provenance.check_same(plain.provenance, ours="the ones", theirs="the others")
    maps = MapSet.fit(activations, pairs=[(1, 3)], progress=False)
    plain_maps = MapSet.fit(plain, pairs=[(0, 1)], progress=False)
    with pytest.raises(InputError, match="do not belong together"):
        MapSet([*maps.values(), *plain_maps.values()])
    with pytest.raises(InputError, match="do not belong together"):
        plain_maps[0, 1].then(maps[1, 3])


def test_streaming_is_refused_where_the_model_changes_on_the_way(model: Any) -> None:
    def batches() -> Iterator[Any]:
        return stream(model, examples_of(model), ["h.2"], batch_tokens=30, progress=False)

    for change in CHANGES.values():
        rows = batches()
        next(rows)
        with change(model), pytest.raises(InputError, match="was changed while it was read"):
            next(rows)
        with change(model):
            rows = batches()
            next(rows)
        with pytest.raises(InputError, match="was changed while it was read"):
            next(rows)


# Modules without weights


def test_a_module_in_the_place_of_another_is_seen_though_it_has_no_weights(
    model: Any, model_folder: Callable[[str], Path]
) -> None:
    mlp = model.original_model.transformer.h[1].mlp._original_component
    before, act = ModelIdentity.from_model(model), mlp.act
    mlp.act = nn.Identity()
    (change,) = changes_of(model)
    assert change == "another module torch.nn.modules.linear.Identity() at transformer.h.1.mlp.act"
    after = ModelIdentity.from_model(model)
    assert after.fingerprint == before.fingerprint
    with pytest.raises(InputError, match=r"Identity\(\) at transformer\.h\.1\.mlp\.act"):
        Provenance(before).check_same(after, ours="the maps")
    with pytest.raises(InputError, match=r"Identity"):  # a copy knows what it was before, too
        Provenance(before).check_same(ModelIdentity.from_model(copy.deepcopy(model)), ours="the maps")
    mlp.act = act
    assert changes_of(model) == ()
    mlp.act = Twice()  # of a class that this process alone knows
    assert re.search(r"'Twice' of \S*test_changes \(number \d+ of process", changes_of(model)[0])


def test_settings_of_modules_are_seen_and_one_gone_is(model: Any) -> None:
    norm = model.original_model.transformer.ln_f._original_component
    norm.eps = 0.5
    (change,) = changes_of(model)
    assert "LayerNorm(eps=0.5) at transformer.ln_f" in change
    norm.eps = 1e-5
    assert changes_of(model) == ()
    del model.original_model.transformer._modules["drop"]
    assert changes_of(model) == ("no module at transformer.drop",)


@pytest.mark.parametrize("name", ["bert", "gemma3"])
def test_a_users_bridge_has_the_modules_of_its_configuration(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    plain = load_plain(name, model_folder(name))
    options = {"hf_model": plain, "tokenizer": make_tokenizer(bert=name == "bert"), "device": "cpu"}
    bridge = matlens.wrap(TransformerBridge.boot_transformers(str(model_folder(name)), **options))
    state = torch.random.get_rng_state()
    assert changes_of(bridge) == ()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_bridge_booted_with_another_module_is_not_the_plain_one(
    model_folder: Callable[[str], Path],
) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    plain = load_plain("gpt2", model_folder("gpt2"))
    plain.transformer.h[0].mlp.act = nn.ReLU()
    options = {"hf_model": plain, "tokenizer": make_tokenizer(), "device": "cpu"}
    bridge = matlens.wrap(TransformerBridge.boot_transformers(str(model_folder("gpt2")), **options))
    (change,) = changes_of(bridge)
    assert change == "another module torch.nn.modules.activation.ReLU() at transformer.h.0.mlp.act"


class Adapter(nn.Module):
    """As much of PEFT's tuner layers as tells whether they are on."""

    def __init__(self) -> None:
        super().__init__()
        self.off, self.active_adapters, self.scaling = False, ["default"], {"default": 2.0}

    @property
    def disable_adapters(self) -> bool:
        return self.off


def test_adapters_are_seen_switched_on_and_off(model: Any) -> None:
    adapter = Adapter()
    model.original_model.transformer.h[0].add_module("lora", adapter)
    on = changes_of(model)
    assert any("the adapters ['default'] switched on" in change for change in on)
    adapter.off = True
    off = changes_of(model)
    assert any("switched off" in change for change in off)
    assert off != on
    adapter.off, adapter.scaling["default"] = False, 1.0
    assert changes_of(model) not in (on, off)
