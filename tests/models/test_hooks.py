"""What is active in a model's passes is recorded, and leaves no trace afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import make_sentences
from patched_models import patched
from small_maps import random_map
from torch import Tensor

import matlens
from matlens import InputError, collect
from matlens.activations.collecting import stream
from matlens.ffn import Trace, controlled
from matlens.models import active_hooks
from matlens.models.hooks import has_active_dropout
from matlens.patching.replacements import Replacement
from matlens.patching.variants import Variant, run_variants


@pytest.fixture
def model(model_folder):
    return matlens.load(str(model_folder("gpt2")), device="cpu")


@pytest.fixture
def examples(model):
    return matlens.make_examples(model, make_sentences()).head(12)


def doubled(value: Tensor, hook: Any) -> Tensor:
    return 2 * value


def scaled(value: Tensor, hook: Any, *, factor: float) -> Tensor:
    return factor * value


class Doubling:
    """A callable object that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, value: Tensor, hook: Any) -> Tensor:
        return 2 * value


HOOKS: dict[str, Callable[..., Any]] = {
    "doubled": doubled, "scaled": partial(scaled, factor=2.0), "Doubling": Doubling(),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_user_hooks_are_named_by_function_and_hook_point(name, model):
    with model.hooks(fwd_hooks=[("blocks.1.hook_out", HOOKS[name])]):
        assert active_hooks(model) == (f"{name} at blocks.1.hook_out",)
    assert active_hooks(model) == ()


def test_permanent_hooks_and_torch_hooks_are_named(model):
    model.add_hook("blocks.1.hook_out", doubled, is_permanent=True)
    handle = model.blocks[1].mlp.original_component.register_forward_hook(lambda *_: None)
    named = active_hooks(model)
    assert "doubled at blocks.1.hook_out" in named
    assert len(named) == 2
    assert "<lambda> at " in named[1] + named[0]
    handle.remove()
    model.reset_hooks(including_permanent=True)
    assert active_hooks(model) == ()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "falcon-new", "gpt1", "gemma2", "t5"])
def test_a_loaded_model_has_no_active_hooks(kind, model_folder):
    stack = {"stack": "decoder"} if kind == "t5" else {}
    assert active_hooks(matlens.load(str(model_folder(kind)), device="cpu", **stack)) == ()


def test_replacements_and_steering_are_named_by_their_values(model):
    def named(context: Any) -> tuple[str, ...]:
        with context:
            return active_hooks(model)

    ffn = random_map("ffn_in.1", "ffn_out.1")
    first = named(patched(model, [random_map()]))
    assert named(patched(model, [random_map()])) == first  # another object with the same values
    wheres: list[Any] = ["all", "not-first", torch.tensor([1, 2]), torch.tensor([1, 3])]
    contexts = [patched(model, [Replacement.from_map(ffn, where=where)]) for where in wheres]
    contexts += [patched(model, [other]) for other in (random_map(), random_map(seed=1))]
    contexts += [
        controlled(model, ["L0D1"], 3.0),
        controlled(model, ["L0D1"], 4.0),
        controlled(model, ["L0D2"]),
    ]
    assert len(set(map(named, contexts))) == len(contexts)
    with patched(model, [random_map()]), controlled(model, ["L2D2"]):
        assert len(active_hooks(model)) == 2
    assert active_hooks(model) == ()


READ: dict[str, Callable[[Any, Any, Any], Any]] = {
    "collect": lambda m, x, folder: collect(m, x, ["h.2", "h.3"], folder=folder, progress=False),
    "trace": lambda m, x, folder: Trace.run(m, x, k=3, folder=folder, progress=False),
    "variants": lambda m, x, folder: run_variants(m, x, {"as it is": Variant(2, [])}, folder=folder),
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "patched": lambda m: patched(m, [random_map("attn_in.0", "attn_out.0")]),
    "controlled": lambda m: controlled(m, ["L0D5"]),
    "hooked": lambda m: m.hooks(fwd_hooks=[("blocks.0.hook_out", doubled)]),
}


@pytest.mark.parametrize(("read", "change"), [*zip(READ, CHANGES, strict=True)])
def test_a_folder_is_not_resumed_under_other_hooks(read, change, model, examples, tmp_path):
    plain = contextlib.nullcontext
    contexts = (plain, lambda: CHANGES[change](model), plain)
    for i, (first, second) in enumerate(pairwise(contexts)):
        with first():
            READ[read](model, examples, tmp_path / str(i))
        with second(), pytest.raises(InputError):
            READ[read](model, examples, tmp_path / str(i))


def test_a_folder_is_not_resumed_with_another_function_of_one_name(model, examples, tmp_path):
    def make(factor: float) -> Any:
        return lambda value, hook: factor * value

    def read(function: Any) -> Any:
        with model.hooks(fwd_hooks=[("blocks.0.hook_out", function)]):
            return READ["collect"](model, examples, tmp_path / "vectors")

    two = make(2)
    first = read(two)
    assert torch.equal(read(two)["h.3"], first["h.3"])
    with pytest.raises(InputError):
        read(make(3))


def test_results_record_active_hooks_and_keep_the_identity(model, examples):
    plain = collect(model, examples, progress=False)
    assert plain.provenance.active_hooks == ()
    with CHANGES["patched"](model):
        active = active_hooks(model)
        made = [
            collect(model, examples, progress=False),
            next(iter(stream(model, examples, ["h.3"], progress=False))),
        ]
    for each in made:
        assert each.provenance.active_hooks == active
        assert each.provenance.identity == plain.provenance.identity


def test_a_stream_raises_if_hooks_change_between_its_batches(model, examples):
    def batches() -> Iterator[Any]:
        return stream(model, examples, ["h.2"], batch_tokens=30, progress=False)

    for change in CHANGES.values():
        rows = batches()
        next(rows)
        with change(model), pytest.raises(InputError):
            list(rows)


def test_dropout_that_only_the_configuration_knows_is_found(model_folder):
    llama = matlens.load(str(model_folder("llama")), device="cpu")
    llama.train()
    assert not has_active_dropout(llama)  # it drops nothing
    llama.original_model.config.attention_dropout = 0.1
    assert has_active_dropout(llama)
