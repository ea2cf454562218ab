"""A model whose configuration makes no stream of blocks is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from conftest import WORDS, make_tokenizer
from transformer_lens.model_bridge import TransformerBridge

import matlens
from matlens import InputError

TEXT = " ".join(WORDS[3:15])


def test_a_kind_without_an_adapter_is_refused_without_a_list_of_those_with_one(tmp_path: Path) -> None:
    config = transformers.XLNetConfig(vocab_size=60, d_model=16, n_layer=1, n_head=4, d_inner=24)
    transformers.XLNetLMHeadModel(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no adapter for it \(model type 'xlnet', 'XLNetLM") as caught:
        matlens.load(tmp_path)
    assert len(str(caught.value)) < 500


ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=40,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoders_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    ENCODER_DECODERS[name]().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=rf"{name} is an encoder-decoder.*stack=.encoder. or stack=.decoder."
    ):
        matlens.load(str(tmp_path))
    bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    with pytest.raises(InputError, match=f"{name} is an encoder-decoder"):
        matlens.wrap(bridge)
