"""Prompts of RealToxicityPrompts, of JSON lines or of a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from matlens import InputError
from matlens.data.sources import text_of_row
from matlens.data.texts import JSON_SUFFIXES, json_rows, open_text, shown
from matlens.errors import checked

PROMPT_FIELD = "prompt"
CHALLENGING_FIELD = "challenging"


@checked
def read_prompts(path: str | Path, *, field: str = PROMPT_FIELD, challenging: bool = False) -> list[str]:
    """Read prompts from a file; blank ones are left out, and so is white space around them.

    Parameters
    ----------
    path
        JSON lines where the name ends in ``.jsonl`` or ``.json``, such as RealToxicityPrompts; otherwise a
        text with one prompt a line.
    field
        Field of JSON lines that holds the prompt: a text, or an object with a ``text``.
    challenging
        Whether to keep only prompts that are marked as challenging, as in RealToxicityPrompts.
    """
    path = Path(path).expanduser()
    with open_text(path) as (name, lines):
        if name.endswith((".csv", ".tsv")):
            raise InputError(f"{shown(path)} is a table, whose heading would be read as a prompt.")
        if name.endswith(JSON_SUFFIXES):
            texts = list(_json_prompts(json_rows(lines, path), field, challenging))
        elif challenging:
            raise InputError(
                f"{shown(path)} is a text, which marks no prompt as challenging. Expected JSON lines with "
                f"true or false in {CHALLENGING_FIELD!r}, as RealToxicityPrompts has."
            )
        else:
            texts = [line.strip() for _, line in lines]
    prompts = [prompt for prompt in texts if prompt]
    if not prompts:
        kind = "challenging prompt" if challenging else "prompt"
        raise InputError(f"{shown(path)} has no {kind} in its {len(texts)} lines. Expected at least one.")
    return prompts


def _json_prompts(
    rows: Iterable[tuple[str, dict[str, Any] | None]], field: str, challenging: bool
) -> Iterator[str]:
    for where, row in rows:
        if row is None:
            continue
        prompt = row.get(field)
        if isinstance(prompt, dict):
            text = text_of_row(prompt, "text", f"{field!r} in {where}")
        else:
            text = text_of_row(row, field, where)
        mark = row.get(CHALLENGING_FIELD)
        if challenging and not isinstance(mark, bool):
            raise InputError(
                f"The field {CHALLENGING_FIELD!r} in {where} holds {mark!r}. Expected true or false, as in "
                "RealToxicityPrompts."
            )
        yield "" if challenging and not mark else text.strip()
