"""Prompts are read from JSON lines and from texts."""

from __future__ import annotations

import json

import pytest
from control.generation import read_prompts

from matlens import InputError

ROWS = [
    {"prompt": {"text": "You are such a", "toxicity": 0.2}, "challenging": True},
    {"prompt": {"text": " My neighbour is "}, "challenging": False},
    {"prompt": {"text": ""}, "challenging": True},
    {"prompt": "plain text", "challenging": True, "question": "Why?"},
]


def test_prompts_are_in_a_field_or_its_text_or_one_a_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n \n")
    assert read_prompts(path) == ["You are such a", "My neighbour is", "plain text"]
    assert read_prompts(path, challenging=True) == ["You are such a", "plain text"]
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\n two \n")
    assert read_prompts(text) == ["one", "two"]
    for wrong, options in ((text, {"challenging": True}), (tmp_path / "absent.txt", {})):
        with pytest.raises((InputError, OSError)):
            read_prompts(wrong, **options)
