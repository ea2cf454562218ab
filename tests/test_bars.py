"""Bars move while one step takes long, and leave nothing behind where there was nothing to see."""

from __future__ import annotations

import gc
import re
import threading
import time

import pytest

from matlens import parallel as progress
from matlens.parallel import Bar, waiting


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks more often, so that tests take no seconds."""
    monkeypatch.setattr(progress, "_QUIET", 0.05)
    monkeypatch.setattr(progress, "_TICK", 0.02)


def until_shown(capsys: pytest.CaptureFixture[str], times: int) -> str:
    """Wait until a bar has been drawn so often."""
    shown = ""
    for _ in range(6000):
        shown += capsys.readouterr().err
        if shown.count("\r") >= times:
            return shown
        time.sleep(0.01)
    raise AssertionError(f"the bar stands still: {shown!r}")


@pytest.mark.usefixtures("quick")
def test_a_single_long_step_moves_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    for step in Bar([7], desc="fitting", unit="map"):
        assert step == 7
        assert "fitting" in until_shown(capsys, 3)
    assert capsys.readouterr().err.endswith("\n"), "what comes next would stand on the bar's line"


@pytest.mark.usefixtures("quick")
def test_a_wait_shows_a_clock_that_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("loading the model"):
        assert re.search(r"loading the model: \d\d:\d\d", until_shown(capsys, 3))
    assert threading.active_count() == 1 or not [t for t in threading.enumerate() if "loading" in t.name]


def test_short_work_shows_nothing_and_all_steps_come_through(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_QUIET", 60.0)
    assert list(Bar(iter("abc"), desc="x", total=3)) == list("abc")
    with waiting("x"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("quick")
def test_nothing_is_shown_where_nothing_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in Bar([1], desc="x", disable=True):
        time.sleep(0.15)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("quick")
def test_a_bar_that_is_left_behind_stops() -> None:
    bar = Bar(total=3, desc="forgotten")
    time.sleep(0.1)
    del bar
    gc.collect()
    for _ in range(6000):
        if not [thread for thread in threading.enumerate() if "forgotten" in thread.name]:
            return
        time.sleep(0.01)
    raise AssertionError("the clock goes on")


def test_an_error_in_a_step_comes_through_and_ends_the_clock() -> None:
    with pytest.raises(ZeroDivisionError), waiting("dividing"):
        _ = 1 / 0
    assert not [thread for thread in threading.enumerate() if "dividing" in thread.name]
