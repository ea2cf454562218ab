"""A change holds for all threads and is made by one alone, and passes of two threads are never mixed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_sentences
from patched_models import patched
from small_maps import random_map
from torch import Tensor

import matlens
from matlens import InputError, collect
from matlens.ffn import controlled
from matlens.models.changes import changes_of, unchanged


def examples_of(model: Any, n: int = 12) -> Any:
    return matlens.make_examples(model, make_sentences()).head(n)


@pytest.fixture
def model(model_folder: Callable[[str], Path]) -> Any:
    return matlens.load(str(model_folder("gpt2")), device="cpu")


def in_a_thread(work: Callable[[], Any]) -> Any:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except InputError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def test_a_change_in_another_thread_is_refused_and_a_reading_one_names_it(model: Any) -> None:
    examples = examples_of(model)

    def enter() -> None:
        with patched(model, [random_map("ffn_in.2", "ffn_out.2")]):
            pass

    with patched(model, [random_map()]):
        error = in_a_thread(enter)
        assert isinstance(error, InputError)
        assert "in another thread" in str(error)
        read = in_a_thread(lambda: collect(model, examples, ["h.3"], progress=False))
        assert read.provenance.identity.changes == changes_of(model)
    assert in_a_thread(enter) is None
    assert changes_of(model) == ()


@pytest.mark.parametrize("context", ["patched", "controlled", "read"])
def test_a_pass_inside_another_threads_pass_is_refused(model: Any, context: str) -> None:
    """The first pass starts the second thread and waits for it, so both are under way whatever the timing."""
    tokens, more = torch.randint(6, 50, (2, 9)), torch.randint(6, 50, (1, 9))
    examples, said = examples_of(model), []

    def run() -> None:
        (model.original_model if context == "patched" else model)(more)

    def start(value: Tensor, hook: Any) -> None:
        said.append(in_a_thread(run))

    contexts: dict[str, Callable[[], Any]] = {
        "patched": lambda: patched(model, [random_map()]),
        "controlled": lambda: controlled(model, ["L1D3"], 3.0),
        "read": contextlib.nullcontext,
    }

    def first_pass() -> Tensor:
        if context == "read":
            return collect(model, examples, ["h.3"], progress=False)["h.3"]
        with torch.inference_mode():
            return model(tokens)

    with contexts[context]():
        alone = first_pass()
    model.add_hook("blocks.0.hook_out", start)  # of somebody else: it changes what is collected in name only
    try:
        with contexts[context]():
            together = first_pass()
    finally:
        model.reset_hooks()
    assert said
    assert all(
        isinstance(error, InputError) and "under way in another thread" in str(error) for error in said
    )
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    with contexts[context]():  # a failed pass has ended, too
        with pytest.raises(RuntimeError), model.hooks(fwd_hooks=[("blocks.1.hook_in", interrupt)]):
            model(tokens)
        assert in_a_thread(lambda: model(more)).shape == (1, 9, 60)


def interrupt(value: Tensor, hook: Any) -> None:
    raise RuntimeError


def test_two_threads_that_read_one_model_do_not_mix_their_vectors(model: Any) -> None:
    """Every pass is begun while the other thread's hooks hang on the model, too."""
    many = examples_of(model, 24)
    parts = [many.head(24), many.head(7)]
    expected = [collect(model, part, batch_tokens=40, progress=False) for part in parts]
    results: list[Any] = [None, None]

    def run(i: int) -> None:
        results[i] = [collect(model, parts[i], batch_tokens=40, progress=False) for _ in range(8)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for alone, together in zip(expected, results, strict=True):
        for again in together:
            assert all(torch.equal(alone[site], again[site]) for site in alone)
    assert changes_of(model) == ()


def test_a_change_that_another_thread_makes_and_takes_back_is_noticed(model: Any) -> None:
    def enter() -> None:
        with patched(model, [random_map("ffn_in.2", "ffn_out.2")]):
            pass

    with pytest.raises(InputError, match="changed while it was read"), unchanged(model, ()):
        assert in_a_thread(enter) is None
    with unchanged(model, ()):
        pass
