"""A model is refused exactly if two of its passes differ, whichever of its modules is in training mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import _GPT, _GROUPED, make_tokenizer
from torch import nn

import matlens
from matlens import InputError, Replacement, Site, collect, make_examples
from matlens.data import make_windows
from matlens.models.hooks import has_active_dropout
from matlens.models.randomness import is_random
from matlens.patching import Variant, run_variants
from matlens.pruning import plain_copy, read_text

_MIXTURE = _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
_STILL = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "summary_first_dropout": 0.0}
CASES: dict[str, tuple[Callable[[], Any], str, bool]] = {  # configuration, module in training mode, random
    "dropout of a block": (lambda: transformers.GPT2Config(**_GPT), "transformer.h.1", True),
    "dropout of a sub-module": (lambda: transformers.GPT2Config(**_GPT), "transformer.h.1.mlp", True),
    "dropout module alone": (lambda: transformers.GPT2Config(**_GPT), "transformer.drop", True),
    "dropout of rate 0": (lambda: transformers.GPT2Config(**_GPT, **_STILL), "transformer.h.1", False),
    "norm with dropout elsewhere": (lambda: transformers.GPT2Config(**_GPT), "transformer.ln_f", False),
    "attention's own rate": (
        lambda: transformers.LlamaConfig(**_GROUPED, attention_dropout=0.5), "model.layers.1", True
    ),
    "no rate": (lambda: transformers.LlamaConfig(**_GROUPED), "model.layers.1", False),
    "noise of a router": (
        lambda: transformers.MixtralConfig(**_MIXTURE, router_jitter_noise=0.5), "model.layers.1.mlp", True
    ),
    "router without noise": (lambda: transformers.MixtralConfig(**_MIXTURE), "model.layers.1.mlp", False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_random_models_are_refused_and_no_others(case, tmp_path):
    config, path, random = CASES[case]
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, plain = (
        matlens.load(str(tmp_path), device="cpu"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(),
    )
    examples = make_examples(model, ["w1 w2 w3 w4 w5 w6 w7 w8"])
    expected = collect(model, examples, positions="all", progress=False)[-1]
    assert not is_random(plain.modules())
    plain.get_submodule(path).train()
    with torch.no_grad():
        tokens = torch.arange(10, 18)[None]
        assert torch.equal(plain(tokens).logits, plain(tokens).logits) != random
    assert is_random(plain.modules()) == random
    modules = {id(module) for module in model.original_model.get_submodule(path).modules()}
    for module in model.original_model.modules():
        if id(module) in modules:
            module.training = True
    jump = Replacement(lambda h: h, Site("h", 1), Site("h", 2))
    uses = {
        "collect": lambda: collect(model, examples, positions="all", progress=False),
        "variants": lambda: run_variants(model, examples, {"a": Variant(0, [jump])}, progress=False),
    }
    for name, use in uses.items():
        if random:
            with pytest.raises(InputError, match="eval mode"):
                print(name, use())
        else:
            assert torch.equal(uses["collect"]()[-1], expected)
            use()
    assert has_active_dropout(model) == random


def test_losses_of_a_plain_model_in_training_mode_are_refused(small_model):
    model = small_model("gpt2")
    windows = make_windows(model, [" ".join(["w1 w2 w3 w4 w5"] * 10)], size=12)
    plain = plain_copy(model)
    read_text(plain, windows, progress=False)
    plain.train()
    with pytest.raises(InputError, match="eval mode"):
        read_text(plain, windows, progress=False)


@pytest.mark.parametrize("module", [nn.AlphaDropout(0.1), nn.RReLU(), nn.BatchNorm1d(3)])
def test_other_modules_of_torch_are_random_in_training_mode(module):
    assert is_random([module])
    assert not is_random([module.eval()])
