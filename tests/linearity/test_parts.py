"""Parts of a model: which there are, and between which sites."""

from __future__ import annotations

import pytest

from matlens import InputError
from matlens.linearity.parts import JUMPS, Part, model_parts
from matlens.models import ModelLayout

ALL = ["ln1", "attn", "ln2", "ffn", "block", "jump 2"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("bert", ALL), ("olmo2", ALL), ("gptj", [kind for kind in ALL if kind != "ln2"]), ("bloom", ALL[4:])],
)
def test_every_part_is_there(name, kinds, small_model):
    layout = ModelLayout.from_model(small_model(name))
    parts = model_parts(layout)
    assert JUMPS == (2, 4, 8)  # definitions, section 10
    assert [part.kind for part in parts if part.layer == 0] == kinds
    assert [part.kind for part in parts if part.layer == 2] == kinds[:-1]
    assert len({part.name for part in parts}) == len(parts) == 3 * len(kinds) - 1
    ends = {part.kind: (part.source, part.target) for part in parts if part.layer == 1}
    for kind in {"ln1", "attn", "ln2", "ffn"} & set(kinds):
        after = "_post" if (name, kind[:2]) == ("olmo2", "ln") else ""
        assert ends[kind] == (f"{kind}{after}_in.1", f"{kind}{after}_out.1")
    jump = next(part for part in parts if part.kind == "jump 2")
    assert (jump.source, jump.target, jump.end) == ("h.0", "h.2", 2)
    assert [part.kind for part in parts if part.layer == 0 and part.writes] == [
        kind for kind in ("attn", "ffn") if kind in kinds
    ]
    assert Part("ffn", 1, "ffn_in.1", "ffn_out.1").end == 2
    with pytest.raises(InputError, match="each of the jumps"):
        model_parts(layout, jumps=[1])
