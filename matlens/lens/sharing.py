"""Lenses on the hub: one repository for many models, a folder for each lens, and a list of them.

The folders are named by model, method and corpus, as in ``neuronpedia/jacobian-lens``, whose files are read
too. ``lenses.json`` lists the lenses; ``README.md`` shows the list, and one in each folder says how its lens
was made. A lens is pushed in one commit, onto the one that was read: of two that push at the same time, one
reads again.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pandas as pd

from matlens.errors import InputError, short
from matlens.io.artifact import CONFIG
from matlens.io.bounds import parse_json
from matlens.io.repository import HubConflict, HubRepository, HubSnapshot
from matlens.lens.cards import bare, bare_name, lens_card, lens_entry, quality_of, repository_card
from matlens.lens.files import read_jacobian_lens, read_lens, write_lens
from matlens.lens.maps import LensParts

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

INDEX, CARD = "lenses.json", "README.md"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_ATTEMPTS = 4
_ENTRY: Mapping[str, type] = {
    "folder": str, "model": str, "method": str, "corpus": str, "sinks": str, "layers": list, "mean": dict
}  # fmt: skip


def folder_of(lens: LensParts) -> str:
    """Where a lens lies in a repository unless it is named: ``model/method/corpus``."""
    parts = (bare_name(lens.provenance.identity), lens.method, bare(lens.provenance.corpus))
    return "/".join(
        re.sub(r"[^A-Za-z0-9._-]+", "-", part.split("/")[-1]).strip("-.") or "-" for part in parts
    )


def push_lens(
    lens: LensParts,
    repository: HubRepository,
    *,
    name: str | None = None,
    quality: pd.DataFrame | None = None,
    private: bool = False,
) -> str:
    """Put a lens into a repository; see `Lens.push_to_hub`."""
    folder = folder_of(lens) if name is None else _check_folder(name)
    measures = None if quality is None else quality_of(lens.method, quality)
    with tempfile.TemporaryDirectory(prefix="matlens-lens-") as place:
        written = Path(place) / "lens"
        write_lens(written, lens)
        of_lens: dict[str, bytes | Path] = {
            f"{folder}/{path.name}": path
            for path in sorted(written.iterdir())
            if path.name == CONFIG or path.suffix == ".safetensors"
        }
        of_lens[f"{folder}/{CARD}"] = lens_card(lens, measures).encode()
        for _ in range(_ATTEMPTS):
            onto = repository.snapshot(absent=True)
            entries = [entry for entry in _entries(repository, onto) if entry["folder"] != folder]
            entries.append(lens_entry(folder, lens, measures))
            entries.sort(key=lambda entry: entry["folder"])
            files: dict[str, bytes | Path] = {
                **of_lens,
                INDEX: (json.dumps(entries, indent=1) + "\n").encode(),
                CARD: repository_card(repository.name, entries).encode(),
            }
            try:
                return repository.commit(
                    files, message=f"Add {folder} with matlens", onto=onto, private=private
                )
            except HubConflict:
                continue
    raise InputError(
        f"Others write to {repository.name} all the time: {_ATTEMPTS} attempts came too late. Try again "
        "later."
    )


def pull_lens(
    repository: HubRepository,
    name: str | None = None,
    *,
    revision: str | None = None,
    model: TransformerBridge | None = None,
) -> LensParts:
    """Read a lens out of a repository; see `Lens.from_pretrained`."""
    snapshot = repository.snapshot(revision)
    assert snapshot.commit is not None
    known = sorted(
        str(PurePosixPath(path).parent)
        for path in snapshot.files
        if PurePosixPath(path).name == CONFIG and len(PurePosixPath(path).parts) > 1
    )
    files = [path for path in snapshot.files if path.endswith(".pt")]
    if name is None and len(known) == 1:
        name = known[0]
    if name in files and model is None:
        raise InputError(
            f"{name} is a file of TransformerLens' JacobianLens, which does not say which model it is of. "
            "Give the model."
        )
    if name in files and name is not None and model is not None:
        lens = read_jacobian_lens(repository.download(name, snapshot.commit), model)
    elif name in known and name is not None:
        inside = [path for path in snapshot.files if str(PurePosixPath(path).parent) == name]
        wanted = [path for path in inside if path.endswith((f"/{CONFIG}", ".safetensors"))]
        places = {repository.download(path, snapshot.commit).parent for path in wanted}
        lens = read_lens(places.pop())
    else:
        raise InputError(
            f"{repository.name} has no lens {short(name)}. Expected one of {short([*known, *files])}."
        )
    of_hub = {"repository": repository.name, "commit": snapshot.commit, "name": name}
    return lens._replace(provenance=lens.provenance.with_details(hub=of_hub))


def _entries(repository: HubRepository, snapshot: HubSnapshot) -> list[dict[str, Any]]:
    """The list of lenses that a repository has by now."""
    if snapshot.commit is None or INDEX not in snapshot.files:
        return []
    path = repository.download(INDEX, snapshot.commit)
    entries = parse_json(path.read_text(encoding="utf-8", errors="replace"), f"{INDEX} of {repository.name}")
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise InputError(
            f"{INDEX} of {repository.name} is no list of lenses as matlens writes it. Push to another "
            "repository, or mend the file."
        )
    return entries


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(key), kind) for key, kind in _ENTRY.items())
        and all(type(layer) is int for layer in entry["layers"])
        and all(isinstance(number, int | float) for number in entry["mean"].values())
        and isinstance(entry.get("tokens"), int | None)
    )


def _check_folder(name: str) -> str:
    parts = name.split("/")
    if not 1 <= len(parts) <= 5 or not all(_PART.fullmatch(part) for part in parts):
        raise InputError(
            f"{short(name)} cannot name a folder of a repository. Expected letters, digits, dots and dashes "
            "with slashes between, such as 'smollm2-135m/mat/wikipedia'."
        )
    return name
