"""Operations counted from sizes are those that torch counts while the work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import D_MODEL, N_LAYERS
from torch.utils.flop_counter import FlopCounterMode

from matlens import InputError, Readout
from matlens.lens.costs import closed_form_flops, jacobian_flops, training_flops
from matlens.lens.maps import LayerMap
from matlens.lens.training import polish, tune

Models = Callable[[str], Any]


def counted(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_operations_of_training_are_those_that_are_done(small_model: Models) -> None:
    readout, h = Readout(small_model("llama")), numbers(64, D_MODEL)
    seen = counted(lambda: tune(readout, h, h + 1, steps=4, passes=2))
    assert training_flops(2 * 64, D_MODEL, 60) == seen
    seen = counted(lambda: polish(readout, LayerMap(), h, h + 1, steps=2, batch=32, tokens=60))
    pilot = training_flops(2 * 32, D_MODEL, 60, pilot=64, d_vocab=60)
    orthogonal = 2 * 5 * 3 * 2 * D_MODEL**3  # of a step's matrix, which does not grow with rows or tokens
    assert seen == pilot + orthogonal


def test_operations_of_jacobians_are_those_of_as_many_passes(small_model: Models) -> None:
    model, tokens = small_model("llama"), torch.arange(2, 22)[None]
    with torch.no_grad():
        seen = counted(lambda: model(tokens))
    parameters = sum(weight.numel() for weight in model.blocks.parameters() if weight.ndim == 2)
    # Back through the blocks to activations alone is as much work as forward. Of a pass, the unembedding and
    # attention's own products, which grow with the square of the length, are not counted.
    others = 2 * 20 * D_MODEL * 60 + 2 * 2 * 20**2 * D_MODEL * N_LAYERS
    assert jacobian_flops(20, D_MODEL, parameters, at_once=1) == (seen - others) * (D_MODEL + 1)


def test_closed_forms_grow_with_rows_and_with_the_square_of_the_width() -> None:
    assert closed_form_flops(20_000, 100) == pytest.approx(10 * closed_form_flops(2_000, 100), rel=0.01)
    assert closed_form_flops(100_000, 200) == pytest.approx(4 * closed_form_flops(100_000, 100), rel=0.01)
    assert 0 < closed_form_flops(3, 100) < closed_form_flops(100, 100)


@pytest.mark.refused
def test_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match="rows"):
        training_flops(-1, 4, 4)
    with pytest.raises(InputError, match=r"^n must be"):
        closed_form_flops(1.5, 4)  # type: ignore[arg-type]
