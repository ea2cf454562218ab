"""Prompts of RealToxicityPrompts, of JSON lines or of a text."""

from __future__ import annotations

import json
from pathlib import Path

from matlens import InputError

PROMPT_FIELD = "prompt"


def read_prompts(path: str | Path, *, field: str = PROMPT_FIELD, challenging: bool = False) -> list[str]:
    """Read prompts from a file, without blank ones.

    JSON lines, such as RealToxicityPrompts, have the prompt in a field: a text, or an object with a ``text``;
    with ``challenging`` only those that are marked so are read. Other files have one prompt a line.
    """
    path = Path(path).expanduser()
    is_json = path.suffix in (".json", ".jsonl")
    if challenging and not is_json:
        raise InputError(f"challenging requires JSON lines, got {path}.")
    lines = path.read_text("utf-8").splitlines()
    if is_json:
        rows = [json.loads(line) for line in lines if line.strip()]
        given = [row[field] for row in rows if not challenging or row["challenging"]]
        lines = [prompt["text"] if isinstance(prompt, dict) else prompt for prompt in given]
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{path} has no prompts.")
    return prompts
