"""A pruned model as a plain Hugging Face folder, which loads where matlens is not installed."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matlens.errors import InputError
from matlens.models.vocabulary import visible
from matlens.signatures import checked
from matlens.storage.files import nearest_existing, require_writable, system_errors, write_json, write_text
from matlens.storage.folders import make_config

if TYPE_CHECKING:
    import pandas as pd

    from matlens.pruning.pruned import Pruned

RECORD, CARD = "matlens.json", "README.md"


def require_new(folder: Path) -> None:
    """Refuse, before any work, a folder that a model could not be written into.

    Raises
    ------
    InputError
        It holds files, is no folder, or cannot be made.
    """
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty. Expected a new or empty folder for the pruned model.")
    require_writable(nearest_existing(folder))


@checked
def save_pruned(pruned: Pruned, folder: str | Path, table: pd.DataFrame | None = None) -> Path:
    """Write configuration, weights, tokenizer, generation settings and a model card; whole, or not at all.

    Parameters
    ----------
    pruned
        The model.
    folder
        A new or empty folder.
    table
        What was measured, for the card; see `matlens.pruning.compare_pruned`.

    Raises
    ------
    InputError
        The folder is not empty, or cannot be written.
    """
    folder = Path(folder)
    require_new(folder)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    with system_errors(folder):
        partial.mkdir(parents=True)
        try:
            pruned.model.save_pretrained(partial)
            pruned.tokenizer.save_pretrained(partial)
            request = {
                "blocks_left_out": list(pruned.blocks),
                "attention_left_out": list(pruned.attention),
                "method": pruned.method.value,
                "provenance": pruned.provenance.to_json(),
            }
            write_json(partial / RECORD, make_config("pruned model", request))
            write_text(partial / CARD, model_card(pruned, table))
            if folder.is_dir():
                folder.rmdir()
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def model_card(pruned: Pruned, table: pd.DataFrame | None) -> str:
    """What was done to the model and what was measured, as Markdown."""
    identity, data = pruned.provenance.identity, pruned.provenance.data or {}
    details = pruned.provenance.details
    name = visible(str(identity.name)).replace("`", "'")
    spans = ", ".join(
        str(first) if last == first + 1 else f"{first} to {last - 1}" for first, last in pruned.spans
    )
    lines = [
        "---", "library_name: transformers", "tags: [pruned, matlens]", "---", "",
        f"# {len(pruned.blocks)} of {identity.n_layers} blocks left out", "",
        f"Made of `{name}` (fingerprint `{identity.fingerprint}`). Without the blocks {spans or 'none'}; in "
        "the block before each span the output matrix of the FFN was changed by the method "
        f"`{pruned.method.value}` (penalty {details.get('penalty', 0):g}), fitted on "
        f"{details.get('n_tokens', 0):,} tokens of `{visible(str(data.get('corpus', 'unnamed')))}`. "
        "All other weights are as they were.",
    ]  # fmt: skip
    if pruned.attention:
        lines += [
            "",
            f"The attention of the blocks {', '.join(map(str, pruned.attention))} writes nothing: its output "
            "matrix is zero, and the FFN before each was changed by the same method. It is still computed "
            "and cached.",
        ]
    if healed := details.get("healed"):
        lines += [
            "",
            f"These matrices alone were then trained on {healed['n_tokens']:,} tokens of the same text "
            "towards what the whole model says. It took "
            f"{healed['seconds']:,.0f} seconds, and the divergence was "
            f"{healed['divergence']:.4g} nats a token in the end.",
        ]
    if table is not None:
        lines += [
            "",
            "| text | perplexity, whole model | perplexity, this model | same next token |",
            "|---|---|---|---|",
        ]
        for text, rows in table.groupby("corpus", sort=False):
            values = {(row["method"], row["metric"]): row["value"] for row in rows.to_dict("records")}
            lines.append(
                f"| {visible(str(text))} | {_value(values, 'whole', 'perplexity')} | "
                f"{_value(values, 'pruned', 'perplexity')} | {_value(values, 'pruned', 'agreement')} |"
            )
    return "\n".join([*lines, ""])


def _value(values: dict[Any, float], method: str, metric: str) -> str:
    return f"{values[method, metric]:.4g}" if (method, metric) in values else "not measured"
