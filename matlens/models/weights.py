"""A model's weights: its fingerprint, and modules and matrices read from it."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from matlens.errors import InputError, checked
from matlens.models.inputs import stack_of
from matlens.numerics import all_finite, product_eps, without_autocast

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

# Settings about a model's path, name or runtime, not its content.
_NOT_THE_MODEL = frozenset({
    "_name_or_path", "_commit_hash", "transformers_version", "tokenizer_class", "auto_map", "architectures",
    "gguf_file", "dtype", "torch_dtype", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal", "_attn_implementation_autoset", "output_attentions",
    "output_hidden_states", "return_dict", "use_cache", "torchscript", "pad_token_id", "bos_token_id",
    "eos_token_id", "sep_token_id", "decoder_start_token_id", "id2label", "label2id", "problem_type",
    "task_specific_params", "finetuning_task",
})  # fmt: skip
_SAMPLED = 1024  # values of a tensor; 4,096 take three times as long
_PROBES = 5  # rows of a matrix that are checked by running its layer


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with these parameters."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def float32_on(module: nn.Module, device: torch.device) -> nn.Module:
    """A module in float32 on a device: itself, or a copy."""
    if all(weight.dtype == torch.float32 and weight.device == device for weight in module.parameters()):
        return module
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if "_hf_hook" in vars(part):  # of accelerate, which brings what comes in to where the module was
            vars(part).pop("forward", None)
    return copied.to(device, torch.float32)


@torch.no_grad()
@without_autocast()
def rows_of_linear(module: nn.Module, shape: tuple[int, int]) -> Float[Tensor, "d_mlp d_model"]:
    """Weights of a linear layer (Linear, Conv1D) with one row per input.

    The layer is asked which way round they are: a single coefficient of 1 has to give that row and the bias.
    So packed weights, and those that an adapter changes on the way, are not mistaken for the matrix.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2:
        probed = torch.linspace(0, shape[0] - 1, _PROBES, dtype=torch.float64).long()
        coefficients = torch.zeros(_PROBES, shape[0], dtype=weight.dtype)
        coefficients[torch.arange(_PROBES), probed] = 1
        outputs = module(coefficients.to(weight.device)).float()
        for matrix in (weight.detach().T, weight.detach()):
            if matrix.shape != shape:
                continue
            rows, constant = matrix[probed.to(weight.device)].float(), 0.0 if bias is None else bias.float()
            slack = 4 * product_eps(weight.dtype) * (rows.abs() + abs(constant))
            if bool(((outputs - rows - constant).abs() <= slack).all()):
                return matrix
    raise InputError(
        f"The output layer of the FFNs ({type(module).__name__}) is not a plain matrix of {shape[0]} x "
        f"{shape[1]}, so its value vectors cannot be read. Load the model without quantization or adapters."
    )


@checked
def fingerprint(model: TransformerBridge) -> str:
    """A 16-digit hex digest of about 1,024 values of every parameter and saved buffer.

    Values are evenly spaced; names, shapes and dtypes count too. The same on every device.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in _tensors(model):
        digest.update(f"{plain_name(name)}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_bytes_of(_sample(tensor)))
    return digest.hexdigest()


@checked
def configuration_digest(model: TransformerBridge) -> str:
    """A 16-digit hex digest of the configuration, without names, paths and runtime settings."""
    return hashlib.blake2b(_configuration(model), digest_size=8).hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """Evenly spaced values from all columns."""
    tensor = tensor.detach()
    step = max(tensor.numel() // _SAMPLED, 1)
    while tensor.ndim and math.gcd(step, tensor.shape[-1]) > 1:  # else some columns are never sampled
        step += 1
    if tensor.is_contiguous():
        return tensor.view(-1)[::step]
    places = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]  # no copy of a transposed matrix


def tensor_digest(*tensors: Tensor) -> str:
    """A 16-digit hex digest of the values, shapes and dtypes of tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def precision(model: TransformerBridge) -> torch.dtype:
    """The precision of the weights, or where they are of several, that of the configuration."""
    kinds = {tensor.dtype for _, tensor in _tensors(model) if tensor.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else model.cfg.dtype


def check_finite_weights(inner: nn.Module, name: str) -> None:
    """Raise InputError for weights of a plain model that are not finite, or not in memory."""
    for parameter, tensor in inner.named_parameters():
        _check_in_memory(tensor, parameter, name)
        if tensor.is_floating_point() and not all_finite(tensor):
            raise InputError(
                f"The weights of {name} are not finite, including {plain_name(parameter)}. Their training "
                "failed, or they overflow past 65504 in float16: load them in bfloat16 or float32."
            )


def _check_in_memory(tensor: Tensor, parameter: str, name: str) -> None:
    if tensor.is_meta:
        raise InputError(
            f"The weights of {name} must be in memory, including {plain_name(parameter)}. They are "
            "offloaded: give the model more devices (device_map), or load it in half precision (dtype)."
        )


def _configuration(model: TransformerBridge) -> bytes:
    """What decides how the weights are used; the two stacks of an encoder-decoder differ."""
    shaping = _shaping(model.original_model.config.to_dict())
    return f"{json.dumps(shaping, sort_keys=True, default=str)}{stack_of(model) or ''}".encode()


def _shaping(config: Mapping[Any, Any]) -> dict[str, Any]:
    """The configuration, those inside it included, without what is not the model."""
    shaping = {str(key): value for key, value in config.items() if str(key) not in _NOT_THE_MODEL}
    quantization = shaping.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "gguf":
        del shaping["quantization_config"]  # the dequantized weights are hashed themselves
    return {key: _shaping(value) if isinstance(value, Mapping) else value for key, value in shaping.items()}


def _tensors(model: TransformerBridge) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that a checkpoint holds."""
    inner = model.original_model
    for name, tensor in inner.named_parameters():
        _check_in_memory(tensor, name, type(inner).__name__)
        yield name, tensor
    for place, module in inner.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{place}.{name}", buffer


def plain_model(model: TransformerBridge, *, as_loaded: bool = False) -> nn.Module | None:
    """A model without weights as the configuration makes it, or None; ``as_loaded`` without patterns."""
    inner = model.original_model
    try:
        config = copy.deepcopy(inner.config)
        if as_loaded:
            config.output_attentions, config._attn_implementation = False, None
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return type(inner)(config)
    except Exception:  # code that came with a model can ask for anything
        return None


def plain_name(path: str) -> str:
    """The name of a module or parameter in the model without a bridge."""
    return ".".join(name for name in path.split(".") if name != "_original_component")


def plain_state(model: TransformerBridge) -> dict[str, Tensor]:
    """All parameters and buffers by the names of the original model."""
    inner = model.original_model
    named = (*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False))
    return {plain_name(name): tensor.detach() for name, tensor in named}
