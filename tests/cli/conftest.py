"""Commands run in this process."""

from __future__ import annotations

import pytest
from command_lines import Commands, run_command


@pytest.fixture
def run_matlens(capsys):
    return lambda *arguments: run_command(arguments, capsys)


@pytest.fixture
def commands(model_folder, capsys):
    return Commands(model_folder, capsys)
