"""Parts of a model: which there are, and which can be replaced together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from matlens import InputError
from matlens.linearity.parts import Part, model_parts
from matlens.models import ModelLayout


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", ["ln1", "attn", "ln2", "ffn", "block", "jump 2"]),
        ("bert", ["ln1", "attn", "ln2", "ffn", "block", "jump 2"]),
        ("olmo2", ["ln1", "attn", "ln2", "ffn", "block", "jump 2"]),
        ("gptj", ["ln1", "attn", "ffn", "block", "jump 2"]),
        ("bloom", ["block", "jump 2"]),
    ],
)
def test_every_part_is_there(name: str, kinds: list[str], small_model: Callable[[str], Any]) -> None:
    parts = model_parts(ModelLayout.from_model(small_model(name)))
    assert [part.kind for part in parts if part.layer == 0] == kinds
    assert [part.kind for part in parts if part.layer == 2] == kinds[:-1]
    assert len({part.name for part in parts}) == len(parts) == 3 * len(kinds) - 1
    ends = {part.kind: (part.source, part.target) for part in parts if part.layer == 1}
    for kind in {"ln1", "attn", "ln2", "ffn"} & set(kinds):
        behind = ("_post_in.1", "_post_out.1") if (name, kind[:2]) == ("olmo2", "ln") else ("_in.1", "_out.1")
        assert ends[kind] == (kind + behind[0], kind + behind[1])
    jump = next(part for part in parts if part.kind == "jump 2")
    assert (jump.source, jump.target, list(jump.blocks)) == ("h.0", "h.2", [0, 1])


def test_a_jump_over_one_block_is_refused(small_model: Callable[[str], Any]) -> None:
    with pytest.raises(InputError, match="The blocks of a jump"):
        model_parts(ModelLayout.from_model(small_model("llama")), jumps=[1])


def test_what_writes_into_the_residual_stream() -> None:
    assert Part("ffn", 1, "ffn_in.1", "ffn_out.1").writes
    assert not Part("block", 2, "h.2", "h.3").writes
