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


class FfnCommands:
    """Commands about feed-forward layers, on small models."""

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

    def assert_help(self, *command: str) -> None:
        """The help of a command names the options that all of them have, and the command is listed."""
        printed = self.run(*command, "--help")
        for option in ("--model", "--device", "--dtype", "--revision", "--trust-remote-code"):
            assert option in printed
        for option in ("--read", "--tokens"):
            assert option in printed
        assert command[-1] in self.run(*command[:-1], "--help")

    def assert_refused(self, *arguments: str, message: str, folder: Path) -> None:
        """Input that cannot be used is refused in a folder, before anything is written there."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert message in self.run(*arguments, model="gpt2", code=2)
        if "--tokens" not in arguments:
            assert not list(folder.iterdir()), "something was written before the input was looked at"

    def assert_models_refused(self, *command: str, absent: Path) -> None:
        """A model whose FFNs are not known is refused, and one that is not there."""
        assert "have no value vectors that are known" in self.run(*command, model="bloom", code=2)
        assert "There is no model" in self.run(*command, model=absent, code=2)


def cells(printed: str) -> list[list[str]]:
    """Rows of the tables that were printed."""
    rows = [line.strip("│ ") for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.split("│")] for row in rows]
