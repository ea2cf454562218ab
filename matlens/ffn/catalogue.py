"""Value vectors of a model and their projections, from the cache if the model is known there.

The first time a model is asked for, it is loaded, and its value matrices, unembedding, norms and tokenizer
are stored in the cache, under the hashes of the model's files. From then on they are read from there without
building the model, equal bit by bit. A model in memory, which may have been changed, is never answered from
the cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from matlens.errors import InputError, checked
from matlens.ffn.norms import PlainNorm, linear_head
from matlens.ffn.projection import TOP, Projection, TopTokens, top_tokens_of_all, unembedding
from matlens.ffn.values import ValueParts, ValueVectors
from matlens.io.contents import hash_contents
from matlens.io.entries import Cache, default_cache
from matlens.io.files import read_json, write_json
from matlens.models.checkpoints import gguf_key, software
from matlens.models.families.encoder_decoders import Stack
from matlens.models.identity import ModelIdentity
from matlens.models.loading import choose_device, load, model_name
from matlens.models.places import CHECKPOINT, locate
from matlens.models.tokens import token_texts

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Reading = Literal["plain", "norm", "head"]
PARTS, TOP_TOKENS = "parts", "tops"
"""Kinds of cache entries: what value vectors and projections consist of, and top tokens of value vectors."""
_LAYOUT = 3  # of the entries
_TENSORS, _RECORD, _TOKENIZER = "parts.safetensors", "parts.json", "tokenizer.json"
_TOP_FILE = "top.safetensors"
_SOFTWARE = ("matlens", "transformer-lens")


class _NotStorable(Exception):
    """A part of a model that cannot be rebuilt without the model, such as a mixture of experts."""


@dataclass(frozen=True)
class _Place:
    """The entries of a model in a cache."""

    cache: Cache
    name: str
    commit: str | None
    key: dict[str, Any]  # what its weights and its tokenizer depend on


@checked
class Catalogue:
    """The value vectors of a model, their projections, and the top tokens of all of them.

    Parameters
    ----------
    name
        The model, as `matlens.load` takes it; a loaded model is read itself, without the cache.
    device, dtype, revision, trust_remote_code, stack
        As in `matlens.load`.
    """

    def __init__(
        self,
        name: str | os.PathLike[str] | TransformerBridge,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        revision: str | None = None,
        trust_remote_code: bool = False,
        stack: Stack | None = None,
    ) -> None:
        self._load: Callable[[], Any] = lambda: name
        self._place: _Place | None = None
        if isinstance(name, torch.nn.Module):
            return
        self._device = choose_device(device)
        self._place = None if trust_remote_code else _place_of(name, revision, dtype, stack)
        self._load = lambda: load(
            name, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code,
            stack=stack,
        )  # fmt: skip

    @cached_property
    def model(self) -> TransformerBridge:
        """The model itself, which is loaded when it is first asked for."""
        return self._load()

    @cached_property
    def values(self) -> ValueVectors:
        """The value vectors."""
        return ValueVectors(self.model if self._stored is None else self._stored.values)

    def projection(self, reading: Reading = "plain") -> Projection:
        """The projection to the vocabulary: by ``E``, after the final norm, or through the head."""
        stored = None if self._stored is None else self._stored.projection(reading)
        make = {
            "plain": Projection.from_model, "norm": Projection.after_norm, "head": Projection.through_head,
        }  # fmt: skip
        return stored or make[reading](self.model)

    def top_tokens(
        self,
        values: ValueVectors,
        projection: Projection,
        *,
        reading: Reading = "plain",
        k: int = TOP,
        progress: bool = True,
    ) -> TopTokens:
        """Top tokens of every value vector, as `top_tokens_of_all` gives them, stored in the cache.

        Parameters
        ----------
        values, projection
            Those of this catalogue.
        reading, k
            The projection's name, and how many tokens of each vector.
        progress
            Whether to show a progress bar if they are computed.
        """
        if self._place is None:
            return top_tokens_of_all(values, projection, k=k, progress=progress)
        projection.check_same(values.identity)
        key = {
            **self._place.key, "reading": reading, "k": k, "device": str(values.device),
            "fingerprint": values.identity.fingerprint,
        }  # fmt: skip
        entry = self._place.cache.find(TOP_TOKENS, key)
        if entry is not None:
            with suppress(OSError):  # cleared meanwhile
                tensors = load_file(entry.folder / _TOP_FILE)
                return TopTokens(tensors["ids"].long(), tensors["scores"])
        top = top_tokens_of_all(values, projection, k=k, progress=progress)

        def fill(folder: Path) -> None:
            tensors = {"ids": top.ids.to(torch.int32), "scores": top.scores}
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _TOP_FILE)

        about = {"what": f"top {k} tokens of all value vectors", "of": self._place.name}
        self._place.cache.keep(TOP_TOKENS, key, fill, about=about)
        return top

    @cached_property
    def _stored(self) -> _StoredParts | None:
        """The parts in the cache; None the first time, and for models that cannot be stored."""
        place = self._place
        if place is None:
            return None
        entry = place.cache.find(PARTS, place.key)
        if entry is not None:
            with suppress(OSError):  # cleared meanwhile
                return _StoredParts(entry.folder, place, self._device)
        about = {"what": "value vectors and unembedding", "of": place.name}
        with suppress(_NotStorable, InputError):
            place.cache.keep(PARTS, place.key, partial(_write_parts, self.model), about=about)
        return None


class _StoredParts:
    def __init__(self, folder: Path, place: _Place, device: torch.device) -> None:
        self._folder, self._place, self._device = folder, place, device
        self._record: Mapping[str, Any] = read_json(folder / _RECORD)
        self._tensors = load_file(folder / _TENSORS)  # mapped: read from the disk when they are used
        self._tokenizer = _read_tokenizer(folder, self._record["tokenizer"])

    @property
    def values(self) -> ValueParts:
        identity = ModelIdentity.from_json(self._record["identity"])
        layers, take = range(self._record["n_layers"]), self._tensors.get
        matrices = [self._tensors[f"matrix.{layer}"] for layer in layers]
        return ValueParts(
            replace(identity, name=self._place.name, revision=self._place.commit),
            self._device,
            matrices[0].shape,
            matrices,
            [take(f"bias.{layer}") for layer in layers],
            [self._norm(f"norm.{layer}") for layer in layers if f"norm.{layer}" in self._record["norms"]],
            multiplier=self._record["multiplier"],
        )

    def projection(self, reading: Reading) -> Projection | None:
        """None if there is no final norm where one is needed."""
        rows = self._tensors["unembedding"].to(self._device).float()
        norm: nn.Module | None = None
        if reading != "plain":
            if "final" not in self._record["norms"]:
                return None
            norm = self._norm("final").to(self._device)
            if reading == "head":
                dense = self._tensors.get("dense")
                norm = linear_head(None if dense is None else dense.to(self._device), norm, rows.shape[1])
        identity = replace(self.values.identity, unembed_hash=None)
        return Projection(rows, self._tokenizer, norm, identity)

    def _norm(self, name: str) -> PlainNorm:
        gain, bias = self._tensors[f"{name}.gain"], self._tensors.get(f"{name}.bias")
        return PlainNorm(gain, bias, **self._record["norms"][name])


def _write_parts(model: TransformerBridge, folder: Path) -> None:
    parts, dtype = ValueParts.from_model(model), model.cfg.dtype
    if any(parts.mixtures):
        raise _NotStorable("a mixture of experts")
    rows = unembedding(model)
    packed = rows.to(dtype)  # exact, unless it is a product of two matrices
    tensors = {"unembedding": packed if torch.equal(packed.float(), rows) else rows}
    for layer, (matrix, bias) in enumerate(zip(parts.matrices, parts.biases, strict=True)):
        assert matrix is not None
        tensors[f"matrix.{layer}"] = matrix
        if bias is not None:
            tensors[f"bias.{layer}"] = bias
    if hasattr(model, "mlm_head"):
        tensors["dense"] = model.mlm_head.original_component.weight
    norms = {f"norm.{layer}": norm for layer, norm in enumerate(parts.norms)}
    if hasattr(model, "ln_final"):
        norms["final"] = model.ln_final.original_component
    settings = {}
    for name, norm in norms.items():
        plain = PlainNorm.equal_to(norm)
        if plain is None:
            raise _NotStorable(repr(norm))
        tensors |= {f"{name}.{key}": tensor for key, tensor in plain.named_parameters()}
        settings[name] = {"eps": plain.eps, "centred": plain.centred}
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, folder / _TENSORS)
    record = {
        "identity": parts.identity.to_json(), "n_layers": len(parts.matrices), "norms": settings,
        "multiplier": parts.multiplier, "tokenizer": _write_tokenizer(folder, model.tokenizer),
    }  # fmt: skip
    write_json(folder / _RECORD, record)


def _write_tokenizer(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Write a tokenizer that reads back as the same one; returns its special tokens.

    Special tokens that the vocabulary lacks are excluded: tokenizers add them when they are built, and a
    bridge names one without adding it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise _NotStorable("the tokenizer")
    content = json.loads(backend.to_str()) | {"truncation": None, "padding": None}  # left by the last text
    (folder / _TOKENIZER).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    special, vocabulary = tokenizer.special_tokens_map, tokenizer.get_vocab()
    record = {name: token for name, token in special.items() if token in vocabulary}
    if _as_read(_read_tokenizer(folder, record)) != _as_read(tokenizer):
        raise _NotStorable("the tokenizer")
    return record


def _as_read(tokenizer: Any) -> list[Any]:
    """All that tokens are shown and words looked up by."""
    texts = token_texts(tokenizer, range(len(tokenizer)))
    words = tokenizer(texts, add_special_tokens=False)["input_ids"]
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = [backend.get(part) for part in ("model", "normalizer", "pre_tokenizer", "decoder")]
    return [*parts, tokenizer.get_vocab(), tokenizer.unk_token_id, texts, words]


def _read_tokenizer(folder: Path, special: Mapping[str, str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    text = (folder / _TOKENIZER).read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), **special)


def _place_of(
    name: str | os.PathLike[str], revision: str | None, dtype: torch.dtype, stack: Stack | None
) -> _Place | None:
    """The place of a model in the cache; None without a cache, or if the model's files are not here."""
    cache = default_cache()
    folder, gguf, commit = locate(name, revision)
    if cache is None:
        return None
    key: dict[str, Any] = {"layout": _LAYOUT, "dtype": str(dtype), "stack": stack, "software": software()}
    key["software"] |= {package: version(package) for package in _SOFTWARE}
    if gguf is not None and gguf.lower().endswith(CHECKPOINT):
        return None  # it is read in less time than its parts would be
    if gguf is not None:
        key["gguf"] = gguf_key(cache, Path(folder, gguf))
    else:
        place = _hub_folder(folder, commit) if commit is not None else Path(folder)
        if place is None:
            return None
        try:
            paths = sorted(path for path in place.iterdir() if path.is_file())
            key["files"] = hash_contents(cache, paths)
        except (OSError, InputError):
            return None
    return _Place(cache, model_name(name, commit), commit, key)


def _hub_folder(name: str, commit: str) -> Path | None:
    """The folder of a model of the hub on this machine, if it was downloaded."""
    if Path(name).is_dir():  # in the hub's cache
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=commit, local_files_only=True))
    except (OSError, ValueError):
        return None
