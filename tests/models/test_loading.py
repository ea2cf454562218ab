"""What `load` gives is the published model with its own tokenizer, and what it cannot load it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import WORDS, make_tokenizer, save_model
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer

import matlens
from matlens import InputError
from matlens.models import ModelIdentity, token_policy
from matlens.models.tokens import encode_text

# Bridges booted elsewhere

SHORT_TEXT = " ".join(WORDS[:6])


def test_a_bos_that_is_the_unknown_token_too_is_a_bos(tmp_path):
    """As in GPT-2's vocabulary, where one token is BOS, EOS and unknown."""
    folder = save_model("gpt2", tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "w49", "eos_token": "w49", "unk_token": "w49"})
    tokenizer.save_pretrained(folder)
    model, bridge = (
        matlens.load(str(folder), device="cpu"),
        TransformerBridge.boot_transformers(str(folder), device="cpu"),
    )
    plain = make_tokenizer()(SHORT_TEXT)["input_ids"]
    matlens.wrap(bridge, prepend_bos=True)
    assert encode_text(bridge, SHORT_TEXT).ids == [tokenizer.bos_token_id, *plain]
    matlens.wrap(bridge, prepend_bos=False)
    assert encode_text(bridge, SHORT_TEXT).ids == plain == bridge.to_tokens(SHORT_TEXT)[0].tolist()
    assert token_policy(bridge) == token_policy(model)


def test_a_bridge_takes_the_published_tokenizer(model_folder):
    """TransformerLens loads BERT's tokenizer so that it puts no [CLS] and [SEP] around a text."""
    folder = str(model_folder("bert"))
    model, bridge = (
        matlens.load(folder, device="cpu"),
        TransformerBridge.boot_transformers(folder, device="cpu"),
    )
    assert token_policy(bridge) != token_policy(model)
    with pytest.raises(InputError, match="which the tokenizer cannot do"):
        matlens.wrap(bridge, prepend_bos=True)
    published = AutoTokenizer.from_pretrained(folder)
    size = bridge.cfg.d_vocab
    matlens.wrap(bridge, tokenizer=published)
    assert ModelIdentity.from_model(bridge).key == ModelIdentity.from_model(model).key
    assert token_policy(bridge).words == "'[CLS]' in front and '[SEP]' at the end"
    ids = published(SHORT_TEXT)["input_ids"]
    assert bridge.to_tokens(SHORT_TEXT)[0].tolist() == ids == encode_text(bridge, SHORT_TEXT).ids
    assert bridge.cfg.d_vocab == size


def test_what_cannot_be_wrapped_is_refused(model_folder):
    folder = str(model_folder("gpt2"))
    bridge = TransformerBridge.boot_transformers(folder, device="cpu")
    before = token_policy(bridge)
    attempts: list[tuple[dict[str, Any], str]] = [
        ({"prepend_bos": True, "tokenizer": make_tokenizer()}, "either tokenizer"),
        ({"prepend_bos": True}, "which the tokenizer cannot do: its BOS is"),  # it has none of its own
    ]
    for options, told in attempts:
        with pytest.raises(InputError, match=told):
            matlens.wrap(bridge, **options)
    assert token_policy(bridge) == before
    with torch.no_grad():
        next(bridge.original_model.parameters())[0, 0] = float("nan")
    with pytest.raises(InputError, match="are not finite, including"):
        matlens.wrap(bridge)
    bridge.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    with pytest.raises(InputError, match="compatibility mode"):
        matlens.wrap(bridge)
