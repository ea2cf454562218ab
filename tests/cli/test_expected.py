"""What a command says of the time that it will take: operations over a measured speed, where that is long."""

from __future__ import annotations

from typing import Any

import pytest

from matlens.cli import expected


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(31, "31 seconds"), (60, "a minute"), (200, "3 minutes"), (5000, "83 minutes"), (7300, "2 hours")],
)
def test_durations_are_in_words(seconds: float, words: str) -> None:
    assert expected.duration(seconds) == words


def test_the_time_is_operations_over_the_speed_and_short_work_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_model: Any
) -> None:
    model = small_model("gpt2")
    assert expected._operations_per_second(model) > 1e6
    capsys.readouterr()
    monkeypatch.setattr(expected, "_operations_per_second", lambda _: 1e9)
    monkeypatch.setattr(expected, "_SHARE", 0.5)
    expected.print_expected(model, 240 * 0.5e9, "--windows")
    expected.print_expected(model, 20 * 0.5e9)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "This takes about 4 minutes on this machine (--windows).\n"
