"""A bridge that was booted elsewhere reads text as one says, and then is the loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS, make_tokenizer, save_model, save_with_ends
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer

import matlens
from matlens import InputError
from matlens.models import ModelIdentity, encode_text, token_policy

TEXT = " ".join(WORDS[:6])


def test_a_bos_that_is_the_unknown_token_too_is_a_bos(tmp_path: Path) -> None:
    """As in GPT-2's vocabulary, where one token is BOS, EOS and unknown."""
    folder = save_model("gpt2", tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "w49", "eos_token": "w49", "unk_token": "w49"})
    tokenizer.save_pretrained(folder)
    model, bridge = (
        matlens.load(str(folder), device="cpu"),
        TransformerBridge.boot_transformers(str(folder), device="cpu"),
    )
    plain = make_tokenizer()(TEXT)["input_ids"]
    matlens.wrap(bridge, prepend_bos=True)
    assert encode_text(bridge, TEXT).ids == [tokenizer.bos_token_id, *plain]
    matlens.wrap(bridge, prepend_bos=False)
    assert encode_text(bridge, TEXT).ids == plain == bridge.to_tokens(TEXT)[0].tolist()
    assert token_policy(bridge) == token_policy(model)


def test_a_bridge_takes_the_published_tokenizer(model_folder: Callable[[str], Path]) -> None:
    """TransformerLens loads BERT's tokenizer so that it puts no [CLS] and [SEP] around a text."""
    folder = str(model_folder("bert"))
    model, bridge = (
        matlens.load(folder, device="cpu"),
        TransformerBridge.boot_transformers(folder, device="cpu"),
    )
    assert token_policy(bridge) != token_policy(model)
    with pytest.raises(InputError, match=r"masked-LM model reads its own \[CLS\] and \[SEP\]"):
        matlens.wrap(bridge, prepend_bos=True)
    published = AutoTokenizer.from_pretrained(folder)
    size = bridge.cfg.d_vocab
    matlens.wrap(bridge, tokenizer=published)
    assert ModelIdentity.from_model(bridge).key == ModelIdentity.from_model(model).key
    assert token_policy(bridge).words == "'[CLS]' in front and '[SEP]' at the end"
    assert bridge.to_tokens(TEXT)[0].tolist() == published(TEXT)["input_ids"] == encode_text(bridge, TEXT).ids
    assert bridge.cfg.d_vocab == size


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("front", [False, True])
def test_the_published_tokenizer_makes_any_bridge_the_loaded_model(
    front: bool, end: bool, tmp_path: Path
) -> None:
    folder = str(save_with_ends(tmp_path / "model", front=front, end=end))
    model, bridge = (
        matlens.load(folder, device="cpu"),
        TransformerBridge.boot_transformers(folder, device="cpu"),
    )
    bridge.train()
    matlens.wrap(bridge, tokenizer=AutoTokenizer.from_pretrained(folder))
    assert not bridge.training
    assert ModelIdentity.from_model(bridge).key == ModelIdentity.from_model(model).key
    assert bridge.to_tokens(TEXT).tolist() == model.to_tokens(TEXT).tolist()
    assert matlens.load(bridge) is bridge


def test_what_cannot_be_wrapped_is_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = str(model_folder("gpt2"))
    bridge = TransformerBridge.boot_transformers(folder, device="cpu")
    before = token_policy(bridge)
    attempts: list[tuple[dict[str, Any], str]] = [
        ({"prepend_bos": True, "tokenizer": make_tokenizer()}, "either a tokenizer"),
        ({"prepend_bos": 1}, r"^prepend_bos must be"),
        ({"prepend_bos": True}, "which the tokenizer cannot do: its BOS is"),  # it has none of its own
        ({"tokenizer": "gpt2"}, "^tokenizer must be"),
    ]
    for options, told in attempts:
        with pytest.raises(InputError, match=told):
            matlens.wrap(bridge, **options)
    assert token_policy(bridge) == before
    for thing in (None, "gpt2", bridge.original_model, torch.nn.Linear(2, 2)):
        with pytest.raises(InputError, match=r"^bridge must be"):
            matlens.wrap(thing)
    with pytest.raises(InputError, match="A bridge keeps its device"):
        matlens.load(bridge, dtype=torch.float16)
    with torch.no_grad():
        next(bridge.original_model.parameters())[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"are not finite: .* holds NaN"):
        matlens.wrap(bridge)
    bridge.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    with pytest.raises(InputError, match="compatibility mode"):
        matlens.wrap(bridge)
