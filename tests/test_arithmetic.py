"""What the library computes has the precision of its numbers, whatever autocast and torch's switches say."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import make_sentences

import matlens
from matlens.activations.collecting import stream
from matlens.arithmetic import is_reduced, own_precision
from matlens.ffn import Projection


@contextlib.contextmanager
def precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def backend(value: str) -> Iterator[None]:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, matmul.fp32_precision = matmul.fp32_precision, value
    try:
        yield
    finally:
        matmul.fp32_precision = before


REDUCED: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "medium": lambda: precision("medium"),
    "backend": lambda: backend("bf16"),
}


def results(model: Any) -> dict[str, torch.Tensor]:
    """Values of passes, fits, readouts and products."""
    examples = matlens.make_examples(model, make_sentences()).head(12)
    vectors = matlens.collect(model, examples, progress=False)
    maps, readout = matlens.MapSet.fit(vectors, pairs="last"), matlens.Readout(model)
    h = torch.as_tensor(vectors["h.1"])
    streamed = next(iter(stream(model, examples, ["h.2"], progress=False))).vectors["h.2"]
    return {
        "collected": torch.as_tensor(vectors["h.3"]),
        "streamed": streamed,
        "fitted": maps[1, 3].weight,
        "mapped": maps[1, 3](h),
        "logits": readout.logits(h),
        "top": readout.top_ids(h),
        "scores": Projection.from_model(model).scores(h),
    }


@pytest.fixture(scope="module")
def true(small_model):
    return results(small_model("llama"))


@pytest.mark.parametrize("how", REDUCED)
def test_numbers_are_those_of_the_models_own_precision(how, true, small_model):
    with REDUCED[how]():
        before = torch.is_autocast_enabled("cpu"), torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        assert is_reduced()
        there = results(small_model("llama"))
        assert (
            torch.is_autocast_enabled("cpu"),
            torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        ) == before
    for name, numbers in true.items():
        assert torch.equal(numbers, there[name]), name
    assert not is_reduced()


def test_a_pass_of_the_user_follows_autocast(small_model):
    model, tokens = small_model("llama"), torch.tensor([[5, 6, 7]])
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens, return_type="logits").dtype == torch.bfloat16


def test_settings_stay_changed_until_the_last_thread_has_left():
    inside, leave = threading.Event(), threading.Event()
    seen: list[bool] = []

    def work() -> None:
        with own_precision():
            inside.set()
            leave.wait(5)
            seen.append(is_reduced())

    with precision("medium"):
        thread = threading.Thread(target=work)
        with own_precision():
            thread.start()
            assert inside.wait(5)
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"  # type: ignore[attr-defined]
        leave.set()
        thread.join()
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]
    assert seen == [False]
