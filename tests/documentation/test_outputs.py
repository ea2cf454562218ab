"""What README says that its code prints is what comes out, on the real model."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from blocks import PROJECT, Block, blocks_of

import matlens
from matlens.models import SMOLLM2

pytestmark = pytest.mark.real

# What takes minutes: fitting on thousands of sentences, and tracing hundreds. `make verify` runs it too.
COSTLY, FULL = {"maps", "trace"}, 2000


def printed() -> Iterator[tuple[Block, str | None]]:
    """Python blocks of README, each with the output that stands below it."""
    blocks = blocks_of(PROJECT / "README.md")
    for i, block in enumerate(blocks):
        if block.language == "python":
            following = blocks[i + 1] if i + 1 < len(blocks) else block
            yield block, following.source if following.language == "text" else None


def is_costly(block: Block) -> bool:
    names = {node.id for node in ast.walk(ast.parse(block.source)) if isinstance(node, ast.Name)}
    return bool(names & COSTLY)


def test_readme_prints_what_it_says(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    full = request.config.getoption("--real-train") >= FULL
    namespace = {"matlens": matlens, "model": matlens.load(SMOLLM2, device="cpu")}
    n_compared = 0
    for block, expected in printed():
        if full or not is_costly(block):
            capsys.readouterr()
            exec(compile(block.source, "README.md", "exec"), namespace)
            if expected is not None:
                lines = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
                assert lines == [line.rstrip() for line in expected.strip().splitlines()]
                n_compared += 1
    assert n_compared >= 2
