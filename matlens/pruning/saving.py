"""A pruned model as a plain Hugging Face folder, which loads where matlens is not installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matlens.errors import InputError, checked
from matlens.io.artifact import MODEL_RECORD, describe_file, make_config
from matlens.io.files import (
    check_writable,
    library_errors,
    locked,
    nearest_existing,
    sealed,
    system_errors,
    write_json,
    write_text,
)
from matlens.io.tables import check_columns
from matlens.models.tokens import visible
from matlens.pruning.choices import Method

if TYPE_CHECKING:
    import pandas as pd

    from matlens.pruning.pruned import Pruned

CARD = "README.md"
_MODEL = "model"  # what is written before it is moved to its place


def check_new(folder: Path) -> None:
    """Refuse, before any work, a folder that a model could not be put in the place of.

    Raises
    ------
    InputError
        It holds files, is no folder or one that cannot be replaced, or cannot be made.
    """
    expected = "Expected a new or empty folder for the pruned model"
    with system_errors(folder):
        if os.path.lexists(folder):
            if not folder.is_dir():
                raise InputError(f"{folder} is no folder. {expected}.")
            if any(folder.iterdir()):
                raise InputError(f"{folder} is not empty. {expected}.")
            if folder.samefile(os.curdir) or os.path.ismount(folder):
                what = "a mounted disk" if os.path.ismount(folder) else "the folder that this runs in"
                raise InputError(
                    f"{folder} is {what}, and cannot be replaced by a finished one. {expected}, such as "
                    f"{folder / 'pruned'}."
                )
        check_writable(nearest_existing(folder))


@contextmanager
def reserved(folder: Path) -> Iterator[Path]:
    """Be the one that makes a new folder, which is there whole or not at all.

    What is given is an empty folder beside it, to be filled and moved to its place; where that is a link, to
    the place it leads to. Another process that wants the same waits, and then finds it made. What a killed
    one has left there is removed.

    Raises
    ------
    InputError
        The folder holds files, is no folder, or cannot be made.
    """
    check_new(folder)
    folder = _behind_links(folder)
    place = folder.with_name(f".{folder.name}.unfinished")
    work = place / _MODEL
    try:
        with ExitStack() as lock:
            with system_errors(folder):
                lock.enter_context(locked(place))
                check_new(folder)
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
    finally:
        with suppress(OSError):  # somebody else is at work there
            place.rmdir()


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
        What was measured, for the card: rows of `matlens.pruning.compare_pruned`, of
        `matlens.pruning.compare_costs`, or of both.

    Raises
    ------
    InputError
        The folder is not empty, or cannot be written; or it is no such table.
    """
    folder = Path(folder)
    if table is not None:
        check_columns(table, ("corpus", "method", "metric", "value"), what="the table")
    with reserved(folder) as work, system_errors(folder):
        with library_errors():
            pruned.model.save_pretrained(work)
            pruned.tokenizer.save_pretrained(work)
        write_text(work / CARD, model_card(pruned, table))
        request = {
            "blocks_left_out": list(pruned.blocks),
            "attention_left_out": list(pruned.attention),
            "method": pruned.method.value,
            "provenance": pruned.provenance.to_json(),
        }
        files = {path.name: describe_file(path) for path in sorted(work.iterdir()) if path.is_file()}
        write_json(work / MODEL_RECORD, sealed({**make_config("pruned model", request), "files": files}))
        place = _behind_links(folder)
        if place.is_dir():
            place.rmdir()
        work.replace(place)
    return folder


def _behind_links(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


def model_card(pruned: Pruned, table: pd.DataFrame | None) -> str:
    """What was done to the model and what was measured, as Markdown."""
    identity, data = pruned.provenance.identity, pruned.provenance.data or {}
    details = pruned.provenance.details
    name = visible(str(identity.name)).replace("`", "'")
    spans = ", ".join(
        str(first) if last == first + 1 else f"{first} to {last - 1}" for first, last in pruned.spans
    )
    what = "blocks left out" if pruned.blocks or not pruned.attention else "attentions left out"
    lines = [
        "---", "library_name: transformers", "tags: [pruned, matlens]", "---", "",
        f"# {len(pruned.blocks) or len(pruned.attention)} of {identity.n_layers} {what}", "",
        f"Made of `{name}` (fingerprint `{identity.fingerprint}`).",
    ]  # fmt: skip
    changed = (
        f"the output matrix of the FFN was changed by the method `{pruned.method.value}` (penalty "
        f"{details.get('penalty', 0):g}), fitted on {details.get('n_tokens', 0):,} tokens of "
        f"`{visible(str(data.get('corpus', 'unnamed')))}`"
    )
    unless_out = "nothing was changed" if pruned.method == Method.out else changed
    if pruned.blocks:
        where = "the block before each span"
        if pruned.method == Method.chain:
            where = "every block that stays, from the one before the first span on,"
        lines[-1] += f" Without the blocks {spans}; in {where} {unless_out}."
    if pruned.attention:
        lines[-1] += (
            f" The attention of the blocks {', '.join(map(str, pruned.attention))} writes nothing: its "
            f"output matrix is zero; in the block before each {unless_out}. It is still computed and cached."
        )
    left_out = pruned.blocks or pruned.attention
    lines[-1] += " All other weights are as they were." if left_out else " Nothing was left out or changed."
    if healed := details.get("healed"):
        lines += [
            "",
            f"These matrices alone were then trained on {healed['n_tokens']:,} tokens of the same text "
            "towards what the whole model says. It took "
            f"{healed['seconds']:,.0f} seconds, and the divergence was "
            f"{healed['divergence']:.4g} nats a token in the end.",
        ]
    if table is not None:
        lines += _measured(table)
    return "\n".join([*lines, ""])


def _measured(table: pd.DataFrame) -> list[str]:
    """Tables of what was measured on texts, and of what a token costs, which is about no text."""
    of_texts = {
        text: {(row["method"], row["metric"]): row["value"] for row in rows.to_dict("records")}
        for text, rows in table.groupby("corpus", sort=False)
    }
    costs = of_texts.pop("", None)
    lines: list[str] = []
    if of_texts:
        lines += [
            "",
            "| text | perplexity, whole model | perplexity, this model | same next token |",
            "|---|---|---|---|",
        ]
    for text, values in of_texts.items():
        lines.append(
            f"| {visible(str(text))} | {_value(values, 'whole', 'perplexity')} | "
            f"{_value(values, 'pruned', 'perplexity')} | {_value(values, 'pruned', 'agreement')} |"
        )
    if costs is not None:
        lines += [
            "",
            "Tokens written one by one, with the key-value cache; both models timed by turns on the machine "
            "that made this one:",
            "",
            "| model | milliseconds a token | MB of weights | KB of cache a token |",
            "|---|---|---|---|",
        ]
        for method, name in (("whole", "whole model"), ("pruned", "this model")):
            numbers = [
                _value(costs, method, metric, of=unit)
                for metric, unit in (("seconds", 1e-3), ("weights", 1e6), ("cache", 1e3))
            ]
            lines.append(f"| {name} | {' | '.join(numbers)} |")
    return lines


def _value(values: dict[Any, float], method: str, metric: str, *, of: float = 1.0) -> str:
    return f"{values[method, metric] / of:.4g}" if (method, metric) in values else "not measured"
