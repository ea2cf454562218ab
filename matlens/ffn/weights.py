"""Where the parts of a model that short commands need lie in its files, and how they are read from there.

Which tensor of which file is a value matrix, the unembedding or a norm is not looked up by a name: the model
is built once, its parts are found in the files by their numbers, and what was found is written down with the
hash of each tensor. A part that is not in the files as the model has it is not written down.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Record = Mapping[str, Any]


class NotInFiles(Exception):
    """A part of a model is not in its files, or not as it was recorded."""


class WeightFiles:
    """The tensors in the safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self._file_of |= dict.fromkeys(file.keys(), path)

    def _read(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], "pt") as file:
            return file.get_tensor(name)

    def find(self, name: str, values: Tensor) -> dict[str, Any]:
        """The record of a tensor of the model: what it is called in the files, and the hash of it there."""
        values = values.detach().cpu()
        for candidate in self._candidates(name, values):
            there = self._read(candidate)
            if _same_bits(there.to(values.dtype), values):
                return {"name": candidate, "sha256": _hash(there)}
        raise NotInFiles(name)

    def _candidates(self, name: str, values: Tensor) -> Iterator[str]:
        """Tensors that may be the one of a name: those of that name or the end of it, then all others."""
        parts = name.split(".")
        named = [".".join(parts[start:]) for start in range(min(len(parts) - 1, 3))]
        for candidate in dict.fromkeys([*(name for name in named if name in self._file_of), *self._file_of]):
            with safe_open(self._file_of[candidate], "pt") as file:
                there = file.get_slice(candidate)
                if there.get_shape() == list(values.shape) and (
                    values.ndim == 0 or _same_bits(there[:1].to(values.dtype), values[:1])
                ):
                    yield candidate

    def take(self, record: Record, dtype: torch.dtype) -> Tensor:
        """A tensor by its record, in the precision of the model."""
        name = record["name"]
        if name not in self._file_of:
            raise NotInFiles(f"{name} is not there")
        tensor = self._read(name)
        if _hash(tensor) != record["sha256"]:
            raise NotInFiles(f"{name} does not hold what was written down")
        return tensor.to(dtype)


def named_tensors(model: TransformerBridge) -> dict[int, str]:
    """The name of each parameter of the model that is in a bridge, without what the bridge puts around it."""
    return {id(parameter): _plain(name) for name, parameter in model.original_model.named_parameters()}


def module_record(files: WeightFiles, model: TransformerBridge, module: nn.Module) -> dict[str, Any]:
    """The record of a module without buffers: where it stands in the model, and its parameters."""
    places = (path for path, other in model.original_model.named_modules() if other is module)
    path = next(places, None)
    if path is None or next(module.buffers(), None) is not None:
        raise NotInFiles(type(module).__name__)
    place = _plain(path)
    parameters = {
        name: files.find(f"{place}.{name}", parameter.detach())
        for name, parameter in module.named_parameters()
    }
    return {"place": place, "parameters": parameters}


def build_modules(
    architecture: str, files: WeightFiles, records: Sequence[Record], dtype: torch.dtype
) -> list[nn.Module]:
    """Modules by their records, in float32: those of a model without weights, filled from the files."""
    if not records:
        return []
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(files.folder)
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("meta"):
            warnings.simplefilter("ignore")
            model = getattr(transformers, architecture)(config)
        modules = [model.get_submodule(record["place"]) for record in records]
    except Exception as error:  # transformers fails in many ways here
        raise NotInFiles(architecture) from error
    for module, record in zip(modules, records, strict=True):
        values = {name: files.take(part, dtype) for name, part in record["parameters"].items()}
        module.load_state_dict(values, assign=True)
        module.eval().float()
    return modules


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_original_component")


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(_bytes(first), _bytes(second))


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).numpy().data).hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
