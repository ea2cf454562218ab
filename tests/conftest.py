"""Small models of every block family, with random weights, as the folders that `matlens.load` reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import matlens

WORDS = [f"w{i}" for i in range(50)]
SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
BERT_SPECIAL = SPECIAL | {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
N_LAYERS, D_MODEL, N_CTX = 3, 32, 48

_COMMON: dict[str, Any] = {"vocab_size": 60, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
_SIZES: dict[str, Any] = _COMMON | {
    "hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": N_CTX,
}  # fmt: skip
_GROUPED = _SIZES | {"num_key_value_heads": 2, "head_dim": 8}
_GPT: dict[str, Any] = _COMMON | {"n_layer": N_LAYERS, "n_embd": D_MODEL, "n_head": 4, "n_positions": N_CTX}

CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(**_GPT),
    "llama": lambda: transformers.LlamaConfig(**_GROUPED),
    "neox": lambda: transformers.GPTNeoXConfig(**_SIZES),
    "gptj": lambda: transformers.GPTJConfig(**_GPT, rotary_dim=4),
    "bert": lambda: transformers.BertConfig(**_SIZES),
    # A cap that the random logits reach, so that leaving it out would show.
    "gemma2": lambda: transformers.Gemma2Config(**_GROUPED, final_logit_softcapping=0.05),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_GROUPED, sliding_window=16),
}
FAMILY_OF = {
    "gpt2": "pre-norm", "llama": "pre-norm", "neox": "parallel", "gptj": "parallel", "bert": "post-norm",
    "gemma2": "extra-norm", "gemma3": "extra-norm",
}  # fmt: skip
ARCHITECTURES = tuple(CONFIGS)


def make_tokenizer(*, bert: bool = False) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of whole words; BERT's puts [CLS] before and [SEP] after, the others add nothing."""
    special = BERT_SPECIAL if bert else SPECIAL
    vocabulary = {word: i for i, word in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bert:
        ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=ends
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=N_CTX, **special
    )


def save_model(name: str, folder: Path) -> Path:
    """Write a small model with random weights and its tokenizer, as save_pretrained does."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases start as ones and zeros, where a forgotten one would not show.
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer(bert=name == "bert").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a small model, by the name of its architecture."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = root / name
        return path if path.is_dir() else save_model(name, path)

    return folder


@pytest.fixture(scope="session")
def small_model(model_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """A small loaded model, by the name of its architecture; shared, so leave it as it is."""
    loaded: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in loaded:
            loaded[name] = matlens.load(str(model_folder(name)), device="cpu")
        return loaded[name]

    return model


@pytest.fixture
def sentences() -> matlens.Corpus:
    """Forty different sentences of 5 to 20 words that the small models know."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for i in range(40):
        length = 5 + i % 16
        texts.append(" ".join(WORDS[int(w)] for w in torch.randint(50, (length,), generator=generator)))
    return matlens.Corpus("words", tuple(texts), 40, 0, 0, 0)
