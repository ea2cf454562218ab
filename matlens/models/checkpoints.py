"""Weights and tokenizers out of files, and no model that is made of less than all of its files."""

from __future__ import annotations

import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from matlens.errors import InputError, check
from matlens.models.configurations import check_supported
from matlens.models.places import called, cause


def read_tokenizer(name: str, folder: str, options: dict[str, Any]) -> Any:
    """The tokenizer that lies beside a model's weights.

    Raises
    ------
    InputError
        There is none, or one that was made of nothing.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:
        files = (
            {path.name for path in Path(folder).iterdir()} if Path(folder).is_dir() else {"tokenizer.json"}
        )
        if any(file.startswith(("tokenizer", "vocab", "spiece", "merges")) for file in files):
            raise
        raise InputError(
            f"The model {called(name)} has no tokenizer: no vocabulary lies beside its weights "
            f"({cause(error)}). Expected the tokenizer's files in the same folder; save it there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        ) from error
    return check_vocabulary(tokenizer, name)


def check_vocabulary(tokenizer: Any, name: str) -> Any:
    """Refuse a tokenizer that was made of nothing, since its files are not there."""
    from transformers import PreTrainedTokenizerBase

    check(tokenizer, PreTrainedTokenizerBase, "tokenizer")
    if not {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}:
        raise InputError(
            f"The model {called(name)} has no tokenizer: no vocabulary lies beside its weights. Expected the "
            "tokenizer's files (tokenizer.json, or vocab.json and merges.txt) in the same folder; save it "
            "there with AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    return tokenizer


class CompleteModel:
    """Stands for the class that the bridge would load by, and refuses weights that lack a tensor.

    transformers draws what a checkpoint lacks at random and only warns.
    """

    @staticmethod
    def from_pretrained(name: str, *, config: Any, **options: Any) -> Any:
        """The model of a folder or of the hub, with every tensor out of its checkpoint."""
        from transformer_lens.model_bridge.sources._hf_format import determine_architecture_from_hf_config
        from transformer_lens.model_bridge.sources.transformers.helpers import (
            get_hf_model_class_for_architecture,
        )

        model_class = get_hf_model_class_for_architecture(determine_architecture_from_hf_config(config))
        model, report = model_class.from_pretrained(name, config=config, output_loading_info=True, **options)
        _check_complete(name, report, model)
        return model


def _check_complete(name: str, report: dict[str, Any], model: Any) -> None:
    lacking = sorted(report["missing_keys"]) + sorted(map(str, report.get("mismatched_keys", ())))
    if lacking:
        raise InputError(
            f"The model '{name}' could not be loaded: its weights lack {len(lacking)} tensors, {lacking[0]} "
            "among them. Expected a complete checkpoint with its language-model head."
        )
    places = {re.sub(r"\d+", "#", key) for key, _ in model.named_parameters()}
    more = sorted(key for key in report.get("unexpected_keys", ()) if re.sub(r"\d+", "#", key) in places)
    if more:
        raise InputError(
            f"The model '{name}' could not be loaded: its weights hold {len(more)} tensors of blocks that "
            f"its configuration does not have, {more[0]} among them. Expected the config.json of "
            "these weights."
        )


def read_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The tokenizer and the model of a GGUF file, whose weights are quantized no more."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # In a folder of its own, where no other model's configuration or tokenizer comes before the file's.
    with tempfile.TemporaryDirectory() as alone, warnings.catch_warnings():
        Path(alone, path.name).symlink_to(path.resolve())
        warnings.simplefilter("ignore")  # about quantized weights, which are no longer so
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=path.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            alone, gguf_file=path.name, dtype=dtype, output_loading_info=True
        )
    model, report = loaded
    _check_complete(str(path), report, model)
    # transformers does not always say of which class the model is, and the bridge does not know every kind.
    model.config.architectures = [type(model).__name__]
    check_supported(str(path), model.config)
    return check_vocabulary(tokenizer, str(path)), model


def read_wikilm_model(path: Path, dtype: torch.dtype, stack: str | None = None) -> tuple[Any, Any]:
    """The tokenizer and the model of a fairseq checkpoint, which TransformerLens knows from then on."""
    from matlens.models.families.wikilm.adapter import register_wikilm
    from matlens.models.families.wikilm.checkpoint import read_wikilm

    register_wikilm()
    model, dictionary = read_wikilm(path)
    check_supported(str(path), model.config, stack)
    torch.nn.Module.to(model, dtype=dtype)  # that of transformers has no type
    return dictionary.tokenizer(longest=model.config.max_position_embeddings), model
