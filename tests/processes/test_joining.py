"""How processes find each other, and what is said where they do not."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from several import free_port, run_ranks

from matlens.errors import InputError
from matlens.processes import joining
from matlens.processes.joining import joined, started_by_many


@pytest.mark.parametrize(
    ("size", "rank", "expected"),
    [("2", "1", True), ("1", "0", False), ("x", "0", False), (None, None, False)],
)
def test_the_environment_says_whether_there_are_several(
    size: str | None, rank: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", size), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert started_by_many() is expected


def test_others_that_do_not_come_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_MEETING", timedelta(seconds=1))
    variables = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="do not find each other"), joined():
        pass
    with pytest.raises(InputError, match="patience"), joined(patience=0):
        pass


def test_the_leading_process_stays_until_its_last_word_has_been_read(tmp_path: Path) -> None:
    def work() -> Any:
        words: list[str | None] = []
        with suppress(InputError), joined(patience=20.0) as processes:
            if processes.leads:
                raise InputError("There is no such model.")
            processes.leave(None)
            time.sleep(0.5)
            words.append(processes.word_of(0))
        return words

    first, second = run_ranks(2, work, tmp_path / "outcomes", join=False)
    assert (first["result"], second["result"]) == ([], ["There is no such model."])
