"""Prompts to be continued: RealToxicityPrompts, other JSON lines, or a text with one prompt a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matlens.corpora.sources import json_rows, text_of_row
from matlens.corpora.streams import numbered_lines
from matlens.errors import InputError
from matlens.signatures import checked

PROMPT_FIELD = "prompt"
"""Field of JSON lines that holds a prompt unless another is given."""
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
        Name of the field that holds the prompt in JSON lines: a text, or an object with a ``text``.
    challenging
        Whether to keep only prompts that are marked as challenging, as the paper does with
        RealToxicityPrompts.

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
        texts = list(_json_prompts(path, field, challenging))
    elif challenging:
        raise InputError(
            f"{str(path)!r} is a text, which marks no prompt as challenging. Expected JSON lines with a "
            f"truth value in {CHALLENGING_FIELD!r}, as RealToxicityPrompts has, or to read all prompts."
        )
    else:
        texts = [line.strip() for _, line in numbered_lines(path)]
    prompts = [prompt for prompt in texts if prompt]
    if not prompts:
        kind = "challenging prompt" if challenging else "prompt"
        raise InputError(f"{str(path)!r} has no {kind} in its {len(texts)} lines. Expected at least one.")
    return prompts


def _json_prompts(path: Path, field: str, challenging: bool) -> Iterator[str]:
    for where, row in json_rows(path):
        if row is None:
            continue
        text = _prompt_text(row, field, where)
        yield "" if challenging and not _is_challenging(row, where) else text.strip()


def _prompt_text(row: dict[str, Any], field: str, where: str) -> str:
    prompt = row.get(field)
    if isinstance(prompt, dict):
        return text_of_row(prompt, "text", f"{field!r} in {where}")
    return text_of_row(row, field, where)


def _is_challenging(row: dict[str, Any], where: str) -> bool:
    mark = row.get(CHALLENGING_FIELD)
    if not isinstance(mark, bool):
        raise InputError(
            f"The field {CHALLENGING_FIELD!r} in {where} holds {mark!r}. Expected true or false, as in "
            "RealToxicityPrompts."
        )
    return mark
