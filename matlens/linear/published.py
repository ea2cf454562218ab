"""The maps that the authors of paper A published, read without running their pickles.

``sashay/linear-shortcut`` has a folder for each model and corpus, such as ``gpt2-medium/wikipedia``, in which
``6_9.pickle`` is the map from layer 6 to layer 9, and the authors' code (``sashayd/mat``) writes
``p6_1_2.pickle`` for a sub-module of block 6. Each is a pickled tensor, or a list of it and an intercept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from matlens.errors import InputError, checked
from matlens.io.files import open_regular, system_errors
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet, write_maps
from matlens.linear.pickles import arrays_of, read_pickle
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.layout import ModelLayout
from matlens.models.sites import STREAM, Site

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_FILE = re.compile(r"(?:p(?P<block>[0-9]{1,4})_)?(?P<first>[0-9]{1,4})_(?P<last>[0-9]{1,4})\.(?:pickle|pkl)")
_SUBMODULES = {(0, 1): "ln1", (1, 2): "attn", (3, 4): "ln2", (4, 5): "ffn"}
_SUMS = {(2, 3), (5, 6)}  # what is added to the stream, from itself; these are no sub-modules
_WIDEST = 16  # bytes of a number; protocols before 3 write each byte as a character, of up to two bytes
_BESIDE = 2**20  # bytes of a pickle besides its values


@checked
def convert_published(source: str | Path, model: TransformerBridge, folder: str | Path) -> MapSet:
    """Turn the maps that the authors published for a model into a folder of maps.

    Maps between layers, ``6_9.pickle``, and of the norms, attention and FFNs of blocks, ``p6_1_2.pickle``;
    what the authors' code writes for the sums in between is left out. The files do not say which model they
    are of: its number of layers and its width are compared, and that its weights are the right ones is yours
    to know.

    Parameters
    ----------
    source
        The folder with the files, such as ``gpt2-medium/wikipedia`` of a copy of ``sashay/linear-shortcut``.
    model
        The model that they were fitted on, such as ``matlens.load("gpt2-medium")``.
    folder
        Where the maps are written, as `MapSet.save` does.

    Raises
    ------
    InputError
        There are no such files; a file is no pickle of a map, asks for anything but arrays, or is of another
        model.
    """
    source, layout = Path(source), ModelLayout.from_model(model)
    files = _files(source, layout)
    digest = hashlib.sha256()
    with system_errors(source):
        for path in files.values():
            digest.update(_content(path, layout.d_model))
    provenance = Provenance(
        ModelIdentity.from_model(model), {"corpus": source.name},
        details={"published": "sashay/linear-shortcut", "files": len(files)},
    )  # fmt: skip

    def read(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
        return _maps(missing, files, layout.d_model, provenance)

    return write_maps(folder, list(files), read, provenance, content=digest.hexdigest()[:16])


def _files(source: Path, layout: ModelLayout) -> dict[tuple[str, str], Path]:
    """The files of a folder, by the sites that each maps between."""
    if not source.is_dir():
        raise InputError(f"There is no folder {source}. Expected one with files such as 6_9.pickle.")
    with system_errors(source):
        names = sorted(path for path in source.iterdir() if _FILE.fullmatch(path.name))
    files: dict[tuple[str, str], Path] = {}
    for path in names:
        pair = _sites(path, layout)
        if pair is None:
            continue
        if pair in files:
            raise InputError(
                f"{files[pair]} and {path} are both the map of {' to '.join(pair)}. Expected one."
            )
        files[pair] = path
    if not files:
        raise InputError(f"{source} holds no published maps. Expected files such as 6_9.pickle.")
    return files


def _sites(path: Path, layout: ModelLayout) -> tuple[str, str] | None:
    match = _FILE.fullmatch(path.name)
    assert match is not None
    ends = int(match["first"]), int(match["last"])
    if match["block"] is None:
        if not 0 <= ends[0] < ends[1] <= layout.n_layers:
            raise InputError(
                f"{path} is a map from layer {ends[0]} to layer {ends[1]}, and the model has the layers 0 to "
                f"{layout.n_layers}. Is it of another model?"
            )
        return str(Site(STREAM, ends[0])), str(Site(STREAM, ends[1]))
    if ends in _SUMS:
        return None
    name, block = _SUBMODULES.get(ends), int(match["block"])
    if name is None or f"{name}_in" not in layout.kinds or block >= layout.n_layers:
        raise InputError(f"{path} is of no sub-module of this model. Is it of another model?")
    return f"{name}_in.{block}", f"{name}_out.{block}"


def _content(path: Path, d_model: int) -> bytes:
    most = _WIDEST * (d_model + 1) * d_model + _BESIDE
    with open_regular(path) as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise InputError(
            f"{path} is larger than a map of {d_model} coordinates can be. Is it of another model?"
        )
    return content


def _maps(
    pairs: list[tuple[str, str]], files: dict[tuple[str, str], Path], d_model: int, provenance: Provenance
) -> Iterator[LinearMap]:
    for pair in pairs:
        path = files[pair]
        with system_errors(path):
            arrays = arrays_of(read_pickle(_content(path, d_model), str(path)), str(path))
        shapes = [array.shape for array in arrays]
        if shapes not in ([(d_model, d_model)], [(d_model, d_model), (d_model,)]):
            raise InputError(
                f"{path} holds arrays of the shapes {', '.join(map(str, shapes))}, and the model has "
                f"{d_model} coordinates. Expected a square matrix of these, and an intercept at most."
            )
        weight, *bias = (torch.from_numpy(array.astype("=f8")) for array in arrays)
        yield LinearMap.from_solution(weight, bias[0] if bias else None, *pair, provenance)
