"""Value vectors of a model and how they are read in its vocabulary, without the model where that is known.

The first time that a model is asked for it is built, and what was found in its files is kept in the cache:
where its value matrices lie, its tokenizer, who it is. From then on they are read from the files, each
tensor checked by its hash. What is read is what the model itself would have given, bit by bit. A model in
memory, which may have been changed, is never answered from the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from matlens.errors import InputError, check_choice, check_int, checked
from matlens.ffn.known import Known, describe_or_say_why
from matlens.ffn.norms import linear_head
from matlens.ffn.projection import TOP, Projection, TopTokens, top_tokens_of_all
from matlens.ffn.values import ValueParts, ValueVectors
from matlens.ffn.weights import DamagedWeights, NotInFiles, WeightFiles
from matlens.io.contents import hash_contents
from matlens.io.entries import Cache, default_cache
from matlens.models.dequantized import MODEL, model_key, software
from matlens.models.identity import ModelIdentity
from matlens.models.loading import choose_device, load, model_name
from matlens.models.places import CHECKPOINT, locate
from matlens.models.stacks import Stack

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Reading = Literal["plain", "norm", "head"]
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

    def weights(self) -> WeightFiles:
        """The files.

        Raises
        ------
        NotInFiles
            They are not kept.
        """
        folder = self.folder
        if self.gguf is not None:
            entry = self.cache.find(MODEL, self.gguf, whole=False)  # each tensor is checked when it is read
            folder = None if entry is None else entry.folder
        if folder is None:
            raise NotInFiles("the model")
        return WeightFiles(folder)


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
        """The value vectors.

        Raises
        ------
        InputError
            The model has none that are known.
        """
        known = self._known
        if known is not None:
            try:
                parts = ValueParts(
                    self._identity(known), known.device, known.shape,
                    _Matrices(known, self._matrices_of_model), known.biases(), known.norms(),
                )  # fmt: skip
                return ValueVectors(parts)
            except (DamagedWeights, NotInFiles) as damage:
                self._forget(damage)
        return ValueVectors(self.model)

    def projection(self, reading: Reading = "plain") -> Projection:
        """How vectors are read in the vocabulary: by ``E``, behind the final norm, or through the head.

        Raises
        ------
        InputError
            The model has no unembedding, or no final norm where one is asked for.
        """
        made = {
            "plain": Projection.from_model, "norm": Projection.after_norm, "head": Projection.through_head,
        }  # fmt: skip
        check_choice(reading, list(made), "reading")
        known = self._known
        if known is not None:
            try:
                norm = None if reading == "plain" else known.final_norm()
                if norm is not None or reading == "plain":
                    if norm is not None and reading == "head":
                        norm = linear_head(known.dense(), norm, known.shape[1])
                    identity = replace(self._identity(known), unembed_hash=None)
                    return Projection(known.unembedding(), known.tokenizer, norm, identity)
            except (DamagedWeights, NotInFiles) as damage:
                self._forget(damage)
        return made[reading](self.model)

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

        Raises
        ------
        InputError
            ``k`` is less than 1, or more than the vocabulary has; or both are not of one model.
        """
        from safetensors.torch import load_file, save_file

        k = check_int(k, "The number of tokens", min=1, max=len(projection.unembedding))
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
        entry = place.cache.find(PARTS, place.key)
        if entry is not None:
            try:
                known = Known(entry.folder, place.weights(), self._dtype, self._device)
                if known.reason is not None:
                    return None
                known.check_there()
                return known
            except NotInFiles:  # the dequantized model is gone, and is made anew
                pass
            except (DamagedWeights, InputError, OSError, KeyError, TypeError, ValueError) as error:
                place.cache.discard(entry.folder, f"{error}")
        model = self.model  # which keeps a dequantized model first
        with suppress(NotInFiles, InputError):  # the files are not kept: it is tried again the next time
            files = place.weights()
            about = {"what": "where value vectors lie", "of": place.name}
            fill = partial(describe_or_say_why, files=files, model=model)
            place.cache.keep(PARTS, place.key, fill, about=about)
        return None

    def _identity(self, known: Known) -> ModelIdentity:
        """Who the model is, by the name by which it was asked for."""
        assert self._place is not None
        return replace(known.identity, name=self._place.name, revision=self._place.commit)

    def _matrices_of_model(self, damage: Exception) -> ValueVectors:
        known = self._known
        self._forget(damage)
        values = ValueVectors(self.model)
        if known is not None and values.identity.fingerprint != known.identity.fingerprint:
            raise InputError(
                f"The files of the model {values.identity.name} changed while they were read. Begin anew."
            )
        return values

    def _forget(self, damage: Exception) -> None:
        """Build the model instead: its files are not what was written down."""
        assert self._place is not None
        if self._place.gguf is None:
            known = self._known
            if known is not None:
                self._place.cache.discard(known.folder, f"{damage}")
        self.__dict__["_known"] = None


class _Matrices(Sequence[Tensor]):
    """The output matrices of all layers, each read when it is first asked for.

    Parameters
    ----------
    known
        What they are read by.
    otherwise
        Gives the value vectors of the model itself, where a file is damaged.
    """

    def __init__(self, known: Known, otherwise: Callable[[Exception], ValueVectors]) -> None:
        self._known, self._otherwise = known, otherwise
        self._read: dict[int, Tensor] = {}
        self._of_model: ValueVectors | None = None

    def __len__(self) -> int:
        return self._known.n_layers

    def __getitem__(self, layer: Any) -> Any:
        if layer not in self._read:
            try:
                if self._of_model is None:
                    self._read[layer] = self._known.matrix(layer)
            except DamagedWeights as damage:
                self._of_model = self._otherwise(damage)
            if self._of_model is not None:
                self._read[layer] = self._of_model.matrix(layer)
        return self._read[layer]


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
