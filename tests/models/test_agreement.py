"""Models whose attention counts distances are compared with the plain model, which others are not."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_near
from transformer_lens.model_bridge import TransformerBridge

import matlens
from matlens import InputError
from matlens.models import agreement
from matlens.models.changes import changes_of
from matlens.models.families import bridging

Models = Callable[[str], Any]
FALCONS = ("falcon-alibi", "falcon-alibi-multi-query")
TOKENS = torch.tensor([[7, 3, 41, 12, 12, 59, 30, 22, 8, 17]])


def boot(folder: Path) -> TransformerBridge:
    return TransformerBridge.boot_transformers(str(folder), device="cpu")


@pytest.mark.parametrize("name", FALCONS)
def test_a_bridge_that_counts_twice_is_refused(
    name: str, model_folder: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_alone = types.FunctionType((lambda *_: None).__code__, vars(bridging), "count_once")
    monkeypatch.setattr(bridging, "count_once", left_alone)
    with pytest.raises(InputError, match="counts the distances between tokens"):
        matlens.load(str(model_folder(name)), device="cpu")
    with pytest.raises(InputError, match="counts the distances between tokens"):
        matlens.wrap(boot(model_folder(name)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FALCONS)
def test_half_precision_is_no_difference(
    name: str, dtype: torch.dtype, model_folder: Models, plain_model: Models
) -> None:
    half = matlens.load(str(model_folder(name)), dtype=dtype, device="cpu")
    with torch.inference_mode():
        assert_near(half(TOKENS).float(), plain_model(name)(TOKENS).logits, 0.03)


def test_a_bridge_with_a_hook_of_its_own_is_compared_no_more(model_folder: Models) -> None:
    """What somebody hung on it changes its logits, and is named as a change."""
    bridge = boot(model_folder(FALCONS[0]))
    bridge.add_hook("blocks.1.hook_out", lambda h, hook: 2 * h)
    assert len(changes_of(matlens.wrap(bridge))) == 1


def test_other_models_are_not_compared(model_folder: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every comparison is a second pass."""
    compared: list[str] = []
    monkeypatch.setattr(agreement, "plain_state", lambda model: compared.append(model.cfg.model_name))
    matlens.load(str(model_folder("gpt2")), device="cpu")
    matlens.wrap(boot(model_folder("bloom")))
    assert not compared
