"""Prompts to be continued: RealToxicityPrompts, other JSON lines, or a text with one prompt a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matlens.corpora.sources import json_rows, lines, sound, text_of
from matlens.errors import InputError

FIELD = "prompt"
"""Field of JSON lines that holds a prompt unless another is given."""
CHALLENGING = "challenging"


def read_prompts(path: str | Path, *, field: str = FIELD, challenging: bool = False) -> list[str]:
    """Read prompts from a file; blank ones are left out, and so is white space around them.

    Parameters
    ----------
    path
        JSON lines where the name ends in ``.jsonl`` or ``.json``, such as RealToxicityPrompts; otherwise a
        text with one prompt a line.
    field
        Where the prompt is in JSON lines: a text, or an object with a ``text``.
    challenging
        Whether to keep only what is marked as challenging, as the paper does with RealToxicityPrompts.

    Raises
    ------
    InputError
        There is no such file, a line of it is not as expected (the message names it), or no prompt is left.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(
            f"There is no file {str(path)!r}. Expected prompts: a text with one a line, or JSON lines such "
            "as those of RealToxicityPrompts."
        )
    if path.name.lower().endswith((".jsonl", ".json")):
        found = list(_json_prompts(path, field, challenging))
    elif challenging:
        raise InputError(
            f"{str(path)!r} is a text, which marks no prompt as challenging. Expected JSON lines with a "
            f"truth value in {CHALLENGING!r}, as RealToxicityPrompts has, or to read all prompts."
        )
    else:
        found = [line.strip() for _, line in lines(path)]
    prompts = [prompt for prompt in found if prompt]
    if not prompts:
        kind = "challenging prompt" if challenging else "prompt"
        raise InputError(f"{str(path)!r} has no {kind} in its {len(found)} lines. Expected at least one.")
    return prompts


def _json_prompts(path: Path, field: str, challenging: bool) -> Iterator[str]:
    for where, row in json_rows(path):
        if row is None:
            continue
        text = _text(row, field, where)
        yield "" if challenging and not _marked(row, where) else sound(text).strip()


def _text(row: dict[str, Any], field: str, where: str) -> str:
    held = row.get(field)
    if isinstance(held, dict):
        return text_of(held, "text", f"{field!r} in {where}")
    return text_of(row, field, where)


def _marked(row: dict[str, Any], where: str) -> bool:
    mark = row.get(CHALLENGING)
    if not isinstance(mark, bool):
        raise InputError(
            f"{where} has {mark!r} in {CHALLENGING!r}. Expected true or false, as in RealToxicityPrompts."
        )
    return mark
