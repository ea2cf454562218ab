"""Save a pruned model as a plain Hugging Face folder, which loads without matlens."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from matlens.errors import InputError, checked
from matlens.io.artifact import MODEL_RECORD, make_config
from matlens.io.cards import render_card
from matlens.io.files import check_writable, checksummed, describe_file, write_files
from matlens.io.tables import check_columns
from matlens.models.tokens import visible

if TYPE_CHECKING:
    import pandas as pd

    from matlens.pruning.pruned import Pruned


def check_new(folder: Path) -> None:
    """Check, before any work, that a new folder can be written."""
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} must be a new or empty folder for the pruned model.")
    check_writable(folder)


@checked
def save_pruned(pruned: Pruned, folder: str | Path, table: pd.DataFrame | None = None) -> Path:
    """Save configuration, weights, tokenizer and a model card in a new folder, atomically.

    The card has the rows of ``table``, of `compare_pruned`, `compare_costs`, or both.
    """
    if table is not None:
        check_columns(table, ("model", "corpus", "method", "metric", "value"), what="the table")
        name = pruned.provenance.identity.name
        if {*map(str, table["model"])} != {name}:
            raise InputError(f"The table must be of {name}, which was pruned, got one of another model.")
    folder = Path(os.path.realpath(folder))  # of a link its target is replaced
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        work = Path(place, "model")
        work.mkdir()
        pruned.model.save_pretrained(work)
        pruned.tokenizer.save_pretrained(work)
        write_files({work / "README.md": model_card(pruned, table)})
        request = {
            "removed_blocks": list(pruned.blocks),
            "removed_attention": list(pruned.attention),
            "method": pruned.method,
            "provenance": pruned.provenance.to_json(),
        }
        files = {path.name: describe_file(path) for path in sorted(work.iterdir()) if path.is_file()}
        record = checksummed({**make_config("pruned model", request), "finished": True, "files": files})
        write_files({work / MODEL_RECORD: record})
        if folder.is_dir():
            folder.rmdir()
        work.rename(folder)
    return folder


def model_card(pruned: Pruned, table: pd.DataFrame | None) -> str:
    """The model card: changes and measurements, as Markdown."""
    texts: dict[str, dict[tuple[str, str], float]] = {}
    for row in [] if table is None else table.to_dict("records"):
        texts.setdefault(visible(str(row["corpus"])), {})[row["method"], row["metric"]] = row["value"]
    identity, data = pruned.provenance.identity, pruned.provenance.data or {}
    values = {
        "pruned": pruned, "identity": identity, "name": visible(str(identity.name)).replace("`", "'"),
        "corpus": visible(str(data.get("corpus", "unnamed"))), "details": pruned.provenance.details,
        "costs": texts.pop("", None), "texts": texts,
        "spans": ", ".join(str(a) if b == a + 1 else f"{a} to {b - 1}" for a, b in pruned.spans),
    }  # fmt: skip
    return render_card("pruning", "card.md", values, {"measured": _measured})


def _measured(value: Any, unit: float = 1.0) -> str:
    return f"{value / unit:.4g}" if isinstance(value, float | int) else "not measured"
