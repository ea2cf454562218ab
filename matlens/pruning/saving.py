"""Save a pruned model as a plain Hugging Face folder, which loads without matlens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matlens.errors import InputError, checked
from matlens.io.artifact import MODEL_RECORD, make_config
from matlens.io.files import check_writable, checksummed, describe_file, locked, write_files
from matlens.io.tables import check_columns
from matlens.models.tokens import visible

if TYPE_CHECKING:
    import pandas as pd

    from matlens.pruning.pruned import Pruned


def check_new(folder: Path) -> None:
    """Check, before any work, that a new folder can be written."""
    expected = "Expected a new or empty folder for the pruned model"
    if os.path.lexists(folder):
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder. {expected}.")
        if any(folder.iterdir()):
            raise InputError(f"{folder} is not empty. {expected}.")
        if folder.samefile(os.curdir) or os.path.ismount(folder):
            what = "a mounted disk" if os.path.ismount(folder) else "the folder that this runs in"
            raise InputError(
                f"{folder} is {what}, and cannot be replaced by a finished one. {expected}, such as "
                f"{folder / 'pruned'}."
            )
    check_writable(folder)


@contextmanager
def reserved(folder: Path) -> Iterator[Path]:
    """Reserve a new folder, which is written completely or not at all.

    Yields an empty folder next to it, which is moved to its place at the end (to the target of a link).
    Another process that reserves the same folder waits. Leftovers of a killed process are removed.
    """
    check_new(folder)
    folder = Path(os.path.realpath(folder))
    place = folder.with_name(f".{folder.name}.unfinished")
    work = place / "model"
    try:
        with locked(place):
            check_new(folder)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
    finally:
        with suppress(OSError):  # another process is at work there
            place.rmdir()


@checked
def save_pruned(pruned: Pruned, folder: str | Path, table: pd.DataFrame | None = None) -> Path:
    """Save configuration, weights, tokenizer and a model card, atomically.

    Parameters
    ----------
    folder
        A new or empty folder.
    table
        Rows of `matlens.pruning.compare_pruned`, of `matlens.pruning.compare_costs`, or of both, for the
        card.
    """
    folder = Path(folder)
    if table is not None:
        check_columns(table, ("corpus", "method", "metric", "value"), what="the table")
    with reserved(folder) as work:
        pruned.model.save_pretrained(work)
        pruned.tokenizer.save_pretrained(work)
        write_files({work / "README.md": model_card(pruned, table)})
        request = {
            "removed_blocks": list(pruned.blocks),
            "removed_attention": list(pruned.attention),
            "method": pruned.method.value,
            "provenance": pruned.provenance.to_json(),
        }
        files = {path.name: describe_file(path) for path in sorted(work.iterdir()) if path.is_file()}
        record = checksummed({**make_config("pruned model", request), "finished": True, "files": files})
        write_files({work / MODEL_RECORD: record})
        place = Path(os.path.realpath(folder))
        if place.is_dir():
            place.rmdir()
        work.replace(place)
    return folder


def model_card(pruned: Pruned, table: pd.DataFrame | None) -> str:
    """The model card: changes and measurements, as Markdown."""
    from jinja2 import Environment, PackageLoader, Undefined

    def measured(value: Any, unit: float = 1.0) -> str:
        return "not measured" if isinstance(value, Undefined) else f"{value / unit:.4g}"

    texts: dict[str, dict[tuple[str, str], float]] = {}
    for row in [] if table is None else table.to_dict("records"):
        texts.setdefault(visible(str(row["corpus"])), {})[row["method"], row["metric"]] = row["value"]
    environment = Environment(
        loader=PackageLoader("matlens", "pruning"), trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["measured"] = measured
    identity, data = pruned.provenance.identity, pruned.provenance.data or {}
    return environment.get_template("card.md").render(
        pruned=pruned, identity=identity, name=visible(str(identity.name)).replace("`", "'"),
        corpus=visible(str(data.get("corpus", "unnamed"))), details=pruned.provenance.details,
        costs=texts.pop("", None), texts=texts,
        spans=", ".join(str(a) if b == a + 1 else f"{a} to {b - 1}" for a, b in pruned.spans),
    )  # fmt: skip
