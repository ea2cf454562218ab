"""Lens files: folders of matlens, and files of TransformerLens and tuned-lens."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from matlens import parallel
from matlens.errors import InputError, printable, short
from matlens.io.artifact import CONFIG, Artifact
from matlens.io.files import check_writable, damaged, read_json, write_files
from matlens.lens.maps import LensMaps, Standardisation
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import CONVENTION
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.weights import tensor_digest

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_HOLDS = "lens"
_OWN = "matlens"  # key in the metadata of a Jacobian lens: our provenance


def check_lens_folder(folder: Path, method: str) -> None:
    """Check early that a lens of a method can be stored in a folder."""
    Artifact.check_possible(folder, _HOLDS, {"method": method})
    check_writable(folder)


def write_lens(folder: str | Path, lens: LensMaps) -> None:
    """Write a safetensors file for each map of a lens, and ``config.json`` when all are there."""
    _check_finite(lens, "The lens")
    linears: dict[str, LinearMap] = {}
    names: dict[int, str | None] = {}
    for layer, linear in lens.maps.items():
        shared = [name for name, of in linears.items() if linear and of.weight is linear.weight]
        names[layer] = None if linear is None else shared[0] if shared else f"h.{layer}"
        if linear is not None and not shared:
            linears[f"h.{layer}"] = linear
    request = {
        "provenance": lens.provenance.to_json(), "method": lens.method, "layers": names,
        "scales": lens.scales, "norm": None if lens.norm is None else asdict(lens.norm),
        "content": lens.digest, "convention": CONVENTION, "dtype": "float32",
    }  # fmt: skip
    with Artifact.writing(folder, _HOLDS, request) as artifact:
        if not artifact.finished:
            for name, linear in linears.items() if parallel.is_main() else ():
                artifact.write(name, {key: part.float() for key, part in linear.parts.items()})
            artifact.finish()


def read_lens(folder: str | Path) -> LensMaps:
    """Read the files of `write_lens`, and verify them."""
    artifact = Artifact.open(folder, _HOLDS)
    request = artifact.request
    provenance = Provenance.from_json(request["provenance"])
    norm = None if request["norm"] is None else Standardisation(**request["norm"])
    names = {int(layer): name for layer, name in request["layers"].items()}
    scales = {int(layer): float(scale) for layer, scale in request["scales"].items()}
    parts = {name: artifact.read_all(name) for name in dict.fromkeys(names.values()) if name is not None}
    maps = {layer: name and _linear(parts[name], layer, provenance) for layer, name in names.items()}
    lens = LensMaps(maps, str(request["method"]), provenance, norm, scales)
    if lens.digest != request["content"]:
        raise damaged(artifact.folder / CONFIG, "is of a lens with other values than these files hold")
    return lens


def _linear(parts: Mapping[str, Tensor], layer: int, provenance: Provenance) -> LinearMap:
    bias, right, last = parts.get("bias"), parts.get("right"), f"h.{provenance.identity.n_layers}"
    return LinearMap(parts["weight"], bias, f"h.{layer}", last, provenance, right)


def write_jacobian_lens(path: str | Path, lens: LensMaps) -> None:
    """Write maps as TransformerLens' `JacobianLens` does; see `Lens.to_jacobian_lens`."""
    has_bias = any(linear is not None and linear.bias is not None for linear in lens.maps.values())
    if lens.norm is not None or has_bias or any(scale != 1 for scale in lens.scales.values()):
        raise InputError(
            f"A Jacobian lens is a matrix for each layer, and this lens ({lens.method}) has a bias, a norm "
            "or a scale, without which it would read other tokens. Use a lens such as 'mat'."
        )
    matrices = {layer - 1: lens.matrix(layer) for layer in lens.layers if layer > 0}
    if not matrices:
        raise InputError("A Jacobian lens must have a layer above 0, got layer 0 only.")
    record = {
        "method": lens.method, "provenance": lens.provenance.to_json(), "content": _digest_of(matrices)
    }  # fmt: skip
    own = json.loads(json.dumps(record, default=str))  # mappings as dicts, which such a file may hold
    buffer = io.BytesIO()
    torch.save(
        {
            "J": {layer: matrix.detach().cpu().float().contiguous() for layer, matrix in matrices.items()},
            "n_prompts": int((lens.provenance.data or {}).get("n", 0)), "source_layers": sorted(matrices),
            "d_model": lens.provenance.identity.d_model,
            "metadata": {
                "model_name": lens.provenance.identity.name, "estimator": lens.method, _OWN: own
            },
        },
        buffer,
    )  # fmt: skip
    write_files({Path(path): buffer.getvalue()})


def _digest_of(matrices: Mapping[int, Tensor]) -> str:
    """A 16-digit hex digest of the matrices of the layers in a file."""
    return tensor_digest(
        torch.tensor(sorted(matrices)).double(),
        *(matrices[layer].cpu().float() for layer in sorted(matrices)),
    )


def read_jacobian_lens(path: str | Path, model: TransformerBridge, *, strict: bool = True) -> LensMaps:
    """Read a file of TransformerLens' `JacobianLens`; see `Lens.from_jacobian_lens`."""
    from transformer_lens.tools.analysis import JacobianLens

    path = Path(path)
    identity = ModelIdentity.from_model(model)
    expected = "Expected a file that JacobianLens.save or Lens.to_jacobian_lens has written, of this model."
    with _foreign(path, expected):
        content = _unpickled(path)
        lens = JacobianLens(
            {int(layer): matrix for layer, matrix in content["J"].items()},
            n_prompts=int(content.get("n_prompts", 0)), d_model=int(content["d_model"]),
            metadata=content.get("metadata"),
        )  # fmt: skip
        record = lens.metadata.get(_OWN)
        if strict or record is None:
            lens.validate_model(model)
        jacobians = {layer + 1: lens.jacobians[layer].contiguous() for layer in lens.source_layers}
        if record is None:
            data = {"corpus": str(lens.metadata.get("corpus", "unnamed")), "n": lens.n_prompts}
            method, provenance = "jacobian", Provenance(identity, data)
        else:
            method, provenance = str(record["method"]), Provenance.from_json({**record["provenance"]})
    if record is not None and record.get("content") != _digest_of(lens.jacobians):
        raise InputError(
            f"{path} holds other matrices than Lens.to_jacobian_lens wrote: it was changed or damaged. If "
            "the change is intended, remove 'matlens' from its metadata."
        )
    maps = {layer: _linear({"weight": matrix}, layer, provenance) for layer, matrix in jacobians.items()}
    return _check_finite(LensMaps(maps, method, provenance), path)


def read_tuned_lens(folder: str | Path, model: TransformerBridge) -> LensMaps:
    """Read a folder of tuned-lens; see `Lens.from_tuned_lens`."""
    folder = Path(folder)
    expected = "Expected config.json and params.pt as tuned-lens saves them, of this model."
    with _foreign(folder, expected):
        config = read_json(folder / "config.json")
        width, n_layers = int(config["d_model"]), int(config["num_hidden_layers"])
        if (width, n_layers) != (model.cfg.d_model, model.cfg.n_layers):
            raise InputError(
                f"The tuned lens in {folder} is of a model with {n_layers} layers of {width} dimensions; "
                f"this model has {model.cfg.n_layers} of {model.cfg.d_model}."
            )
        if not _has_unembedding(model, config):
            raise InputError(
                f"The tuned lens in {folder} was trained for another unembedding than this model has: its "
                f"config.json says {short(config.get('base_model_name_or_path'))}. Load that model."
            )
        state = _unpickled(folder / "params.pt")
        names = {f"{layer}.{part}" for layer in range(n_layers) for part in ("weight", "bias")}
        if not {f"{layer}.weight" for layer in range(n_layers)} <= set(state) <= names:
            raise InputError(f"{folder / 'params.pt'} holds {short(sorted(state))}. {expected}")
        keys = ("base_model_name_or_path", "base_model_revision", "lens_type")
        details = {"tuned_lens": {key: config.get(key) for key in keys}}
        provenance = Provenance(ModelIdentity.from_model(model), details=details)
        maps = {}
        for layer in range(n_layers):
            parts = {"weight": state[f"{layer}.weight"].float() + torch.eye(width, dtype=torch.float32)}
            if f"{layer}.bias" in state:
                parts["bias"] = state[f"{layer}.bias"].float()
            maps[layer] = _linear(parts, layer, provenance)
    return _check_finite(LensMaps(maps, "tuned", provenance), folder)


def _has_unembedding(model: TransformerBridge, config: Mapping[str, Any]) -> bool:
    """Whether a tuned lens was trained for the unembedding that a model has, as far as its hash tells.

    The hash is of printed digits, which half precision changes; then the model's name is compared.
    """
    weight = model.unembed.original_component.weight
    if config.get("unembed_hash") in (None, _tuned_hash(weight)):
        return True
    said, name = str(config.get("base_model_name_or_path")), str(model.cfg.model_name)
    there = Path(name).is_absolute() and Path(name).name == said.rstrip("/").split("/")[-1]
    return weight.element_size() < 4 and (said == name or there)


def _tuned_hash(weight: Tensor) -> str:
    """The unembedding hash of tuned-lens: of NumPy's printed form, with one decimal."""
    usual = np.printoptions(
        edgeitems=3, threshold=1000, linewidth=75, suppress=False, nanstr="nan", infstr="inf", sign="-",
        formatter=None, floatmode="maxprec", legacy=False,
    )  # fmt: skip
    with usual:  # independent of a notebook's print options
        text = np.array_str(weight.detach().cpu().float().numpy(), precision=1)
    return hashlib.sha256(text.encode()).hexdigest()


def _unpickled(path: Path) -> dict[str, Any]:
    """Tensors and plain values in a file of torch.save; anything else is refused without executing it."""
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # problems are reported by the error
        content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise TypeError(f"it holds a {type(content).__name__}")
    return content


@contextmanager
def _foreign(path: Path, expected: str) -> Iterator[None]:
    """Turn errors of reading a foreign file into an InputError."""
    try:
        yield
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} must contain only tensors and plain values; code is not executed. {expected}"
        ) from error
    except Exception as error:
        cause = printable(f"{type(error).__name__}: {error}", limit=300)
        raise InputError(f"{path} cannot be read ({cause}). {expected}") from error


def _check_finite(lens: LensMaps, holder: Path | str) -> LensMaps:
    for layer, linear in lens.maps.items():
        if linear is not None and not all(bool(part.isfinite().all()) for part in linear.parts.values()):
            raise InputError(f"{holder} must be finite, got NaN or infinity at layer {layer}.")
    return lens
