"""Which models can be read, as their configurations say; no weights are needed."""

from __future__ import annotations

from typing import Any

from matlens.errors import InputError, short
from matlens.io.bounds import LAYERS
from matlens.models.places import called


def check_supported(name: str, config: Any, stack: str | None = None) -> None:
    """Refuse what is no decoder or masked-LM model of blocks that pass one stream on.

    Raises
    ------
    InputError
        It is of another kind, TransformerLens has no adapter for it, or its configuration makes no sense.
    """
    from transformer_lens.model_bridge.sources._hf_format import (
        determine_architecture_from_hf_config,
        get_effective_text_config,
    )

    kind, said = getattr(config, "model_type", "unknown"), f"The model {called(name)} cannot be used"
    sort = sort_of(config)
    if sort == "seq2seq" and stack is None:
        raise InputError(
            f"{said} as one: {kind} is an encoder-decoder, through which two streams pass. Say which is to "
            "be read: stack='encoder' or stack='decoder'."
        )
    if sort != "seq2seq" and stack is not None:
        raise InputError(f"The model {called(name)} has one stack. Leave stack={stack!r} out.")
    if sort == "audio":
        raise InputError(f"{said}: {kind} reads sound. Expected a model of text or a vision transformer.")
    try:
        determine_architecture_from_hf_config(config)
    except ValueError:
        classes = ", ".join(map(str, getattr(config, "architectures", None) or ())) or "no class"
        raise InputError(
            f"{said}: TransformerLens has no adapter for it (model type {short(kind)}, {short(classes)}). "
            "Expected a model that TransformerLens 4 supports."
        ) from None
    text = get_effective_text_config(config)
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise InputError(f"{said}: its configuration says {layers} layers. Expected at least 1.")
    LAYERS.check(layers if isinstance(layers, int) else 0, f"The model {called(name)}")
    context = getattr(text, "max_position_embeddings", None)
    if isinstance(context, int) and context < 1:
        raise InputError(f"{said}: its context is {context} tokens long. Expected at least 1.")


def configuration_of(folder: str, **options: Any) -> Any:
    """The configuration of a model, as the bridge reads it."""
    from transformer_lens.utilities.hf_utils import autoconfig_with_remote_post_init_compat
    from transformers import AutoConfig

    from matlens.models.families.wikilm.adapter import register_wikilm

    register_wikilm()
    return autoconfig_with_remote_post_init_compat(
        folder, auto_config=AutoConfig, output_attentions=True, **options
    )


def sort_of(config: Any) -> str:
    """What a model reads and how many stacks it has, such as ``"vision"`` and ``"seq2seq"``."""
    from transformer_lens.utilities.architectures import classify_model_config

    return str(classify_model_config(config))
