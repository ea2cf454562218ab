"""What bridges do otherwise than the plain model is put right, in every pass, or the model is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import N_LAYERS, assert_near, load_plain, make_tokenizer
from transformer_lens.factories import architecture_adapter_factory as factory
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer, FalconConfig, FalconForCausalLM

import matlens
from matlens import InputError
from matlens.models import ModelIdentity, active_hooks, registry
from matlens.models.layout import ModelLayout
from matlens.models.registry import Family, ask, family_adapters, register

TOKENS = torch.tensor([[7, 3, 41, 12, 12, 59, 30, 22, 8, 17], [9, 5, 2, 2, 44, 31, 6, 1, 1, 1]])
MASK = torch.tensor([[1] * 10, [1] * 7 + [0] * 3])


def boot(folder: Path) -> TransformerBridge:
    return TransformerBridge.boot_transformers(str(folder), device="cpu")


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    """Of a batch in which one text is shorter, at the tokens of both."""
    given = {"attention_mask": MASK}
    if isinstance(model, TransformerBridge):
        return model(TOKENS, return_type="logits", **given)[MASK.bool()]
    return model(TOKENS, **given).logits[MASK.bool()]


FALCON = "falcon-alibi"


def assert_continues_like(model: Any, plain: Any, n: int) -> None:
    """What a bridge writes with a cache is what the plain model predicts without one."""
    made = model.generate(
        TOKENS[:1], n, stop_at_eos=False, do_sample=False, verbose=False, return_type="tokens"
    )
    expected = TOKENS[:1]
    for _ in range(n):
        expected = torch.cat([expected, plain(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, expected)


def test_distances_count_once(small_model, plain_model, model_folder):
    """As in the attention that transformers takes by default, and not as in the one that gives patterns."""
    model, plain = small_model(FALCON), plain_model(FALCON)
    assert_near(logits(model), logits(plain))
    doubled = logits(load_plain(FALCON, model_folder(FALCON), attn_implementation="eager"))
    assert float((doubled - logits(plain)).abs().max()) > 1e-3 * float(logits(plain).abs().max())
    assert_continues_like(model, plain, 8)


@pytest.mark.parametrize("name", [FALCON, "falcon-alibi-multi-query", "gpt1"])
def test_a_bridge_of_ones_own_is_put_right(name, small_model, model_folder):
    """It is refused as it is; after `wrap`, also twice and copied, it is the loaded model."""
    bridge = boot(model_folder(name))
    with pytest.raises(InputError, match=r"give the bridge to matlens\.wrap\(\)"):
        matlens.Readout(bridge)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(name))
    matlens.wrap(matlens.wrap(bridge, tokenizer=tokenizer))
    loaded = small_model(name)
    for model in (bridge, copy.deepcopy(bridge)):
        assert active_hooks(model) == ()
        assert ModelIdentity.from_model(model).key == ModelIdentity.from_model(loaded).key
        assert torch.equal(logits(model), logits(loaded))
        hooks = {
            name: hook for name, hook in ModelLayout.from_model(model).hooks.items() if "resid_post" in name
        }
        assert [hook.carries for hook in hooks.values()] == N_LAYERS * ["carries vectors"]


# Newer blocks

NEWER = {
    "groups with biases": {"num_kv_heads": 2, "bias": True, "multi_query": False},
    "a key for each query": {"num_kv_heads": 4, "multi_query": False},
    "one norm": {"num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "distances": {"num_kv_heads": 2, "alibi": True, "bias": True},
}


def save_newer(folder: Path, settings: dict[str, Any]) -> Any:
    """A Falcon with newer blocks, of which no weight is 0 or 1, and what transformers reads of it."""
    sizes = {"vocab_size": 67, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    plain = FalconForCausalLM(FalconConfig(**sizes, **ids, new_decoder_architecture=True, **settings))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    plain.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return FalconForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("settings", NEWER.values(), ids=NEWER)
def test_newer_falcons_are_the_model_that_transformers_loads(settings, tmp_path):
    """Queries, keys and values by groups; and what a model writes with a cache of them."""
    plain = save_newer(tmp_path, settings)
    model = matlens.load(str(tmp_path), device="cpu")
    assert_near(logits(model), logits(plain))
    layout = ModelLayout.from_model(model)
    assert layout.wiring.name == "parallel"
    assert ("ln2_out" in layout.kinds) == (settings.get("num_ln_in_parallel_attn") != 1)
    _, seen = model.run_with_cache(TOKENS[:1])
    attention, given = plain.transformer.h[1].self_attention, seen["blocks.1.attn.hook_in"]
    # As transformers' `_split_heads`.
    heads = settings["num_kv_heads"], 4 // settings["num_kv_heads"] + 2, 10
    by_hand = attention.query_key_value(given).detach().unflatten(-1, heads)
    assert_near(seen["blocks.1.attn.q.hook_out"].flatten(2), by_hand[..., :-2, :].flatten(2))
    assert_near(seen["blocks.1.attn.k.hook_out"].flatten(2), by_hand[..., -2, :].flatten(2))
    assert_near(seen["blocks.1.attn.v.hook_out"].flatten(2), by_hand[..., -1, :].flatten(2))
    assert_continues_like(model, plain, 5)


def test_a_newer_falcon_that_a_bridge_takes_for_another_model_is_refused(tmp_path):
    """Where each query has a key, the rows can be taken in the wrong order without an error."""
    plain = save_newer(tmp_path, NEWER["a key for each query"])
    bridge = boot(tmp_path)
    apart = float((logits(bridge) - logits(plain)).abs().max())
    assert apart > 0.1 * float(logits(plain).abs().max())
    with pytest.raises(InputError, match=r"queries, keys and values from other rows.*matlens\.load"):
        matlens.wrap(bridge)


def test_the_family_that_was_registered_last_answers_first(small_model, monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", list(registry._REGISTERED))
    model = small_model("gpt2")
    assert ask(Family.head, model) is None

    @register
    class First(Family):
        def head(self, model: Any) -> Any:
            return ["first"]

        def adapters(self) -> Any:
            return {"FalconForCausalLM": First, "New": First}

    @register
    class Second(Family):
        def head(self, model: Any) -> Any:
            return ["second"] if model.cfg.n_layers == 3 else None

    assert ask(Family.head, model) == ["second"]
    before = dict(factory.SUPPORTED_ARCHITECTURES), dict(factory.ArchitectureAdapterFactory._adapters)
    with family_adapters():
        assert factory.SUPPORTED_ARCHITECTURES["New"] is First
        adapters: Any = factory.ArchitectureAdapterFactory._adapters
        assert adapters["FalconForCausalLM"] is First
    assert before == (factory.SUPPORTED_ARCHITECTURES, factory.ArchitectureAdapterFactory._adapters)


def test_a_mask_hides_later_tokens(small_model, plain_model):
    """In the bridge of OpenAI's first GPT as it is, a token saw later ones wherever there was a mask."""
    assert_near(logits(small_model("gpt1")), logits(plain_model("gpt1")))
