"""What bridges do otherwise than the plain model is put right, in every pass, or the model is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bridged import TOKENS, boot, logits
from conftest import N_LAYERS, assert_near, load_plain
from transformers import AutoTokenizer

import matlens
from matlens import InputError
from matlens.models import ModelIdentity
from matlens.models.changes import changes_of
from matlens.models.layout import ModelLayout

Models = Callable[[str], Any]
FALCONS = ("falcon-alibi", "falcon-alibi-multi-query")


@pytest.mark.parametrize("name", FALCONS)
def test_distances_count_once(
    name: str, small_model: Models, plain_model: Models, model_folder: Models
) -> None:
    """As in the attention that transformers takes by default, and not as in the one that gives patterns."""
    ours, plain = logits(small_model(name)), logits(plain_model(name))
    assert_near(ours, plain)
    doubled = logits(load_plain(name, model_folder(name), attn_implementation="eager"))
    apart = float((doubled - plain).abs().max())
    assert apart > 1e-3 * float(plain.abs().max())
    assert_near(logits(boot(model_folder(name))), doubled)  # what a bridge does that is left as it is


@pytest.mark.parametrize("name", FALCONS)
def test_distances_count_once_while_a_model_writes(
    name: str, small_model: Models, plain_model: Models
) -> None:
    made = small_model(name).generate(
        TOKENS[:1], 8, stop_at_eos=False, do_sample=False, verbose=False,
        return_type="tokens",
    )  # fmt: skip
    expected = TOKENS[:1]
    for _ in range(8):
        expected = torch.cat([expected, plain_model(name)(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("name", [*FALCONS, "gpt1"])
def test_a_bridge_of_ones_own_is_put_right(name: str, small_model: Models, model_folder: Models) -> None:
    """It is refused as it is; after `wrap`, also twice and copied, it is the loaded model."""
    bridge = boot(model_folder(name))
    with pytest.raises(InputError, match=r"give the bridge to matlens\.wrap\(\)"):
        matlens.Readout(bridge)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(name))
    matlens.wrap(matlens.wrap(bridge, tokenizer=tokenizer))
    loaded = small_model(name)
    for model in (bridge, copy.deepcopy(bridge)):
        assert changes_of(model) == ()
        assert ModelIdentity.from_model(model).key == ModelIdentity.from_model(loaded).key
        assert torch.equal(logits(model), logits(loaded))
        hooks = {
            name: hook for name, hook in ModelLayout.from_model(model).hooks.items() if "resid_post" in name
        }
        assert [hook.carries for hook in hooks.values()] == N_LAYERS * ["carries vectors"]


def test_a_mask_hides_what_is_behind_a_token(
    small_model: Models, plain_model: Models, model_folder: Models
) -> None:
    """In the bridge of OpenAI's first GPT as it is, a token saw those behind it wherever there was a mask."""
    ours, plain = logits(small_model("gpt1")), logits(plain_model("gpt1"))
    assert_near(ours, plain)
    apart = float((logits(boot(model_folder("gpt1"))) - plain).abs().max())
    assert apart > 1e-3 * float(plain.abs().max())
