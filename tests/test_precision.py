"""Precision settings of the user change her own passes, and neither fits nor metrics nor exact products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import make_sentences
from torch.utils._python_dispatch import TorchDispatchMode

import matlens
from matlens import metrics
from matlens.ffn import Projection, ValueVectors
from matlens.lens.trained import LayerTraining
from matlens.models import ModelLayout
from matlens.numerics import product_eps, split_product

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.linear, _aten.mv, _aten.dot)


class _RoundedProducts(TorchDispatchMode):
    """Rounds float32 factors of products to bfloat16, as processors may that have no TF32."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = set[str]()
        self.n_rounded = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.settings.add(torch.get_float32_matmul_precision())
        if func.overloadpacket in _PRODUCTS:
            n = 3 if func.overloadpacket in (_aten.addmm, _aten.baddbmm) else 2
            factors = [x.bfloat16().float() if x.dtype == torch.float32 else x for x in args[n - 2 : n]]
            self.n_rounded += args[n - 1].dtype == torch.float32
            args = (*args[: n - 2], *factors, *args[n:])
        return func(*args, **(kwargs or {}))


@contextmanager
def reduced_products(value: str = "medium") -> Iterator[_RoundedProducts]:
    """A user who lets torch reduce float32 products, on a processor that does."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        with _RoundedProducts() as rounded:
            yield rounded
    finally:
        torch.set_float32_matmul_precision(before)


def in_float64(vectors: matlens.Activations) -> dict[str, torch.Tensor]:
    """What is computed in float64, or exactly."""
    x, y = torch.as_tensor(vectors["h.1"]), torch.as_tensor(vectors["h.3"])
    maps = matlens.MapSet.fit(vectors, pairs=[(1, 3)])
    products = matlens.MapSet.fit(vectors, pairs=[(1, 3)], split=True)
    return {
        "fitted": maps[1, 3].weight,
        "with products in float32": products[1, 3].weight,
        "product": split_product(x, y),
        "r2": torch.tensor(metrics.r2(x, y), dtype=torch.float64),
    }


def in_float32(model: Any, vectors: matlens.Activations) -> dict[str, torch.Tensor]:
    """What is computed in float32 from vectors."""
    readout, projection = matlens.Readout(model), Projection.from_model(model)
    h, last = torch.as_tensor(vectors["h.1"]), torch.as_tensor(vectors["h.3"])
    training = LayerTraining(readout, h, last)
    training.tune(steps=3)
    polishing = LayerTraining(readout, h, last)
    polishing.polish(steps=3)
    low_rank = matlens.LinearMap(torch.ones(8, 2), None, "h.1", "h.3", right=h[:2, :8])
    return {
        "mapped": matlens.MapSet.fit(vectors, pairs=[(1, 3)])[1, 3](h),
        "matrix": low_rank.matrix,
        "logits": readout.logits(h),
        "log_probs": readout.log_probs(h),
        "scores": projection.scores(h),
        "top scores": projection.top(h, 4).scores,
        "tuned": training.result()["weight"],
        "polished": polishing.result()["weight"],
    }


def ranks(model: Any, vectors: matlens.Activations) -> dict[str, torch.Tensor]:
    readout, h = matlens.Readout(model), torch.as_tensor(vectors["h.3"])
    tops, rank = readout.top_ids_and_ranks(h, torch.arange(len(h)) % readout.d_vocab)
    return {"tops": tops, "ranks": rank}


@pytest.fixture(scope="module")
def collected(small_model):
    model = small_model("llama")
    examples = matlens.make_examples(model, make_sentences()).head(40)
    return model, matlens.collect(model, examples, progress=False)


def test_autocast_changes_nothing_that_is_computed_from_vectors(collected):
    model, vectors = collected
    true = in_float64(vectors) | in_float32(model, vectors) | ranks(model, vectors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        there = in_float64(vectors) | in_float32(model, vectors) | ranks(model, vectors)
        assert torch.is_autocast_enabled("cpu")
    for name, numbers in true.items():
        assert torch.equal(numbers, there[name]), name


def test_reduced_products_change_no_fit_metric_or_rank(collected):
    model, vectors = collected
    true = in_float64(vectors) | ranks(model, vectors)
    with reduced_products() as rounded:
        there = in_float64(vectors) | ranks(model, vectors)
        assert rounded.n_rounded, "nothing was rounded, so this proves nothing"
    for name, numbers in true.items():
        assert torch.equal(numbers, there[name]), name
    assert rounded.settings == {"medium"}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen2-moe"])
def test_a_model_is_read_alike_where_products_are_reduced(name, model_folder):
    folder = str(model_folder(name))

    def read() -> tuple[Any, ...]:
        model = matlens.load(folder, device="cpu")
        matlens.Readout(model)
        layout = ModelLayout.from_model(model)
        return layout.wiring, layout.kinds, layout.d_mlp, ValueVectors(model).layer(0)

    *true, rows = read()
    with reduced_products():
        *there, reduced_rows = read()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        *under_autocast, autocast_rows = read()
    assert there == under_autocast == true
    assert torch.equal(rows, reduced_rows)
    assert torch.equal(rows, autocast_rows)


def test_a_pass_follows_the_precision_of_the_user(small_model):
    model = small_model("llama")
    examples = matlens.make_examples(model, make_sentences()).head(1)
    tokens = torch.from_numpy(examples.tokens)[None]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits, cache = model.run_with_cache(tokens)
        collected = matlens.collect(model, examples, ["h.3"], positions="all", progress=False)["h.3"]
    assert logits.dtype == torch.bfloat16
    assert torch.equal(torch.as_tensor(collected), cache["blocks.2.hook_out"][0].float())


def test_reduced_products_are_known():
    assert product_eps(torch.float32) == torch.finfo(torch.float32).eps
    for value in ("high", "medium"):
        with reduced_products(value):
            assert product_eps(torch.float32) >= 2**-10
            assert product_eps(torch.float64) == torch.finfo(torch.float64).eps
