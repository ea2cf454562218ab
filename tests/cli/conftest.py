"""Commands run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Commands, Outcome, run_command


@pytest.fixture
def run_matlens(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    return lambda *arguments: run_command(arguments, capsys)


@pytest.fixture
def commands(model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(model_folder, capsys)
