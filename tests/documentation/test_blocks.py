"""Every code block of README and of the documentation runs, at small size."""

from __future__ import annotations

import ast
import re
import shlex
from functools import reduce
from pathlib import Path

import pytest
from blocks import NOTEBOOKS, PAGES, PROJECT, Runner, blocks_of, check_make, check_script, run_notebook
from blocks import small_load as small_load
from blocks import small_models as small_models
from blocks import small_world as small_world

import matlens


def name_of(path: Path) -> str:
    return str(path.relative_to(PROJECT))


@pytest.mark.parametrize("path", [page for page in PAGES if "```" in page.read_text()], ids=name_of)
def test_blocks_of_a_page(path, small_world):
    Runner().run(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_cells_of_a_notebook(path, small_world):
    assert run_notebook(path) > 3


def test_commands_and_paths_in_the_text_are_there():
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", "\n".join(path.read_text() for path in PAGES)):
        if "..." in code:
            continue
        if code.startswith("python analyses/"):
            check_script(shlex.split(code)[1:])
        elif code.startswith("make "):
            check_make(shlex.split(code)[1:])
        elif re.fullmatch(r"(analyses|benchmarks|docs|tests|matlens)/[\w./-]+", code):
            assert (PROJECT / code).exists(), code


def test_names_of_rooms_in_the_text_are_there():
    text = "\n".join(path.read_text() for path in [*PAGES, PROJECT / "CHANGELOG.md"])
    for code in re.findall(r"(?<!`)`(?:matlens\.)?((?:\w+\.)+\w+)(?:\(.*?\))?`(?!`)", text):
        room, *names = code.split(".")
        if room in matlens.__all__ and not names[-1].endswith(("py", "md")):
            reduce(getattr, names, getattr(matlens, room))


def test_python_imports_only_from_rooms():
    blocks = [block for path in PAGES for block in blocks_of(path) if block.language.startswith("python")]
    code = [path.read_text() for path in NOTEBOOKS] + [block.source for block in blocks]
    for node in (node for block in code for node in ast.walk(ast.parse(block))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.partition(".")[0] != "matlens" or name.count(".") <= 1, f"{name} is a third level"


def test_the_page_of_the_architecture_has_every_package():
    rooms = {path.parent.name for path in (PROJECT / "matlens").glob("*/__init__.py")}
    rows = re.findall(
        r"^\| (`.*?) \|", (PROJECT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE
    )
    modules = {path.stem for path in (PROJECT / "matlens").glob("*.py") if not path.stem.startswith("__")}
    assert {name for row in rows for name in re.findall(r"\w+", row)} == rooms | modules


@pytest.mark.parametrize(
    "block",
    [
        "```python\nassert 1 == 2, 'nothing'\n```",
        "```sh\nmake nothing\n```",
        "```sh\nmatlens values show --nothing\n```",
    ],
)
def test_a_block_that_fails_is_not_overlooked(block, tmp_path, small_world):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{block}\n")
    with pytest.raises(Exception, match="nothing"):
        Runner().run(page)
