"""Write tables into a page between two marks, so that no figure there is typed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def table_lines(rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table; a row of ``all`` is bold."""
    head, *lines = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    bold = [[cell and f"**{cell}**" for cell in line] if line[0] == "all" else line for line in lines]
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *bold)]


def write_between(page: Path, mark: str, content: str) -> None:
    """Replace the text between the two marks of a page, HTML comments with this word."""
    comment = f"<!-- {mark} -->"
    before, _, after = page.read_text().split(comment)
    page.write_text(f"{before}{comment}\n{content.strip()}\n{comment}{after}")
