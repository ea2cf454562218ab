"""Value vectors of a model and their projections, from the cache if the model is in it.

The first time the model is loaded, and its value vectors, unembedding, the linear parts of its head and its
tokenizer are cached for as long as the model's files are unchanged. Then they are read without building the
model, equal bit by bit. A model in memory, which may have been changed, is never read from the cache.
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

from matlens.errors import InputError, checked
from matlens.ffn.projection import TOP, LinearHead, Projection, TopTokens, unembedding
from matlens.ffn.values import ValueParts, ValueVectors
from matlens.io.cache import Cache, default_cache, file_states
from matlens.io.files import read_json, write_files
from matlens.models.checkpoints import software
from matlens.models.families.gguf import gguf_key
from matlens.models.identity import ModelIdentity
from matlens.models.inputs import Stack
from matlens.models.loading import choose_device, load, model_name
from matlens.models.norms import NormGain
from matlens.models.places import GGUF, locate
from matlens.models.tokens import token_texts

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Reading = Literal["plain", "norm", "head"]
PARTS, TOP_TOKENS = "parts", "tops"  # kinds of cache entries
_LAYOUT = 6  # of the entries
_TENSORS, _RECORD, _TOKENIZER = "parts.safetensors", "parts.json", "tokenizer.json"
_TOP_FILE = "top.safetensors"
_SOFTWARE = ("matlens", "transformer-lens")


class _NotStorable(Exception):
    """The model has parts that cannot be rebuilt without it."""


@dataclass(frozen=True)
class _Place:
    """The entries of a model in a cache."""

    cache: Cache
    name: str
    commit: str | None
    key: dict[str, Any]  # facts that the weights and the tokenizer depend on


@checked
class Catalogue:
    """The value vectors of a model, their projections, and the top tokens of all of them.

    ``name`` is as in `matlens.load`; a loaded model is read itself, without the cache.
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
        """The model, loaded when it is first needed."""
        return self._load()

    @cached_property
    def values(self) -> ValueVectors:
        """The value vectors."""
        return ValueVectors(self.model if self._stored is None else self._stored.values)

    def projection(self, reading: Reading = "plain") -> Projection:
        """The projection ``plain``, ``norm`` (needs the model) or ``head``."""
        stored = None if self._stored is None else self._stored.projection(reading)
        make = {
            "plain": Projection.from_model, "norm": Projection.after_norm, "head": Projection.through_head,
        }  # fmt: skip
        return stored or make[reading](self.model)

    def top_tokens(self, reading: Reading = "plain", *, k: int = TOP, progress: bool = True) -> TopTokens:
        """Cached top tokens of every value vector, as `Projection.top_of_all`."""
        if self._place is None:
            return self.projection(reading).top_of_all(self.values, k, progress=progress)
        key = {
            **self._place.key, "reading": reading, "k": k, "device": str(self.values.device),
            "fingerprint": self.values.identity.fingerprint,
        }  # fmt: skip
        entry = self._place.cache.find(TOP_TOKENS, key)
        if entry is not None:
            with suppress(OSError):  # the cache was cleared meanwhile
                tensors = load_file(entry.folder / _TOP_FILE)
                return TopTokens(tensors["ids"].long(), tensors["scores"])
        top = self.projection(reading).top_of_all(self.values, k, progress=progress)

        def fill(folder: Path) -> None:
            tensors = {"ids": top.ids.to(torch.int32), "scores": top.scores}
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _TOP_FILE)

        about = {"what": f"top {k} tokens of all value vectors", "of": self._place.name}
        self._place.cache.store(TOP_TOKENS, key, fill, about=about)
        return top

    @cached_property
    def _stored(self) -> _StoredParts | None:
        """The cached parts; None the first time, and for models that cannot be stored."""
        place = self._place
        if place is None:
            return None
        entry = place.cache.find(PARTS, place.key)
        if entry is not None:
            with suppress(OSError):  # the cache was cleared meanwhile
                return _StoredParts(entry.folder, place, self._device)
        about = {"what": "value vectors and unembedding", "of": place.name}
        with suppress(_NotStorable, InputError):
            place.cache.store(PARTS, place.key, partial(_write_parts, self.model), about=about)
        return None


class _StoredParts:
    def __init__(self, folder: Path, place: _Place, device: torch.device) -> None:
        self._place, self._device = place, device
        self._record: Mapping[str, Any] = read_json(folder / _RECORD)
        self._tensors = load_file(folder / _TENSORS)  # mapped: read from the disk when they are used
        self._tokenizer = _read_tokenizer(folder, self._record["tokenizer"])

    @property
    def values(self) -> ValueParts:
        identity = ModelIdentity.from_json(self._record["identity"])
        layers = range(self._record["n_layers"])
        matrices = [self._tensors[f"matrix.{layer}"] for layer in layers]
        return ValueParts(
            replace(identity, name=self._place.name, revision=self._place.commit),
            self._device,
            matrices[0].shape,
            self._record["output_kind"],
            matrices,
            [self._tensors.get(f"bias.{layer}") for layer in layers],
            from_cache=True,
        )

    def projection(self, reading: Reading) -> Projection | None:
        """None for a reading that needs the model."""
        # A copy for each projection, which all of them could edit in place.
        rows, head = self._tensors["unembedding"].to(self._device, torch.float32, copy=True), None
        if reading == "head" and "gain" in self._tensors:
            dense = self._tensors.get("dense")
            gain = NormGain(self._tensors["gain"].to(self._device), self._record["centred"])
            head = LinearHead(None if dense is None else dense.to(self._device), gain)
        elif reading != "plain":
            return None
        return Projection(rows, self._tokenizer, head, self.values.identity)


def _write_parts(model: TransformerBridge, folder: Path) -> None:
    parts, dtype = ValueParts.from_model(model), model.cfg.dtype
    if any(parts.mixtures):
        raise _NotStorable
    values, layers = ValueVectors(parts), range(len(parts.matrices))
    exact = {"unembedding": unembedding(model)} | {
        f"matrix.{layer}": values.layer_view(layer) for layer in layers
    }
    exact |= {f"bias.{layer}": values.bias(layer) for layer in layers if parts.biases[layer] is not None}
    tensors = {}
    for name, tensor in exact.items():
        packed = tensor.to(dtype)  # the same, unless it is a product
        tensors[name] = packed if torch.equal(packed.float(), tensor) else tensor
    centred = None
    if hasattr(model, "ln_final"):
        head = Projection.through_head(model).norm
        assert isinstance(head, LinearHead)
        tensors["gain"], centred = head.gain.gain, head.gain.centred
        if head.dense is not None:
            tensors["dense"] = head.dense
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, folder / _TENSORS)
    record = {
        "identity": parts.identity.to_json(), "n_layers": len(layers), "output_kind": values.output_kind,
        "centred": centred, "tokenizer": _write_tokenizer(folder, model.tokenizer),
    }  # fmt: skip
    write_files({folder / _RECORD: record})


def _write_tokenizer(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Write a tokenizer that reads back as the same one; returns the special tokens of its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise _NotStorable
    content = json.loads(backend.to_str()) | {"truncation": None, "padding": None}  # left by the last text
    (folder / _TOKENIZER).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    special, vocabulary = tokenizer.special_tokens_map, tokenizer.get_vocab()
    record = {name: token for name, token in special.items() if token in vocabulary}
    if _as_read(_read_tokenizer(folder, record)) != _as_read(tokenizer):
        raise _NotStorable
    return record


def _as_read(tokenizer: Any) -> list[Any]:
    """Everything that decides how tokens are shown and words are looked up."""
    texts = token_texts(tokenizer, range(len(tokenizer)))
    words = tokenizer(texts, add_special_tokens=False)["input_ids"]
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = [backend.get(part) for part in ("model", "normalizer", "pre_tokenizer", "decoder")]
    return [*parts, tokenizer.get_vocab(), tokenizer.unk_token_id, texts, words]


def _read_tokenizer(folder: Path, special: Mapping[str, str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    # Of a `tokenizer_object` it makes a deep copy, which takes as long as reading the file.
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / _TOKENIZER), **special)


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
    if gguf is not None and not gguf.lower().endswith(GGUF):
        return None  # it is read faster than its parts would be
    if gguf is not None:
        key["gguf"] = gguf_key(Path(folder, gguf))
    else:
        place = _hub_folder(folder, commit) if commit is not None else Path(folder)
        if place is None:
            return None
        try:
            paths = sorted(path for path in place.iterdir() if path.is_file())
            key["files"] = file_states(paths)
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
