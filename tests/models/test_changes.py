"""Everything that is replaced, set or hooked is named, and vectors read with it are not the plain model's."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import D_MODEL, load_plain, make_sentences, make_tokenizer
from patched_models import patched
from small_maps import random_map
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from transformer_lens.model_bridge import TransformerBridge

import matlens
from matlens import InputError, collect
from matlens.activations.collecting import stream
from matlens.ffn import Trace, ValueVectors, controlled
from matlens.models import changes
from matlens.models.changes import changes_of
from matlens.models.identity import ModelIdentity, Provenance
from matlens.patching.replacements import Replacement
from matlens.patching.variants import Variant, run_variants


@pytest.fixture
def model(model_folder):
    return matlens.load(str(model_folder("gpt2")), device="cpu")


def examples_of(model: Any, n: int = 12) -> Any:
    return matlens.make_examples(model, make_sentences()).head(n)


def doubled(value: Tensor, hook: Any) -> Tensor:
    return 2 * value


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Adapter(nn.Module):
    """As much of PEFT's tuner layers as tells whether they are on."""

    off = False

    @property
    def disable_adapters(self) -> bool:
        return self.off


# What somebody else can do to a model


def mlp(model: Any) -> Any:
    return model.blocks[1].mlp.original_component


@contextlib.contextmanager
def permanent(model: Any) -> Iterator[None]:
    model.add_hook("blocks.1.hook_out", doubled, is_permanent=True)
    yield
    model.reset_hooks(including_permanent=True)


@contextlib.contextmanager
def torch_hook(register: Any) -> Iterator[None]:
    handle = register(lambda *_: None)
    yield
    handle.remove()


@contextlib.contextmanager
def with_value(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    if name == "forward" and not isinstance(owner, type):
        del owner.forward
    else:
        setattr(owner, name, before)


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


def transformer(model: Any) -> Any:
    return model.original_model.transformer


FOREIGN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (lambda m: m.hooks(fwd_hooks=[("blocks.1.hook_out", doubled)]), r"doubled.*blocks\.1\.hook_out"),
    "permanent": (permanent, "doubled"),
    "forward hook": (lambda m: torch_hook(mlp(m).register_forward_hook), "_forward_hooks"),
    "everywhere": (lambda m: torch_hook(register_module_forward_hook), "at all modules"),
    "forward": (lambda m: with_value(mlp(m), "forward", lambda x: x), "another forward"),
    "method of a class": (lambda m: with_value(type(mlp(m)), "forward", lambda s, x: x), "of a class"),
    "parametrization": (lambda m: parametrized(mlp(m).c_proj.original_component), "parametrization"),
    "training": (training, "dropout"),
    "module": (lambda m: with_value(mlp(m), "act", nn.ReLU()), r"ReLU\(\) at transformer\.h\.1\.mlp\.act$"),
    "class": (lambda m: with_value(mlp(m), "act", Twice()), r"'Twice' of \S*test_changes \(number \d+ of"),
    "setting": (
        lambda m: with_value(transformer(m).ln_f._original_component, "eps", 0.5),
        r"LayerNorm\(eps=0.5\) at transformer\.ln_f",
    ),
}


def test_what_others_change_in_a_model_is_named_and_makes_it_another_one(model):
    before = ModelIdentity.from_model(model)
    for kind, (change, message) in FOREIGN.items():
        assert changes_of(model) == (), kind
        with change(model):
            after = ModelIdentity.from_model(model)
            assert any(re.search(message, named) for named in after.changes or ()), kind
            with pytest.raises(InputError):
                Provenance(before).check_same(after, ours="the maps")
            if kind in ("module", "setting"):  # a copy knows what it was before, too
                assert changes_of(copy.deepcopy(model)) == after.changes
    assert changes_of(model) == ()


def test_adapters_are_seen_switched_on_and_off(model):
    adapter: Any = Adapter()
    scaling = {"wikipedia-english-2024": 2.0, "code-python-instruct-v2": 1.0, "chat": 1.0}
    adapter.active_adapters, adapter.scaling = ["default"], scaling
    model.original_model.transformer.h[0].add_module("lora", adapter)
    first = ModelIdentity.from_model(model)
    parts = changes._parts_of(model.original_model)
    model.matlens_plain = model.matlens_plain._replace(parts=parts)  # as a bridge of an adapted model
    assert changes_of(model) == ()
    seen = {first.changes}
    for name, value in (("off", True), ("active_adapters", ["other"]), ("scaling", {**scaling, "chat": 5.0})):
        setattr(adapter, name, value)
        seen.add(changes_of(model))
    assert len(seen) == 4


BUFFERS = {
    "llama": "model.rotary_emb.inv_freq",
    "bert": "bert.embeddings.position_ids",
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_other_values_in_a_buffer_are_another_model_and_another_precision_is_not(kind, model_folder):
    model = matlens.load(str(model_folder(kind)), device="cpu")
    state = torch.random.get_rng_state()
    assert changes_of(model) == ()
    assert torch.equal(torch.random.get_rng_state(), state)
    named = dict(model.original_model.named_buffers())
    (values,) = (v for name, v in named.items() if name.replace("_original_component.", "") == BUFFERS[kind])
    seen = set()
    for _ in range(2):  # another change has another name
        values[..., -1:] -= 0.01 * values[..., -1:] if values.is_floating_point() else 1
        (change,) = changes_of(model)
        assert f"other values in the buffer {BUFFERS[kind]} " in change
        assert changes_of(copy.deepcopy(model)) == (change,)
        seen.add(change)
    assert len(seen) == 2
    for dtype in (torch.bfloat16, torch.float64):
        rounded = matlens.load(str(model_folder(kind)), device="cpu")
        rounded.original_model.to(dtype)
        assert changes_of(rounded) == ()


@torch.no_grad()
def test_settings_that_a_bridge_reads_at_every_pass_are_seen(model):
    tokens = torch.randint(6, 50, (1, 9))
    settings = {"n_heads": 2, "eps": 0.5, "scale_attn_by_inverse_layer_idx": True, "uses_rms_norm": True}
    logits = model(tokens)
    for name, value in settings.items():
        with with_value(model.cfg, name, value):
            (change,) = changes_of(model)
            assert f"{name}={value}" in change
            assert changes_of(copy.deepcopy(model)) == (change,)
            # GPT-2's norms subtract the mean whatever the last one says, Cohere's do not.
            assert torch.equal(model(tokens), logits) == (name == "uses_rms_norm")
    assert changes_of(model) == ()


def test_edits_are_seen_where_the_configuration_does_not_make_a_model(model_folder, monkeypatch):
    monkeypatch.setattr(changes, "plain_model", lambda model: None)  # as with code that came with a model
    bridge = TransformerBridge.boot_transformers(str(model_folder("llama")), device="cpu")
    model = matlens.wrap(bridge)
    named = model.original_model.named_buffers()
    (values,) = (values for name, values in named if name.endswith(".inv_freq"))
    values.mul_(2)
    mlp(model).act_fn = nn.ReLU()
    other, buffer = changes_of(model)
    assert "another module torch.nn.modules.activation.ReLU()" in other
    assert "other values in the buffer model.rotary_emb.inv_freq" in buffer
    assert changes_of(copy.deepcopy(model)) == (other, buffer)


# What this library does to a model


def test_replacements_and_coefficients_are_named_by_their_values(model):
    def named(context: Any) -> tuple[str, ...]:
        with context:
            return changes_of(model)

    ffn = random_map("ffn_in.1", "ffn_out.1")
    first = named(patched(model, [random_map()]))
    assert named(patched(model, [random_map()])) == first  # another object with the same values
    wheres: list[Any] = ["all", "not-first", torch.tensor([1, 2]), torch.tensor([1, 3])]
    contexts = [patched(model, [Replacement.from_map(ffn, where=where)]) for where in wheres]
    others = random_map(), random_map(seed=1), replace(random_map(), bias=torch.zeros(D_MODEL))
    contexts += [patched(model, [other]) for other in others]
    contexts += [
        controlled(model, ["L0D1"], 3.0),
        controlled(model, ["L0D1"], 4.0),
        controlled(model, ["L0D2"], 3.0),
    ]
    assert len(set(map(named, contexts))) == len(contexts)
    with patched(model, [random_map()]):
        other = copy.deepcopy(model)
    assert changes_of(model) == ()
    assert changes_of(other)


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
    read, change, model, tmp_path
):
    examples = examples_of(model)
    plain = contextlib.nullcontext
    contexts = (plain, lambda: CHANGES[change](model), plain)
    for i, (first, second) in enumerate(pairwise(contexts)):
        with first():
            READ[read](model, examples, tmp_path / str(i))
        with second(), pytest.raises(InputError, match=r"belongs to another job.*model\.changes"):
            READ[read](model, examples, tmp_path / str(i))


def test_results_in_memory_carry_what_was_changed(model):
    examples = examples_of(model)
    with CHANGES["patched"](model):
        active = changes_of(model)
        activations = collect(model, examples, progress=False)
        trace = Trace.run(model, examples, k=3, progress=False)
        rows = next(iter(stream(model, examples, ["h.3"], progress=False)))
        values = ValueVectors(model)
    for made in (activations, trace, rows):
        assert made.provenance.identity.changes == active
    assert values.identity == ValueVectors(model).identity  # weights are weights, whatever is hooked


def test_streaming_is_refused_where_the_model_changes_on_the_way(model):
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


# Threads


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
    return future.exception() or future.result()


def interrupt(value: Tensor, hook: Any) -> None:
    raise RuntimeError


@pytest.mark.parametrize("kind", ["patched", "read"])
def test_another_thread_cannot_use_a_model_that_is_changed_or_read(kind, model, monkeypatch):
    monkeypatch.setattr(changes, "_WAIT", 0.1)
    examples, tokens = examples_of(model), torch.randint(6, 50, (1, 9))
    contexts: dict[str, Callable[[], Any]] = {
        "patched": lambda: patched(model, [random_map()]),
        "read": lambda: changes.reading(model, []),
    }
    uses: list[Callable[[], Any]] = [
        lambda: collect(model, examples, ["h.3"], progress=False),
        lambda: patched(model, [random_map("ffn_in.2", "ffn_out.2")]).__enter__(),
        lambda: model(tokens),
        lambda: model.original_model(tokens),
    ]
    with contexts[kind]():
        other = copy.deepcopy(model)  # is free
        assert in_a_thread(lambda: other(tokens)).shape == (1, 9, 60)
        for use in uses:
            error = in_a_thread(use)
            assert isinstance(error, InputError)
            assert "thread" in str(error)
        with pytest.raises(RuntimeError), model.hooks(fwd_hooks=[("blocks.1.hook_in", interrupt)]):
            model(tokens)
    assert in_a_thread(lambda: changes_of(model)) == ()
    assert in_a_thread(lambda: model(tokens)).shape == (1, 9, 60)


def test_two_threads_that_read_one_model_do_not_mix_their_vectors(model):
    parts = [examples_of(model, n) for n in (24, 7)]

    def read(i: int) -> list[Any]:
        return [collect(model, parts[i], batch_tokens=40, progress=False) for _ in range(4)]

    expected = [read(i)[0] for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for alone, together in zip(expected, pool.map(read, range(2)), strict=True):
            assert all(torch.equal(alone[site], again[site]) for again in together for site in alone)


def test_dropout_that_only_the_configuration_knows_is_named(model_folder):
    llama = matlens.load(str(model_folder("llama")), device="cpu")
    llama.train()
    assert changes_of(llama) == ()  # it drops nothing
    llama.original_model.config.attention_dropout = 0.1
    assert "dropout" in changes_of(llama)[0]


def test_a_bridge_of_another_module_is_not_the_plain_one(model_folder):
    plain = load_plain("gpt2", model_folder("gpt2"))
    plain.transformer.h[0].mlp.act = nn.ReLU()
    options = {"hf_model": plain, "tokenizer": make_tokenizer(), "device": "cpu"}
    model = matlens.wrap(TransformerBridge.boot_transformers(str(model_folder("gpt2")), **options))
    change = "another module torch.nn.modules.activation.ReLU() at transformer.h.0.mlp.act"
    assert changes_of(model) == (change,)


class Doubling:
    """A callable that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, value: Tensor, hook: Any) -> Tensor:
        return 2 * value


def test_functions_that_only_look_alike_are_told_apart(model):
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
