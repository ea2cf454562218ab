"""The site builds with every link checked, shows every public name, and fetches nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from blocks import NOTEBOOKS, PROJECT

import matlens


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=PROJECT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def anchors(page: Path) -> set[str]:
    return set(re.findall(r'id="(matlens\.[\w.]+)"', page.read_text()))


def test_every_public_name_has_its_place(site):
    top = {name: getattr(matlens, name) for name in matlens.__all__}
    rooms = {name for name, value in top.items() if isinstance(value, ModuleType)}
    index = anchors(site / "api" / "index.html")
    assert {f"matlens.{name}" for name in set(top) - rooms} <= index
    for room in rooms:
        module, shown = top[room], anchors(site / "api" / f"{room}.html")
        for name in getattr(module, "__all__", ()):
            at_top = any(getattr(module, name) is value for value in top.values())
            assert at_top or f"matlens.{room}.{name}" in shown, f"{room}: {name}"


def test_notebooks_can_be_read_and_downloaded(site):
    for path in NOTEBOOKS:
        assert (site / "notebooks" / f"{path.stem}.html").is_file()
        assert (site / "notebooks" / f"{path.stem}.ipynb").read_text().startswith("{")


def test_pages_fetch_nothing_from_elsewhere(site):
    loading = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+stylesheet[^>]+https?:")
    for page in site.rglob("*.html"):
        assert not loading.search(page.read_text()), page.name
