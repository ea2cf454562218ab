"""Prompts are read as they stand in their files, and what is wrong with a line is told with its number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from control.prompts import read_prompts

from matlens import InputError

ROWS = [
    {"filename": "a.txt", "prompt": {"text": "You are such a", "toxicity": 0.2}, "challenging": True},
    {"prompt": {"text": " My neighbour is "}, "challenging": False},
    {"prompt": {"text": ""}, "challenging": True},
    {"prompt": {"text": None}, "challenging": False},
    {"prompt": "plain text", "challenging": True, "question": "Why?"},
]


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_prompts_of_json_lines_are_in_their_field_or_in_its_text(tmp_path: Path) -> None:
    path = written(tmp_path / "prompts.jsonl", [*ROWS, "", "  "])
    assert read_prompts(path) == ["You are such a", "My neighbour is", "plain text"]
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_prompts(packed) == read_prompts(path)
    assert read_prompts(str(path), challenging=True) == ["You are such a", "plain text"]
    other = written(tmp_path / "others.JSONL", [{"question": "Why?"}, {"question": "How?"}])
    assert read_prompts(other, field="question") == ["Why?", "How?"]


def test_a_text_has_a_prompt_in_every_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('\ufeffYou are such a \n\n\t\n{"prompt": 1}\r\nYou are such a', encoding="utf-8")
    assert read_prompts(path) == ["You are such a", '{"prompt": 1}', "You are such a"]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([ROWS[0], "", "[1]"], {}, r"There is a JSON list in line 3 of .* Expected one JSON object a line"),
        ([ROWS[0], "null"], {}, r"There is a JSON NoneType in line 2 of "),
        ([ROWS[0], {"prompt": {"toxicity": 1}}], {}, r"no field 'text' in 'prompt' in line 2 of "),
        ([ROWS[0], {"prompt": {"text": ["x"]}}], {}, r"'text' in 'prompt' in line 2 of .* holds \['x'\]"),
        ([ROWS[0], {"prompt": "x"}], {"challenging": True}, r"'challenging' in line 2 of .* holds None"),
        ([{"prompt": "x", "challenging": 1}], {"challenging": True}, "holds 1. Expected true or false"),
        ([{"prompt": " "}], {}, "has no prompt in its 1 lines"),
        ([ROWS[1]], {"challenging": True}, "has no challenging prompt in its 1 lines"),
        ([], {}, "has no prompt in its 0 lines"),
    ],
)
def test_lines_that_are_no_prompts_are_told(
    rows: list[Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "p.jsonl", rows)
    with pytest.raises(InputError, match=message):
        read_prompts(path, **options)


def test_files_that_hold_no_prompts_are_told(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.txt", tmp_path):
        with pytest.raises(InputError, match=r"cannot be read|must be a file"):
            read_prompts(path)
    text = tmp_path / "p.txt"
    text.write_text("hello")
    with pytest.raises(InputError, match="is a text, which marks no prompt as challenging"):
        read_prompts(text, challenging=True)
    text.write_bytes(b"hello\n\xff")
    with pytest.raises(InputError, match=r"Line 2 of .* is not text in UTF-8"):
        read_prompts(text)


def test_the_prompts_that_come_along_are_many_and_different() -> None:
    folder = Path(__file__).parents[2] / "analyses" / "prompts"
    prompts = read_prompts(folder / "provocations.txt")
    assert len(prompts) == len(set(prompts)) >= 100
    banned = read_prompts(folder / "banned.txt")
    assert len(banned) == len(set(banned))
