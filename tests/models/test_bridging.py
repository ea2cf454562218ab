"""What bridges do otherwise than the plain model is put right, in every pass, or the model is refused."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bridged import TOKENS, boot, logits
from conftest import N_LAYERS, assert_near, load_plain
from transformers import AutoTokenizer

import matlens
from matlens import InputError
from matlens.models import ModelIdentity, repairs
from matlens.models.changes import changes_of
from matlens.models.families import falcon
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
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
def test_distances_count_once_while_a_model_writes(
    name: str, cached: bool, small_model: Models, plain_model: Models
) -> None:
    made = small_model(name).generate(
        TOKENS[:1], 8, use_past_kv_cache=cached, stop_at_eos=False, do_sample=False, verbose=False,
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


def test_blocks_that_give_lists_are_read_and_fitted(small_model: Models, plain_model: Models) -> None:
    """The stream of OpenAI's first GPT, whose read-out has no norm: what its head reads is ``h^L``."""
    model, plain = small_model("gpt1"), plain_model("gpt1")
    with torch.inference_mode():
        states = plain(TOKENS[:1], output_hidden_states=True).hidden_states
        expected = plain(TOKENS[:1]).logits[0]
    _, seen = model.run_with_cache(TOKENS[:1])
    for layer in range(N_LAYERS):
        assert_near(seen[f"blocks.{layer}.hook_out"], states[layer + 1], 1e-5)
    assert_near(matlens.Readout(model).logits(states[-1][0]), expected)


def test_a_mask_hides_what_is_behind_a_token(
    small_model: Models, plain_model: Models, model_folder: Models
) -> None:
    """In the bridge of OpenAI's first GPT as it is, a token saw those behind it wherever there was a mask."""
    ours, plain = logits(small_model("gpt1")), logits(plain_model("gpt1"))
    assert_near(ours, plain)
    apart = float((logits(boot(model_folder("gpt1"))) - plain).abs().max())
    assert apart > 1e-3 * float(plain.abs().max())


def test_distances_that_no_mask_holds_stay() -> None:
    """With as many axes as blocks add themselves, they are not in the mask yet."""
    given = {"alibi": torch.ones(8, 1, 5), "attention_mask": None}
    assert falcon.count_once(torch.nn.Identity(), (), given) is None
    assert falcon.count_once(torch.nn.Identity(), (), {"alibi": None}) is None
    _, taken = falcon.count_once(torch.nn.Identity(), (), given | {"alibi": torch.ones(2, 4, 1, 5)})
    assert taken == {"alibi": None, "attention_mask": None}


@pytest.mark.parametrize("name", FALCONS)
def test_a_bridge_that_counts_twice_is_refused(
    name: str, model_folder: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_alone = types.FunctionType((lambda *_: None).__code__, vars(falcon), "count_once")
    monkeypatch.setattr(falcon, "count_once", left_alone)
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
        assert_near(half(TOKENS[:1]).float(), plain_model(name)(TOKENS[:1]).logits, 0.03)


def test_a_bridge_with_a_hook_of_its_own_is_compared_no_more(model_folder: Models) -> None:
    """What somebody hung on it changes its logits, and is named as a change."""
    bridge = boot(model_folder(FALCONS[0]))
    bridge.add_hook("blocks.1.hook_out", lambda h, hook: 2 * h)
    assert len(changes_of(matlens.wrap(bridge))) == 1


def test_other_models_are_not_compared(model_folder: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every comparison is a second pass."""
    compared: list[str] = []
    monkeypatch.setattr(repairs, "plain_state", lambda model: compared.append(model.cfg.model_name))
    matlens.load(str(model_folder("gpt2")), device="cpu")
    matlens.wrap(boot(model_folder("bloom")))
    assert not compared
