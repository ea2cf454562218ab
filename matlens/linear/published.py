"""The maps that the authors of paper A published, read without executing their pickles.

``sashay/linear-shortcut`` has a folder for each model and corpus, such as ``gpt2-medium/wikipedia``, in which
``6_9.pickle`` is the map from layer 6 to layer 9, and the authors' code (``sashayd/mat``) writes
``p6_1_2.pickle`` for a sub-module of block 6. Each is a pickled tensor, or a list of it and an intercept.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from matlens.errors import InputError, checked, printable
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet, write_maps
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.layout import ModelLayout
from matlens.models.sites import STREAM, Site

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_FILE = re.compile(r"(?:p(?P<block>[0-9]{1,4})_)?(?P<first>[0-9]{1,4})_(?P<last>[0-9]{1,4})\.(?:pickle|pkl)")
_SUBMODULES = {(0, 1): "ln1", (1, 2): "attn", (3, 4): "ln2", (4, 5): "ffn"}
_SUMS = {(2, 3), (5, 6)}  # additions to the residual stream, not sub-modules
_VALUE_BYTES = 16  # of a float64 as text in protocol 2
_OTHER_BYTES = 2**20  # of a pickle beyond its values


@checked
def convert_published(source: str | Path, model: TransformerBridge, folder: str | Path) -> MapSet:
    """Turn the maps that the authors published for a model into a folder of maps.

    Maps between layers, ``6_9.pickle``, and of norms, attention and FFNs of blocks, ``p6_1_2.pickle``; files
    of the additions in between are skipped. The files do not name their model: only its number of layers and
    its width are compared, so make sure that the weights are the right ones.

    Parameters
    ----------
    source
        The folder with the files, such as ``gpt2-medium/wikipedia`` of a copy of ``sashay/linear-shortcut``.
    model
        The model that they were fitted on, such as ``matlens.load("gpt2-medium")``.
    folder
        Where the maps are written, as `MapSet.save` does.
    """
    source, layout = Path(source), ModelLayout.from_model(model)
    files = _files(source, layout)
    digest = hashlib.sha256()
    for path in files.values():
        digest.update(_content(path, layout.d_model))
    provenance = Provenance(
        ModelIdentity.from_model(model), {"corpus": source.name},
        details={"published": "sashay/linear-shortcut", "files": len(files)},
    )  # fmt: skip

    def read(missing: list[tuple[str, str]]) -> Iterator[LinearMap]:
        for pair in missing:
            weight, bias = _read_map(files[pair], layout.d_model)
            yield LinearMap.from_solution(weight, bias, *pair, provenance)

    return write_maps(folder, list(files), read, provenance, content=digest.hexdigest()[:16])


def _files(source: Path, layout: ModelLayout) -> dict[tuple[str, str], Path]:
    """The files of a folder, by the sites that each maps between."""
    files: dict[tuple[str, str], Path] = {}
    for path in sorted(source.iterdir()):
        match = _FILE.fullmatch(path.name)
        pair = None if match is None else _sites(match, path, layout)
        if pair in files:
            raise InputError(f"{files[pair]} and {path} must not be the map of one pair of sites.")
        if pair is not None:
            files[pair] = path
    if not files:
        raise InputError(f"{source} must contain published maps, such as 6_9.pickle, got none.")
    return files


def _sites(match: re.Match[str], path: Path, layout: ModelLayout) -> tuple[str, str] | None:
    ends = int(match["first"]), int(match["last"])
    if match["block"] is None:
        if not 0 <= ends[0] < ends[1] <= layout.n_layers:
            raise InputError(
                f"{path} must map a layer to a later one of 0 to {layout.n_layers}. Is it of another model?"
            )
        return str(Site(STREAM, ends[0])), str(Site(STREAM, ends[1]))
    if ends in _SUMS:
        return None
    name, block = _SUBMODULES.get(ends), int(match["block"])
    if name is None or f"{name}_in" not in layout.kinds or block >= layout.n_layers:
        raise InputError(f"{path} must be of a sub-module of this model. Is it of another model?")
    return f"{name}_in.{block}", f"{name}_out.{block}"


def _content(path: Path, d_model: int) -> bytes:
    limit = _VALUE_BYTES * (d_model + 1) * d_model + _OTHER_BYTES
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise InputError(f"{path} is larger than a map of {d_model} dimensions. Is it of another model?")
    return content


def _read_map(path: Path, d_model: int) -> tuple[Tensor, Tensor | None]:
    tensors = read_tensors(_content(path, d_model), str(path))
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if shapes not in ([(d_model, d_model)], [(d_model, d_model), (d_model,)]):
        raise InputError(
            f"{path} must hold a matrix [{d_model}, {d_model}], and an intercept at most, got the shapes "
            f"{', '.join(map(str, shapes))}. Is it of another model?"
        )
    weight, *bias = (tensor.detach().double() for tensor in tensors)
    return weight, bias[0] if bias else None


# Pickles of tensors. `pickle` calls what a file names, so names and instructions are few.


def _load_storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    """A view of a storage; `as_strided` refuses one larger than the storage, `set_` would grow it."""
    flat = torch.frombuffer(bytearray(bytes(storage._untyped_storage)), dtype=storage.dtype)
    return flat.as_strided(size, stride, offset)


_NAMES: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.storage._load_from_bytes": _load_storage,
    "_codecs.encode": lambda text, _: text.encode("latin1"),  # as protocol 2 writes bytes
    "collections.OrderedDict": lambda: OrderedDict(),  # of hooks: without arguments, which could hold a bomb
}
# Without sets and dicts, whose keys are hashed, and without places in the memo beyond the pickle's length.
_INSTRUCTIONS = {
    "PROTO", "FRAME", "STOP", "MARK", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "EMPTY_TUPLE", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "MEMOIZE", "BINPUT", "BINGET",
    "LONG_BINPUT", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE",
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if f"{module}.{name}" not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for '{module}.{name}'")
        return _NAMES[f"{module}.{name}"]


def read_tensors(content: bytes, what: str) -> list[Tensor]:
    """The tensor of a pickle, or those of a list; raises InputError for any other content."""
    try:
        for instruction, argument, _ in pickletools.genops(content):
            beyond = instruction.name == "LONG_BINPUT" and int(argument or 0) > len(content)
            if instruction.name not in _INSTRUCTIONS or beyond:
                raise pickle.UnpicklingError(f"it has the instruction {instruction.name}")
        loaded = _Unpickler(io.BytesIO(content)).load()
        tensors = loaded if isinstance(loaded, list) and loaded else [loaded]
        if not all(isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in tensors):
            raise pickle.UnpicklingError("it holds other values")
    except Exception as error:  # a damaged pickle can fail in any way
        raise InputError(
            f"{what} must be a pickle of tensors of floating point: {printable(str(error), limit=200)}."
        ) from error
    return tensors
