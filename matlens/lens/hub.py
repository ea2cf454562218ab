"""Lenses on the hub: one repository for many models, with a folder for each lens.

The folders are named by model, method and corpus, as in ``neuronpedia/jacobian-lens``, whose files are read
too. ``README.md`` lists the folders, and each folder has a card written from the lens' provenance. A lens is
pushed in one commit on top of the one that was read, so of two simultaneous pushes one is refused.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pandas as pd

from matlens.errors import InputError, printable, short
from matlens.io.artifact import CONFIG
from matlens.io.cards import render_card
from matlens.io.repository import PATIENCE, HubRepository
from matlens.io.tables import COLUMNS, check_columns, check_one
from matlens.lens.files import read_jacobian_lens, read_lens, write_lens
from matlens.lens.maps import LensMaps

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

CARD = "README.md"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_FOLDER = re.compile(rf"{_PART}(/{_PART}){{0,4}}")
_MARKUP = re.compile(r"([\\`*_\[\]<>|~#])")


def push_lens(
    lens: LensMaps,
    repository: HubRepository,
    *,
    name: str | None = None,
    quality: pd.DataFrame | None = None,
    private: bool = False,
) -> str:
    """Put a lens into a repository; see `Lens.push_to_hub`."""
    folder = folder_of(lens) if name is None else name
    if not _FOLDER.fullmatch(folder):
        raise InputError(
            "name must be a folder of letters, digits, dots and dashes, such as "
            f"'smollm2-135m/mat/wikipedia', got {short(folder)}."
        )
    from huggingface_hub import CommitOperationAdd

    card = lens_card(lens, quality)
    with tempfile.TemporaryDirectory(prefix="matlens-lens-") as place:
        written = Path(place) / "lens"
        write_lens(written, lens)
        files: dict[str, bytes | str] = {
            f"{folder}/{path.name}": str(path)
            for path in sorted(written.iterdir())
            if path.name == CONFIG or path.suffix == ".safetensors"
        }
        files[f"{folder}/{CARD}"] = card.encode()
        with repository.client("written to") as hub:
            hub.create_repo(repository.name, private=private, exist_ok=True)
        commit, names = _list_files(repository)
        listed = filter(_FOLDER.fullmatch, {*_folders(names), folder})
        files[CARD] = repository_card(repository.name, sorted(listed)).encode()
        additions = [CommitOperationAdd(path, content) for path, content in files.items()]
        with repository.client("written to") as hub:  # refused if there is another commit meanwhile
            message = f"Add {folder} with matlens"
            made = hub.create_commit(repository.name, additions, commit_message=message, parent_commit=commit)
        return str(made.oid)


def pull_lens(
    repository: HubRepository,
    name: str | None = None,
    *,
    revision: str | None = None,
    model: TransformerBridge | None = None,
    strict: bool = True,
) -> LensMaps:
    """Read a lens from a repository; see `Lens.from_pretrained`."""
    commit, paths = _list_files(repository, revision)

    def download(path: str) -> Path:
        with repository.client("read") as hub:
            return Path(hub.hf_hub_download(repository.name, path, revision=commit, etag_timeout=PATIENCE))

    known = _folders(paths)
    files = [path for path in paths if path.endswith(".pt")]
    if name is None and len(known) == 1:
        (name,) = known
    if name is not None and name in files:
        if model is None:
            raise InputError(f"model must be given: {name} does not record its model.")
        lens = read_jacobian_lens(download(name), model, strict=strict)
    elif name is not None and name in known:
        inside = [path for path in paths if str(PurePosixPath(path).parent) == name]
        wanted = [path for path in inside if path.endswith((f"/{CONFIG}", ".safetensors"))]
        places = {download(path).parent for path in wanted}
        lens = read_lens(places.pop())
    else:
        raise InputError(
            f"{repository.name} has no lens {short(name)}. Expected one of {short([*known, *files])}."
        )
    source = {"repository": repository.name, "commit": commit, "name": name}
    return replace(lens, provenance=lens.provenance.with_details(hub=source))


def _list_files(repository: HubRepository, revision: str | None = None) -> tuple[str, list[str]]:
    """The commit of a revision, and the names of its files."""
    with repository.client("read") as hub:
        info = hub.repo_info(repository.name, revision=revision, timeout=PATIENCE)
    return str(info.sha), [file.rfilename for file in info.siblings or ()]


def _folders(files: Sequence[str]) -> list[str]:
    """The folders of lenses in a repository."""
    paths = map(PurePosixPath, files)
    return sorted(str(path.parent) for path in paths if path.name == CONFIG and len(path.parts) > 1)


def folder_of(lens: LensMaps) -> str:
    """Default folder of a lens in a repository: ``model/method/corpus``."""
    parts = (bare(lens.provenance.identity.name), lens.method, bare(lens.provenance.corpus))
    return "/".join(
        re.sub(r"[^A-Za-z0-9._-]+", "-", part.split("/")[-1]).strip("-.") or "-" for part in parts
    )


# Cards


def bare(name: str) -> str:
    """A name without folders of this machine: the last part of a path."""
    absolute = name.startswith((".", "/", "~")) or "\\" in name
    return re.split(r"[\\/]", name.rstrip("\\/"))[-1] if absolute else name


def repository_card(name: str, folders: Sequence[str]) -> str:
    """README of a repository of lenses."""
    return render_card("lens", "repository.md", {"name": name, "folders": folders}, {"plain": _plain})


def lens_card(lens: LensMaps, results: pd.DataFrame | None) -> str:
    """README of one lens: its training data, and its quality at each layer."""
    provenance = lens.provenance
    name = bare(provenance.identity.name)
    if results is not None and {*map(bare, map(str, results["model"].dropna()))} - {name}:
        raise InputError(f"The table must be of {name}, the model of the lens, got one of another model.")
    values = {
        "lens": lens, "provenance": provenance, "identity": provenance.identity,
        "data": provenance.data or {}, "details": provenance.details,
        "quality": None if results is None else quality_of(lens.method, results),
    }  # fmt: skip
    filters: dict[str, Callable[..., str]] = {
        "plain": _plain, "bare": bare, "whole": _whole, "measured": _measured
    }  # fmt: skip
    return render_card("lens", "card.md", values, filters)


def quality_of(method: str, results: pd.DataFrame) -> pd.DataFrame:
    """Measures of a lens, a row per layer, from a table such as that of `lens.evaluate_lenses`."""
    check_columns(results, COLUMNS, what="the table of lens.evaluate_lenses or lens.prediction_quality")
    check_one(results)
    rows = results[(results["method"] == method) & results["layer"].notna() & results["value"].notna()]
    if "against" in rows:
        rows = rows[rows["against"].isna() | (rows["against"].astype(str) == "")]
    rows = rows[rows["target"].isna() | (rows["target"] == rows["target"].max())]  # maps to the last layer
    if rows.empty:
        known = sorted(set(results["method"].astype(str)))
        raise InputError(f"The table has no value of {short(method)}. It has those of {short(known)}.")
    names = [m if pd.isna(k) else f"{m}@{int(k)}" for m, k in zip(rows["metric"], rows["k"], strict=True)]
    rows = rows.astype({"layer": int, "value": float}).assign(measure=names)
    return rows.pivot_table(index="layer", columns="measure", values="value", sort=False).sort_index()


def _plain(text: Any) -> str:
    """Foreign text, escaped for a line of Markdown."""
    return _MARKUP.sub(r"\\\1", printable(str(text), limit=200))


def _whole(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else "–"


def _measured(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.3f}"
