"""Fingerprints of a model's weights, and its modules."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from jaxtyping import Float
from torch import Tensor, nn

from matlens.errors import InputError, checked
from matlens.models.inputs import stack_of
from matlens.numerics import all_finite

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

HALF = (torch.bfloat16, torch.float16)
# Settings about a model's path, name or runtime, not its content.
_NOT_THE_MODEL = frozenset({
    "_name_or_path", "_commit_hash", "transformers_version", "tokenizer_class", "auto_map", "architectures",
    "gguf_file", "dtype", "torch_dtype", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal", "_attn_implementation_autoset", "output_attentions",
    "output_hidden_states", "return_dict", "use_cache", "torchscript", "pad_token_id", "bos_token_id",
    "eos_token_id", "sep_token_id", "decoder_start_token_id", "id2label", "label2id", "problem_type",
    "task_specific_params", "finetuning_task",
})  # fmt: skip
_WORDS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_RUN = 2**20  # values that share a checksum, of at most two words each
_PROBES = 5  # rows of a matrix that are checked by running its layer
_AT_ONCE = 2**15  # words that are multiplied at once on a CPU, where they fit into its cache


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


@torch.inference_mode()
def rows_of_linear(module: nn.Module, shape: tuple[int, int]) -> Float[Tensor, "d_mlp d_model"]:
    """Weights of a linear layer (Linear, Conv1D) with one row per input.

    The layer is asked which way round they are: a single coefficient of 1 has to give that row and the bias.
    So packed weights, and those that an adapter changes on the way, are not mistaken for the matrix.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2:
        probed = torch.linspace(0, shape[0] - 1, _PROBES).long()
        coefficients = torch.zeros(_PROBES, shape[0], dtype=weight.dtype)
        coefficients[torch.arange(_PROBES), probed] = 1
        outputs = module(coefficients.to(weight.device)).float()
        for matrix in (weight.detach().T, weight.detach()):
            if matrix.shape != shape:
                continue
            rows, constant = matrix[probed.to(weight.device)].float(), 0.0 if bias is None else bias.float()
            slack = 4 * torch.finfo(weight.dtype).eps * (rows.abs() + abs(constant))
            if bool(((outputs - rows - constant).abs() <= slack).all()):
                return matrix
    raise InputError(
        f"The output layer of the FFNs ({type(module).__name__}) is not a plain matrix of {shape[0]} x "
        f"{shape[1]}, so its value vectors cannot be read. Load the model without quantization or adapters."
    )


def known_fingerprints(model: TransformerBridge) -> tuple[str, dict[str, str]]:
    """`fingerprint` and `rounded_fingerprints`, computed again when a faster checksum changes."""
    key = (_configuration(model), fast_checksum(_tensors(model)))
    if model not in _KNOWN or _KNOWN[model][0] != key:
        _KNOWN[model] = (key, fingerprint(model), rounded_fingerprints(model))
    _, exact, rounded = _KNOWN[model]
    return exact, dict(rounded)


_KNOWN: WeakKeyDictionary[Any, tuple[Any, str, dict[str, str]]] = WeakKeyDictionary()


@checked
def fingerprint(model: TransformerBridge) -> str:
    """A 16-digit hex digest of weights, names, shapes, precision and configuration.

    The same on every device, and wherever the model's files are.
    """
    digest = hashlib.sha256(_configuration(model))
    for name, tensor in _tensors(model):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_checksums(tensor).tobytes())
    return digest.hexdigest()[:16]


@checked
def rounded_fingerprints(model: TransformerBridge) -> dict[str, str]:
    """Digests of the weights rounded to each half precision; in half precision, to that one alone."""
    tensors = [(name, tensor.detach()) for name, tensor in _tensors(model)]
    wide = {tensor.dtype for _, tensor in tensors if tensor.is_floating_point()} - {*HALF}
    digests = {}
    for dtype in HALF if wide else [dtype for dtype in HALF if dtype == precision(model)]:
        digest = xxhash.xxh3_64(_configuration(model))
        for name, tensor in tensors:
            rounded = tensor.to(dtype) if tensor.is_floating_point() else tensor
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(_bytes_of(rounded))
        digests[str(dtype).removeprefix("torch.")] = digest.hexdigest()
    return digests


class WeightChecksum:
    """Notices that the weights which an object reads have changed since it was made.

    Neither a tensor's version nor its address changes when ``.data`` is edited or a LoRA is merged in place,
    so the weights themselves are read: 4 ms for the 28 million of SmolLM2's unembedding on a CPU.
    """

    def __init__(self, modules: Sequence[nn.Module], name: str) -> None:
        self._modules, self._name, self._within = modules, name, 0
        self._checksum = self._read()

    def check(self) -> None:
        """Raise InputError if the weights have changed; skipped inside `constant`."""
        if not self._within and self._read() != self._checksum:
            raise InputError(
                f"The weights of the model have changed since {self._name} was made. Make {self._name} "
                "again, and repeat collecting and fitting."
            )

    @contextmanager
    def constant(self) -> Iterator[None]:
        """Check the weights once before and once after many calls, instead of at each of them."""
        self.check()
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1
        self.check()

    def _read(self) -> str:
        return fast_checksum(pair for module in self._modules for pair in _tensors_of(module))


def fast_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digits that change with any value of named tensors, for this process and device alone."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{tensor.device}".encode())
        digest.update(_bytes_of(tensor) if tensor.device.type == "cpu" else _checksums(tensor).tobytes())
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def precision(model: TransformerBridge) -> torch.dtype:
    """The precision of the weights, or where they are of several, that of the configuration."""
    kinds = {tensor.dtype for _, tensor in _tensors(model) if tensor.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else model.cfg.dtype


def check_in_memory(model: TransformerBridge) -> None:
    """Refuse a model with weights that accelerate brings in from elsewhere for each pass."""
    parameters = model.original_model.named_parameters()
    absent = next((name for name, tensor in parameters if tensor.is_meta), None)
    if absent is not None:
        raise InputError(
            f"Weights of {model.cfg.model_name} are not in memory, including {plain_name(absent)}: "
            "they are offloaded to the disk or to the CPU. Give the model more devices (device_map), or load "
            "it in half precision (dtype)."
        )


@checked
def check_finite_weights(model: TransformerBridge) -> None:
    """Raise InputError for weights that are not finite, or on no device."""
    check_in_memory(model)
    for name, tensor in model.original_model.named_parameters():
        if tensor.is_floating_point() and not all_finite(tensor):
            raise InputError(
                f"The weights of {model.cfg.model_name} are not finite, including {plain_name(name)}. Their "
                "training failed, or they overflow past 65504 in float16: load them in bfloat16 or float32."
            )


def _configuration(model: TransformerBridge) -> bytes:
    """Start of a fingerprint; the two stacks of an encoder-decoder differ."""
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
    check_in_memory(model)
    yield from _tensors_of(model.original_model)


def _tensors_of(inner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from inner.named_parameters()
    for place, module in inner.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{place}.{name}", buffer


def _checksums(tensor: Tensor) -> np.ndarray:
    """A sum modulo 2**64 for each run of words, each word times its place's odd multiplier.

    A change of one word changes its sum for certain, since an odd number can be divided by.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    device = flat.device
    factors, step = _multipliers(device), _AT_ONCE if device.type == "cpu" else 2 * _RUN
    sums = []
    for run in flat.split(_RUN):
        total = torch.zeros((), dtype=torch.int64, device=device)
        words = run.view(_WORDS[run.element_size()])
        for start in range(0, len(words), step):
            block = words[start : start + step].to(torch.int64)
            total += block.mul_(factors[start : start + len(block)]).sum()
        sums.append(total)
    return torch.stack(sums).cpu().numpy() if sums else np.empty(0, dtype=np.int64)


@cache
def _multipliers(device: torch.device) -> Tensor:
    """Pseudorandom odd 64-bit integers by SplitMix64."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, 2 * _RUN + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)


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
