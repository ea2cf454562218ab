"""Bars and notes are shown for what takes long, and by the main process alone."""

from __future__ import annotations

import time

import pytest

from matlens import parallel
from matlens.parallel import Bar, waiting


@pytest.mark.parametrize(
    ("quiet", "silent", "shown"), [(0, False, True), (9, False, False), (0, True, False)]
)
def test_long_work_is_shown_and_all_steps_come_through(quiet, silent, shown, capsys, monkeypatch):
    monkeypatch.setattr(parallel, "_QUIET", quiet)
    if silent:
        parallel._silent.set()
    try:
        assert [step for step in Bar([7, 8], desc="fitting") if time.sleep(0.15) is None] == [7, 8]
        with waiting("loading"):
            time.sleep(0.2)
    finally:
        parallel._silent.clear()
    printed = capsys.readouterr().err
    assert ("fitting" in printed) == ("loading ..." in printed) == shown
