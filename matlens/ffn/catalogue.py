"""Value vectors of a model and how they are read in its vocabulary, without the model where that is known.

The first time that a model is asked for it is built, and what was found in its files is kept in the cache:
where its value matrices lie, its tokenizer, who it is. From then on they are read from the files, each
tensor checked by its hash. What is read is what the model itself would have given, bit by bit. A model in
memory, which may have been changed, is never answered from the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from matlens.errors import InputError, checked
from matlens.ffn.known import Known, Reading, describe_or_say_why
from matlens.ffn.projection import TOP, Projection, TopTokens, top_tokens_of_all
from matlens.ffn.values import ValueVectors
from matlens.ffn.weights import NotInFiles, WeightFiles
from matlens.io.contents import hash_contents
from matlens.io.entries import Cache, default_cache
from matlens.models.families.encoder_decoders import Stack
from matlens.models.gguf import MODEL, model_key, software
from matlens.models.identity import ModelIdentity
from matlens.models.loading import choose_device, load, model_name
from matlens.models.places import CHECKPOINT, locate

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Result = TypeVar("Result")
PARTS, TOP_TOKENS = "parts", "tops"
"""Kinds of the cache's entries: where the parts of a model lie, and the top tokens of its value vectors."""
_TOP_FILE = "top.safetensors"
_LAYOUT = 2  # of what is kept; what was kept in another is not found
_SOFTWARE = ("matlens", "transformer-lens")


@dataclass(frozen=True)
class _Place:
    """Where the files of a model lie, and the keys under which what is known of it is kept."""

    cache: Cache
    name: str
    commit: str | None
    key: dict[str, Any]  # what its weights and its tokenizer depend on
    folder: Path | None  # of its weights
    gguf: dict[str, Any] | None  # or the key of the dequantized model

    def weights(self) -> WeightFiles | None:
        """The files; None while there is no dequantized model."""
        folder = self.folder
        if self.gguf is not None:
            entry = self.cache.find(MODEL, self.gguf, whole=False)  # each tensor is checked when it is read
            folder = None if entry is None else entry.folder
        return None if folder is None else WeightFiles(folder)


@checked
class Catalogue:
    """The value vectors of a model, how they are read, and the top tokens of all of them.

    Parameters
    ----------
    name
        The model, as `matlens.load` takes it; one that is loaded already is read itself, without the cache.
    device, dtype, revision, trust_remote_code, stack
        As in `matlens.load`.

    Raises
    ------
    InputError
        There is no such model.
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
        self._dtype, self._device = dtype, choose_device(device)
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
        values = self._read(lambda known: known.values(self._identity(known), partial(self._matrix, known)))
        return ValueVectors(self.model) if values is None else values

    def projection(self, reading: Reading = "plain") -> Projection:
        """How vectors are read in the vocabulary: by ``E``, after the final norm, or through the head."""

        def read(known: Known) -> Projection | None:
            return known.projection(replace(self._identity(known), unembed_hash=None), reading)

        make = {
            "plain": Projection.from_model, "norm": Projection.after_norm, "head": Projection.through_head,
        }  # fmt: skip
        return self._read(read) or make[reading](self.model)

    def _read(self, read: Callable[[Known], Result | None]) -> Result | None:
        """What is read from the files; None if it must be read from the model itself."""
        known = self._known
        if known is None:
            return None
        try:
            return read(known)
        except NotInFiles as damage:
            self._forget(known, damage)
            return None

    def top_tokens(
        self,
        values: ValueVectors,
        projection: Projection,
        *,
        reading: Reading = "plain",
        k: int = TOP,
        progress: bool = True,
    ) -> TopTokens:
        """Top tokens of every value vector, as `top_tokens_of_all` gives them; kept in the cache.

        Parameters
        ----------
        values, projection
            Those of this catalogue.
        reading, k
            How vectors are read, and how many tokens are listed of each.
        progress
            Whether to show a bar where they have to be worked out.
        """
        from safetensors.torch import load_file, save_file

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
    def _known(self) -> Known | None:
        """What is kept of the model; ``None`` the first time, when the model is built for it.

        Also ``None`` where its parts are not in its files, such as the experts of a mixture.
        """
        place = self._place
        if place is None:
            return None
        files, entry = place.weights(), place.cache.find(PARTS, place.key)
        if files is not None and entry is not None:
            try:
                known = Known(entry.folder, files, self._dtype, self._device)
                return known if known.reason is None else None
            except (InputError, OSError) as error:
                place.cache.discard(entry.folder, f"{error}")
        model = self.model  # which stores a dequantized model first
        files = place.weights()
        if files is not None:
            about = {"what": "where value vectors lie", "of": place.name}
            fill = partial(describe_or_say_why, files=files, model=model)
            place.cache.keep(PARTS, place.key, fill, about=about)
        return None

    def _identity(self, known: Known) -> ModelIdentity:
        """Which model it is, by the name by which it was asked for."""
        assert self._place is not None
        return replace(known.identity, name=self._place.name, revision=self._place.commit)

    def _matrix(self, known: Known, layer: int) -> Tensor:
        """A layer's output matrix; that of the model itself if a file was damaged."""
        try:
            return known.matrix(layer)
        except NotInFiles as damage:
            self._forget(known, damage)
            values = ValueVectors(self.model)
            if values.identity.fingerprint != known.identity.fingerprint:
                raise InputError(
                    f"The files of the model {values.identity.name} changed while they were read. Begin anew."
                ) from damage
            return values.matrix(layer)

    def _forget(self, known: Known, damage: Exception) -> None:
        """Build the model instead: its files are not what was written down."""
        assert self._place is not None
        if self._place.gguf is None:
            self._place.cache.discard(known.folder, f"{damage}")
        self.__dict__["_known"] = None


def _place_of(
    name: str | os.PathLike[str], revision: str | None, dtype: torch.dtype, stack: Stack | None
) -> _Place | None:
    """Where the files of a model are on this machine; ``None`` where nothing can be kept of them."""
    cache = default_cache()
    folder, gguf, commit = locate(name, revision)
    if cache is None:
        return None
    called = model_name(name, commit)
    from importlib.metadata import version

    key: dict[str, Any] = {"layout": _LAYOUT, "dtype": str(dtype), "software": software()}
    key |= {} if stack is None else {"stack": stack}
    key["software"] |= {package: version(package) for package in _SOFTWARE}
    if gguf is not None and gguf.lower().endswith(CHECKPOINT):
        return None  # it is read in less time than its parts would be
    if gguf is not None:
        of_model = model_key(cache, Path(folder, gguf))
        return _Place(cache, called, commit, {**key, "gguf": of_model}, None, of_model)
    place = _hub_folder(folder, commit) if commit is not None else Path(folder)
    if place is None:
        return None
    try:
        paths = sorted(path for path in place.iterdir() if path.is_file())
        return _Place(cache, called, commit, {**key, "files": hash_contents(cache, paths)}, place, None)
    except (OSError, InputError):
        return None


def _hub_folder(name: str, commit: str) -> Path | None:
    """Where a model of the hub lies on this machine, ``None`` where it does not."""
    if Path(name).is_dir():  # in the hub's cache
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=commit, local_files_only=True))
    except (OSError, ValueError):
        return None
