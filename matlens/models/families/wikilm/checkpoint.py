"""fairseq's checkpoints of WikiLM, read without running what they hold.

A checkpoint is a pickle. torch reads it with ``weights_only``: tensors and plain values, and of other classes
those alone that are named here. One is ``argparse.Namespace``, which holds settings; the others are meters of
training, in whose place something inert is put. A checkpoint that names anything else is refused.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matlens.errors import InputError, checked, printable, short
from matlens.io.files import open_regular
from matlens.models.families.wikilm.dictionary import DICTIONARY, WordDictionary
from matlens.models.families.wikilm.modelling import WikiLMConfig, WikiLMForCausalLM

_METERS = ("AverageMeter", "TimeMeter", "StopwatchMeter", "MetersDict")
_EXPECTED = (
    "Expected a checkpoint of fairseq's transformer_lm with adaptive input and adaptive softmax, as "
    "transformer_lm_wiki103 is."
)
_IGNORED = re.compile(
    r"decoder\.(version|embed_positions\.(_float_tensor|weights)|embed_tokens\._float_tensor|"
    r"adaptive_softmax\.(version|head\._float_tensor))"
)
_BLOCK = re.compile(r"decoder\.layers\.(\d{1,5})\.")
_EMBEDDINGS = re.compile(r"decoder\.embed_tokens\.embeddings\.\d+\.0\.weight")
_OLD_NORMS = {"layer_norms.0": "self_attn_layer_norm", "layer_norms.2": "final_layer_norm"}
_NAMED = re.compile(r"GLOBAL ([\w.]+)|unsupported class ([\w.]+)")
_NOT_READ = (
    "character_embeddings", "decoder_learned_pos", "no_token_positional_embeddings", "base_layers",
    "layernorm_embedding", "scale_fc", "scale_attn", "scale_heads", "scale_resids", "add_bos_token",
)  # fmt: skip
SOFTMAX = "decoder.adaptive_softmax"


class _Inert:
    """Stands for a class whose objects are of no use here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


@checked
def read_wikilm(path: str | Path) -> tuple[WikiLMForCausalLM, WordDictionary]:
    """Read a checkpoint of fairseq, without executing it, and the ``dict.txt`` next to it."""
    path = Path(path)
    content = _read(path)
    args, tensors = content.get("args"), content.get("model")
    if not isinstance(args, argparse.Namespace):
        raise InputError(f"The checkpoint {path} holds no settings under 'args'. {_EXPECTED}")
    if not isinstance(tensors, Mapping) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise InputError(f"The checkpoint {path} holds no weights under 'model'. {_EXPECTED}")
    tensors = _as_now({str(name): tensor for name, tensor in tensors.items()})
    dictionary = WordDictionary.read(path.parent / DICTIONARY)
    config = _config(vars(args), tensors, len(dictionary), path)
    try:
        with torch.device("meta"):
            model = WikiLMForCausalLM(config)
        weights = _weights(model, tensors, path)
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        reason = printable(" ".join(str(error).split()), limit=400)
        raise InputError(f"The weights of {path} do not fit their settings: {reason} {_EXPECTED}") from error
    if config.tie_word_embeddings:
        _check_tied(model, path)
        model.lm_head.tie(model.embed_tokens, projections=config.tie_projections)
    return model.float().eval(), dictionary


def _read(path: Path) -> Mapping[str, Any]:
    """Content of a checkpoint, without executing code."""
    allowed: list[Any] = [argparse.Namespace]
    allowed += [
        (_Inert, f"fairseq.{module}.{name}") for module in ("meters", "logging.meters") for name in _METERS
    ]
    try:
        with open_regular(path) as file, torch.serialization.safe_globals(allowed):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # readers of archives and pickles fail in too many ways to list
        named = _NAMED.search(str(error))
        if named is not None:
            raise InputError(
                f"The checkpoint {path} names {(named[1] or named[2])[:80]}, which may be code, "
                "so it is not read. Expected tensors and settings alone, as fairseq's own checkpoints hold."
            ) from error
        reason = printable(" ".join(str(error).split()), limit=200)
        raise InputError(
            f"The checkpoint {path} cannot be read: it is truncated or damaged, or no file of torch "
            f"({type(error).__name__}: {reason})."
        ) from error
    if not isinstance(content, Mapping):
        raise InputError(f"The checkpoint {path} holds a {type(content).__name__}. {_EXPECTED}")
    return content


def _as_now(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names that fairseq gives them now."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in _OLD_NORMS.items():
            name = name.replace(f".{old}.", f".{new}.")
        if name.endswith(("in_proj_weight", "in_proj_bias")) and tensor.ndim and len(tensor) % 3 == 0:
            place, _, kind = name.rpartition(".in_proj_")[0], "", name.rpartition("_")[2]
            parts = zip("qkv", tensor.chunk(3), strict=True)
            renamed |= {f"{place}.{letter}_proj.{kind}": part for letter, part in parts}
        else:
            renamed[name] = tensor
    return renamed


def _config(
    settings: Mapping[str, Any], tensors: Mapping[str, Tensor], n_words: int, path: Path
) -> WikiLMConfig:
    """Configuration of the model, from its settings, checked against its weights."""

    def refuse(what: str) -> InputError:
        return InputError(f"The checkpoint {path} is not of a WikiLM: {what}. {_EXPECTED}")

    given: Any = settings.get
    cutoffs, softmax_cutoffs = (_cutoffs(given(f"adaptive_{side}_cutoff")) for side in ("input", "softmax"))
    factor, softmax_factor = (given(f"adaptive_{side}_factor", 4) for side in ("input", "softmax"))
    others = [name for name in _NOT_READ if given(name)]
    refused = {
        f"its architecture is {short(given('arch'))}": not str(given("arch")).startswith("transformer_lm"),
        "it has no adaptive input, or no adaptive softmax":
            not given("adaptive_input") or given("adaptive_softmax_cutoff") is None,
        "the bands of its input and of its output differ":
            cutoffs is None or cutoffs != softmax_cutoffs or factor != softmax_factor,
        f"it is made with {', '.join(others)}, which is not read here": bool(others),
        "its adaptive softmax is of the first kind, whose bands stand elsewhere":
            f"{SOFTMAX}.version" not in tensors,
    }  # fmt: skip
    for what, is_so in refused.items():
        if is_so:
            raise refuse(what)
    # Before a model of the settings is made, which could have any number of blocks.
    layers = given("decoder_layers")
    blocks = {block[1] for block in map(_BLOCK.match, tensors) if block}
    if layers != len(blocks):
        raise refuse(f"its settings say {short(layers)} blocks, and it has weights of {len(blocks)}")
    known = sum(
        len(tensor) for name, tensor in tensors.items() if _EMBEDDINGS.fullmatch(name) and tensor.ndim
    )
    if known != n_words:
        raise InputError(
            f"The dictionary {path.parent / DICTIONARY} has {n_words} words, the special ones included, and "
            f"the checkpoint {path.name} embeddings of {known}. Expected the dictionary of this checkpoint."
        )
    ties = bool(given("tie_adaptive_weights"))
    # Old checkpoints have the inverse setting.
    ties_projections = given("no_tie_adaptive_proj") is False or bool(given("tie_adaptive_proj"))
    try:
        return WikiLMConfig(
            vocab_size=n_words, hidden_size=given("decoder_embed_dim"), num_hidden_layers=layers,
            num_attention_heads=given("decoder_attention_heads"),
            intermediate_size=given("decoder_ffn_embed_dim"),
            max_position_embeddings=given("max_target_positions") or given("tokens_per_sample") or 1024,
            cutoffs=cutoffs or (), adaptive_factor=factor, hidden_act=given("activation_fn", "relu"),
            tie_word_embeddings=ties, tie_projections=ties and ties_projections,
            final_norm=not _lacks_final_norm(settings, tensors),
            scale_embedding=not given("no_scale_embedding", False),
        )  # fmt: skip
    except InputError as error:
        raise refuse(printable(str(error))) from error


def _lacks_final_norm(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether there is no final norm, as in all checkpoints before version 3."""
    version = tensors.get("decoder.version")
    if version is not None and version.numel() == 1 and float(version) <= 2:
        return True
    if "decoder_final_norm" in settings:
        return not settings["decoder_final_norm"]
    return "no_tie_adaptive_proj" in settings or bool(settings.get("no_decoder_final_norm", False))


def _cutoffs(value: Any) -> list[int] | None:
    """Parse cutoffs such as ``"20000,60000"``."""
    known = isinstance(value, str) and re.fullmatch(r"\d{1,9}(,\d{1,9})*", value)
    return [int(part) for part in value.split(",")] if known else None


def _check_tied(model: WikiLMForCausalLM, path: Path) -> None:
    """Check that input and output embeddings are tied if the settings say so."""
    head, embeddings = model.lm_head, model.embed_tokens
    pairs = list(zip(head.words, embeddings.words, strict=True))
    if model.config.tie_projections:
        pairs += zip(head.projections, list(embeddings.projections)[1:], strict=True)
    if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
        raise InputError(
            f"The settings of {path} say that its output takes the embeddings of its input, and the "
            "weights of both differ. The checkpoint is damaged, or is not fairseq's: download it again."
        )


def tensor_names(model: WikiLMForCausalLM) -> dict[str, tuple[str, bool]]:
    """For each tensor that fairseq has, what it is called here, and whether it is turned."""
    config, n_bands = model.config, len(model.lm_head.bands)
    ties = config.tie_word_embeddings and config.tie_projections
    names: dict[str, tuple[str, bool]] = {f"{SOFTMAX}.head.class_proj.weight": ("lm_head.classes", False)}
    for band in range(n_bands):
        names[f"decoder.embed_tokens.embeddings.{band}.0.weight"] = (f"embed_tokens.words.{band}", False)
        names[f"decoder.embed_tokens.embeddings.{band}.1.weight"] = (
            f"embed_tokens.projections.{band}",
            False,
        )
    for band in range(1, n_bands):
        tail = f"{SOFTMAX}.tail.{band - 1}"
        names[f"{tail}.0.weight"] = (f"lm_head.projections.{band - 1}", not ties)
        names[f"{tail}.2.weight"] = (f"lm_head.words.{band}", False)
    if config.tie_word_embeddings:
        names[f"{SOFTMAX}.head.word_proj.weight"] = ("lm_head.words.0", False)
    for name in model.state_dict():
        if name.startswith(("layers.", "layer_norm.")):
            names[f"decoder.{name.replace('.mlp.', '.')}"] = (name, False)
    return names


def _weights(model: WikiLMForCausalLM, tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors by the names of the model, none left over and none lacking."""
    tensors = {name: tensor for name, tensor in tensors.items() if not _IGNORED.fullmatch(name)}
    names, weights = tensor_names(model), {}
    if not model.config.tie_word_embeddings and f"{SOFTMAX}.head.weight" in tensors:
        # Words of the first band and classes in one matrix.
        first = model.lm_head.bands[0][1]
        head = tensors.pop(f"{SOFTMAX}.head.weight")
        weights["lm_head.words.0"], weights["lm_head.classes"] = head[:first], head[first:]
        del names[f"{SOFTMAX}.head.class_proj.weight"]
    lacking, more = sorted(names.keys() - tensors.keys()), sorted(tensors.keys() - names.keys())
    if lacking or more:
        what = f"lacks {lacking[0]}" if lacking else f"has {more[0]}"
        raise InputError(
            f"The checkpoint {path} is not of a WikiLM: it {printable(what, limit=120)}. {_EXPECTED}"
        )
    for theirs, (ours, turned) in names.items():
        weights[ours] = tensors[theirs].T.contiguous() if turned else tensors[theirs]
    return weights
