"""Small models with random weights, as folders that `matlens.load` reads, and what is odd about some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [f"w{i}" for i in range(50)]
_SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
_MASK = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
N_CTX, D_MODEL, D_MLP, N_LAYERS = 48, 32, 48, 3

_COMMON: dict[str, Any] = {"vocab_size": 60, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
_GPT2 = _COMMON | {
    "n_layer": N_LAYERS, "n_embd": D_MODEL, "n_head": 4, "n_inner": D_MLP, "n_positions": N_CTX,
}  # fmt: skip
_BERT = _COMMON | {
    "hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS, "num_attention_heads": 4,
    "intermediate_size": D_MLP, "max_position_embeddings": N_CTX,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 60, "d_model": D_MODEL, "d_ff": D_MLP, "d_kv": 8, "num_layers": 2, "num_heads": 4,
    "pad_token_id": 1, "decoder_start_token_id": 1,
}  # fmt: skip

_VIT: dict[str, Any] = {
    "hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS, "num_attention_heads": 4,
    "intermediate_size": D_MLP, "image_size": 12, "patch_size": 4,
}  # fmt: skip


def save_model(name: str, folder: Path) -> Path:
    """Write a small model and its tokenizer, as ``save_pretrained`` does.

    Parameters
    ----------
    name
        ``gpt2``, or what differs from it: ``weights`` are others, ``tokens`` have a beginning in front,
        ``layers`` are fewer, ``wide`` is of another width, ``nan`` has a weight that is no number,
        ``untokenized`` lacks its tokenizer; ``bert`` is masked, ``t5`` has an encoder and a decoder,
        ``vit`` reads images.
    folder
        Where the model is written.
    """
    torch.manual_seed(1 if name == "weights" else 0)
    model = _model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        if name == "nan":
            next(model.parameters())[5] = torch.nan
    model.save_pretrained(folder)
    if name not in ("untokenized", "vit"):
        _tokenizer(name).save_pretrained(folder)
    return folder


def _model(name: str) -> Any:
    if name == "bert":
        return transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig(**_BERT))
    if name == "vit":
        return transformers.ViTForImageClassification(transformers.ViTConfig(**_VIT))
    if name == "t5":
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5))
    changes = {"layers": {"n_layer": 2}, "wide": {"n_embd": 2 * D_MODEL}}.get(name, {})
    return transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**_GPT2 | changes))


def _tokenizer(name: str) -> transformers.PreTrainedTokenizerFast:
    special = _SPECIAL | _MASK
    vocabulary = {word: i for i, word in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = {"bert": "[CLS] $A [SEP]", "tokens": "[CLS] $A"}.get(name)
    if template is not None:
        ends = [(end, vocabulary[end]) for end in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    kept = special if name == "bert" else _SPECIAL
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=N_CTX, **kept)
