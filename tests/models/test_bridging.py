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
FALCON = "falcon-alibi"


def test_distances_count_once(small_model: Models, plain_model: Models, model_folder: Models) -> None:
    """As in the attention that transformers takes by default, and not as in the one that gives patterns."""
    model, plain = small_model(FALCON), plain_model(FALCON)
    assert_near(logits(model), logits(plain))
    doubled = logits(load_plain(FALCON, model_folder(FALCON), attn_implementation="eager"))
    assert float((doubled - logits(plain)).abs().max()) > 1e-3 * float(logits(plain).abs().max())
    made = model.generate(
        TOKENS[:1], 8, stop_at_eos=False, do_sample=False, verbose=False, return_type="tokens"
    )
    expected = TOKENS[:1]
    for _ in range(8):
        expected = torch.cat([expected, plain(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("name", [FALCON, "falcon-alibi-multi-query", "gpt1"])
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


def test_a_mask_hides_later_tokens(small_model: Models, plain_model: Models) -> None:
    """In the bridge of OpenAI's first GPT as it is, a token saw later ones wherever there was a mask."""
    assert_near(logits(small_model("gpt1")), logits(plain_model("gpt1")))
