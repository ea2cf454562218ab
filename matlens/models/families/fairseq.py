"""WikiLM from fairseq's checkpoints, read without executing them.

A checkpoint is a pickle. torch reads it with ``weights_only``: tensors and plain values, and of other classes
only settings (``argparse.Namespace``) and meters of training, which are replaced by inert objects.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from matlens.errors import InputError, printable
from matlens.models.families.dictionary import DICTIONARY, WordDictionary
from matlens.models.families.wikilm import (
    ARCHITECTURE,
    MODEL_TYPE,
    WikiLMAdapter,
    WikiLMConfig,
    WikiLMForCausalLM,
)
from matlens.models.places import CHECKPOINT
from matlens.models.registry import Family, register

PREFIXES = {"model.": "decoder.", "lm_head.": "decoder.adaptive_softmax."}
"""What the names of parameters begin with here, and in fairseq."""
_SOFTMAX = PREFIXES["lm_head."]
_METERS = ("AverageMeter", "TimeMeter", "StopwatchMeter", "MetersDict")
_IGNORED = re.compile(r".*(version|_float_tensor)|decoder\.embed_positions\.weights")
_OLD_NORMS = {".layer_norms.0.": ".self_attn_layer_norm.", ".layer_norms.2.": ".final_layer_norm."}
_MAX_POSITIONS = 2**16
_NAMED = re.compile(r"GLOBAL ([\w.]+)|unsupported class ([\w.]+)")


@register
class WikiLM(Family):
    """fairseq's WikiLM, from its checkpoint or from a folder of `save_pretrained`."""

    def __init__(self) -> None:
        AutoConfig.register(MODEL_TYPE, WikiLMConfig, exist_ok=True)
        AutoModelForCausalLM.register(WikiLMConfig, WikiLMForCausalLM, exist_ok=True)

    def adapters(self) -> Mapping[str, type]:
        """Which module of a WikiLM is which part of a bridge."""
        return {ARCHITECTURE: WikiLMAdapter}

    def read_file(self, path: Path, dtype: torch.dtype) -> tuple[Any, Any] | None:
        """The tokenizer and the model of a checkpoint with its dictionary next to it."""
        if path.suffix.lower() != CHECKPOINT:
            return None
        model, dictionary = read_wikilm(path, dtype=dtype)
        return dictionary.tokenizer(longest=model.config.max_position_embeddings), model


class _Inert:
    """Replaces an object of a class that is not needed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_wikilm(
    path: str | Path, *, dtype: torch.dtype = torch.float32
) -> tuple[WikiLMForCausalLM, WordDictionary]:
    """Read a checkpoint of fairseq, without executing it, and the ``dict.txt`` next to it."""
    path = Path(path)
    content = _read(path)
    dictionary = WordDictionary.read(path.parent / DICTIONARY)
    try:
        settings, tensors = vars(content["args"]), content["model"]
        _check_settings(settings, tensors)
        config = WikiLMConfig(
            vocab_size=len(dictionary), d_model=settings["decoder_embed_dim"],
            num_layers=settings["decoder_layers"], attention_heads=settings["decoder_attention_heads"],
            ffn_dim=settings["decoder_ffn_embed_dim"], max_position_embeddings=_n_positions(settings),
            cutoffs=[int(end) for end in settings["adaptive_input_cutoff"].split(",")],
            adaptive_factor=settings.get("adaptive_input_factor", 4),
            activation_function=settings.get("activation_fn", "relu"),
            scale_embedding=not settings.get("no_scale_embedding"),
            final_norm="decoder.layer_norm.weight" in tensors,
        )  # fmt: skip
        weights = _weights(tensors)
        with torch.device("meta"):
            model = WikiLMForCausalLM(config)
        model.load_state_dict(weights, assign=True)
        for ours, theirs in model.get_expanded_tied_weights_keys().items():
            if not torch.equal(weights[ours], weights[theirs]):
                raise InputError(f"{ours} and {theirs} must be equal, and differ")
        model.tie_weights()
        positions = model.model.embed_positions
        n_positions = config.max_position_embeddings + positions.offset
        positions.weights = positions.get_embedding(n_positions, config.d_model, config.pad_token_id)
    except Exception as error:  # a pickle can hold anything in place of settings and weights
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        reason = printable(" ".join(f"{kind}{error}".split()), limit=400)
        raise InputError(
            f"The checkpoint {path} cannot be used as a WikiLM with its {DICTIONARY}: {reason}. Expected "
            "fairseq's transformer_lm with adaptive input and adaptive softmax, as transformer_lm_wiki103 is."
        ) from error
    torch.nn.Module.to(model, dtype=dtype)  # that of transformers has no type
    return model.eval(), dictionary


def _read(path: Path) -> Mapping[str, Any]:
    """Content of a checkpoint, without executing code."""
    allowed: list[Any] = [argparse.Namespace]
    allowed += [
        (_Inert, f"fairseq.{module}.{name}") for module in ("meters", "logging.meters") for name in _METERS
    ]
    try:
        with path.open("rb") as file, torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # readers of archives and pickles fail in too many ways to list
        named = _NAMED.search(str(error))
        reason = f"it is truncated, damaged or no file of torch ({type(error).__name__})"
        if named is not None:
            reason = f"it names {(named[1] or named[2])[:80]}, which may be code"
        raise InputError(f"The checkpoint {path} is not read: {reason}.") from error


def _check_settings(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse settings that say more than the weights do."""
    n_blocks = len({name.split(".")[2] for name in tensors if name.startswith("decoder.layers.")})
    refused = {
        # Before a model of any number of blocks is made.
        f"decoder_layers is not {n_blocks}, the number of blocks": settings["decoder_layers"] != n_blocks,
        "no_token_positional_embeddings is set": settings.get("no_token_positional_embeddings"),
        "add_bos_token is set": settings.get("add_bos_token"),
        # Before a table of any number of positions is made.
        f"it has more than {_MAX_POSITIONS:,} positions": _n_positions(settings) > _MAX_POSITIONS,
        "its adaptive softmax is of the first kind (other bands)": f"{_SOFTMAX}version" not in tensors,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise InputError(reason)


def _n_positions(settings: Mapping[str, Any]) -> int:
    return settings.get("max_target_positions") or settings["tokens_per_sample"]


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors by the names of the model; also where norms have numbers, as once."""
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _IGNORED.fullmatch(name):
            continue
        for old, new in _OLD_NORMS.items():
            name = name.replace(old, new)
        for ours, theirs in reversed(PREFIXES.items()):  # the longer one first
            name = name.replace(theirs, ours)
        place, joint, kind = name.partition("in_proj_")
        if joint:  # queries, keys and values in one matrix
            parts = zip("qkv", tensor.chunk(3), strict=True)
            weights |= {f"{place}{letter}_proj.{kind}": part for letter, part in parts}
        else:
            weights[name] = tensor
    return weights
