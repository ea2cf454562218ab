"""Figures as files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from matlens.drawing import style_sheet
from matlens.errors import checked
from matlens.io.files import write_files

SUFFIXES = (".png", ".pdf")
# What matplotlib writes of the time, by format: the same figure has the same bytes at any time.
_UNDATED: Mapping[str, dict[str, None]] = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


@checked
def save(figure: Figure, path: str | Path) -> list[Path]:
    """Save a figure as ``path``, or as ``path.png`` and ``path.pdf``; returns the paths.

    ``path`` ends in ``.png``, ``.pdf`` or ``.svg``, or the first two are appended to it.
    """
    path = Path(path)
    paths = [path] if path.suffix in _UNDATED else [path.with_name(path.name + each) for each in SUFFIXES]
    rendered: dict[Path, bytes] = {}
    with style_sheet():
        for each in paths:
            content = io.BytesIO()
            figure.savefig(content, format=each.suffix[1:], metadata=_UNDATED[each.suffix])
            rendered[each] = content.getvalue()
    write_files(rendered)
    return paths
