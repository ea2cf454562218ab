"""How tests run the command line in their own process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from matlens.cli import app


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def run_command(
    arguments: Iterable[object], capsys: pytest.CaptureFixture[str], *, width: int = 120
) -> Outcome:
    """Run a command line; an exception that would be a traceback comes through."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["matlens", *map(str, arguments)])
        patch.setenv("COLUMNS", str(width))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app.main()
        output = capsys.readouterr()
    code = ended.value.code
    return Outcome(0 if code is None else int(code), output.out, output.err)


class Commands:
    """Commands on small models."""

    def __init__(self, model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
        self._model_folder, self._capsys = model_folder, capsys

    def run(self, *arguments: object, model: str | Path | None = None, code: int = 0) -> str:
        """Run a command on a model; what it prints, or what it says if it is refused (``code=2``)."""
        folder = self._model_folder(model) if isinstance(model, str) else model
        options = ["--model", folder, "--device", "cpu"] if folder else []
        outcome = run_command([*arguments, *options], self._capsys, width=160)
        assert outcome.code == code
        assert "Traceback" not in outcome.out + outcome.err
        return " ".join(outcome.err.replace("│", " ").split()) if code else outcome.out


def cells(printed: str) -> list[list[str]]:
    """Rows of the tables that were printed."""
    rows = [line.strip("│ ") for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.split("│")] for row in rows]
