"""Configurations, tokenizers and weights from files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch

from matlens.errors import InputError
from matlens.io.bounds import LAYERS
from matlens.models.registry import families

_READERS = ("gguf", "torch", "transformers", "tokenizers")


@contextmanager
def naming(problem: str) -> Iterator[None]:
    """Name the model that other libraries cannot read: they raise too many kinds of errors to list."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{problem} {type(error).__name__}: {error}") from error


def read_configuration(folder: str, **options: Any) -> Any:
    """The configuration of a model, as the bridge reads it."""
    from transformer_lens.utilities.hf_utils import autoconfig_with_remote_post_init_compat
    from transformers import AutoConfig

    families()  # some let transformers know their configuration
    return autoconfig_with_remote_post_init_compat(
        folder, auto_config=AutoConfig, output_attentions=True, **options
    )


def modality(config: Any) -> str:
    """Input types and stacks of a model, such as ``"vision"`` and ``"seq2seq"``."""
    from transformer_lens.utilities.architectures import classify_model_config

    return str(classify_model_config(config))


def check_supported(name: str, config: Any, stack: str | None = None) -> None:
    """Raise InputError for models without an adapter, another stack than they have, or too many layers."""
    from transformer_lens.model_bridge.sources import _hf_format as formats

    has_stacks = modality(config) == "seq2seq"
    if has_stacks != (stack is not None):
        expected = "'encoder' or 'decoder'" if has_stacks else "None"
        raise InputError(f"stack must be {expected} for {name!r}, a {config.model_type}, got {stack!r}.")
    try:
        formats.determine_architecture_from_hf_config(config)
    except ValueError:  # which lists all architectures
        classes = ", ".join(map(str, getattr(config, "architectures", None) or ())) or "no class"
        raise InputError(
            f"The model {name!r} cannot be used: TransformerLens has no adapter for it (model type "
            f"{config.model_type!r}, {classes!r}). Expected a model that TransformerLens 4 supports."
        ) from None
    layers = getattr(formats.get_effective_text_config(config), "num_hidden_layers", None)
    if isinstance(layers, int):
        LAYERS.check(layers, f"The model {name!r}")


def check_vocabulary(tokenizer: Any, name: str) -> Any:
    """Refuse a tokenizer that transformers made of nothing, since its files are not there."""
    if not {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}:
        raise InputError(
            f"The model {name!r} has no tokenizer next to its weights. Save it there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    return tokenizer


class CompleteModel:
    """In place of the class that the bridge loads: refuses missing tensors, which would be initialized.

    ``then`` gets the model on its device before it is wrapped.
    """

    def __init__(self, device: torch.device, then: Callable[[Any], Any]) -> None:
        self._device, self._then = device, then

    def from_pretrained(self, name: str, *, config: Any, **options: Any) -> Any:
        """The model of a folder or of the hub, with every tensor out of its checkpoint."""
        loaded = auto_class(config).from_pretrained(name, config=config, output_loading_info=True, **options)
        model = check_complete(name, *loaded).to(self._device).eval()
        self._then(model)
        return model


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a model of this configuration."""
    from transformer_lens.model_bridge.sources._hf_format import determine_architecture_from_hf_config
    from transformer_lens.model_bridge.sources.transformers.helpers import get_hf_model_class_for_architecture

    return get_hf_model_class_for_architecture(determine_architecture_from_hf_config(config))


def check_complete(name: str, model: Any, report: dict[str, Any]) -> Any:
    """Raise InputError for a checkpoint that lacks tensors, or has more blocks than its configuration."""
    lacking = sorted(report["missing_keys"]) + sorted(map(str, report.get("mismatched_keys", ())))
    if lacking:
        raise InputError(
            f"The model {name!r} could not be loaded: its weights lack {len(lacking)} tensors, including "
            f"{lacking[0]}. Expected a complete checkpoint with its language-model head."
        )
    places = {re.sub(r"\d+", "#", key) for key, _ in model.named_parameters()}
    more = sorted(key for key in report.get("unexpected_keys", ()) if re.sub(r"\d+", "#", key) in places)
    if more:
        raise InputError(
            f"The model {name!r} could not be loaded: its weights hold {len(more)} tensors of blocks that "
            f"its configuration does not have, including {more[0]}. Expected the config.json of "
            "these weights."
        )
    return model


def software() -> dict[str, str]:
    """Versions of the libraries that read models."""
    return {name: version(name) for name in _READERS}
