"""Folders and files: whole or not at all, gone on with by the same job, never touched by another."""

import errno
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trees import tree

from matlens.errors import InputError
from matlens.io.files import write_text
from matlens.io.folders import LAYOUT, Workplace, read_config

JOB = {"pairs": [("a", "b")], "seed": 0}
OTHER = JOB | {"seed": 1}


def interrupted(folder: Path, job: dict[str, Any] = JOB) -> None:
    """A job that was killed after its first file."""

    def work() -> None:
        with Workplace(folder, "things", job).working():
            (folder / "first").write_text("done")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()


def complete(folder: Path, job: dict[str, Any] = JOB) -> None:
    place = Workplace(folder, "things", job)
    with place.working():
        (folder / "first").write_text("done")
        place.finish()


# The life of a folder


def test_a_new_folder_is_made_with_its_parents_and_finished(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    place = Workplace(folder, "things", JOB)
    assert not place.finished
    assert not folder.exists()
    with place.working():
        assert not place.finished
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "unfinished.json"]
        assert json.loads((folder / "unfinished.json").read_text())["request"] == place.request
        place.finish()
    assert place.finished
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    config = read_config(folder, "things")
    assert config.pop("software")["numpy"] == np.__version__
    assert config.pop("command").startswith(Path(sys.argv[0]).name)
    assert len(config.pop("digest")) == 64
    request = {"pairs": [["a", "b"]], "seed": 0}
    assert config == {"layout": LAYOUT, "holds": "things", "request": request, "files": {}}


def test_an_interrupted_job_goes_on_where_it_was(tmp_path: Path) -> None:
    interrupted(tmp_path / "x")
    place = Workplace(tmp_path / "x", "things", JOB)
    assert not place.finished
    with pytest.raises(InputError, match=r"broken off.* the same command again"):
        read_config(tmp_path / "x", "things")
    with place.working():
        assert (tmp_path / "x" / "first").read_text() == "done"
        place.finish()
    assert sorted(tree(tmp_path / "x")) == ["config.json", "first"]


def test_a_finished_job_is_left_as_it_is(tmp_path: Path) -> None:
    complete(tmp_path / "x")
    before = tree(tmp_path / "x")
    place = Workplace(tmp_path / "x", "things", JOB)
    with place.working():
        assert place.finished
    assert tree(tmp_path / "x") == before


@pytest.mark.parametrize("begun", [interrupted, complete])
@pytest.mark.parametrize(
    ("job", "told"),
    [
        (OTHER, "seed: 0 there, 1 now"),
        (JOB | {"new": 2}, "new: None there, 2 now"),
        (JOB | {"pairs": []}, "pairs"),
        (JOB | {"provenance": {"n": 3}}, r"\(n: None there, 3 now"),
    ],
)
def test_the_folder_of_another_job_is_refused_and_not_touched(
    begun: Callable[[Path], None], job: dict[str, Any], told: str, tmp_path: Path
) -> None:
    begun(tmp_path / "x")
    before = tree(tmp_path / "x")
    with (
        pytest.raises(InputError, match=f"belongs to another job .*{told}"),
        Workplace(tmp_path / "x", "things", job).working(),
    ):
        pytest.fail("the body must not run")
    assert tree(tmp_path / "x") == before


def test_a_name_does_not_make_another_job_where_the_fingerprint_is_the_same(tmp_path: Path) -> None:
    def job(name: str, fingerprint: str | None) -> dict[str, Any]:
        return {"model": {"base_model_name_or_path": name, "fingerprint": fingerprint}}

    complete(tmp_path / "done", job("a.gguf", "12"))
    content = tree(tmp_path / "done")
    with Workplace(tmp_path / "done", "things", job("b.gguf", "12")).working():
        pass
    assert tree(tmp_path / "done") == content
    with pytest.raises(InputError, match="belongs to another job"):
        complete(tmp_path / "done", job("a.gguf", "13"))


def test_the_folder_of_something_else_is_refused_and_not_touched(tmp_path: Path) -> None:
    complete(tmp_path / "x")
    before = tree(tmp_path / "x")
    with (
        pytest.raises(InputError, match=r"belongs to another job .holds: things there, maps now"),
        Workplace(tmp_path / "x", "maps", JOB).working(),
    ):
        pytest.fail("the body must not run")
    assert tree(tmp_path / "x") == before


@pytest.mark.parametrize("begun", [interrupted, complete])
@pytest.mark.parametrize("layout", [None, LAYOUT - 1, LAYOUT + 1])
def test_the_folder_of_another_layout_is_refused_in_a_word_and_not_touched(
    layout: int | None, begun: Callable[[Path], None], tmp_path: Path
) -> None:
    begun(tmp_path)
    marker = next(path for path in tmp_path.iterdir() if path.suffix == ".json")
    record = json.loads(marker.read_text())
    del record["layout"]
    marker.write_text(json.dumps(record if layout is None else record | {"layout": layout}))
    before = tree(tmp_path)
    with (
        pytest.raises(InputError, match=r"in another layout\. Remove it"),
        Workplace(tmp_path, "things", JOB).working(),
    ):
        pytest.fail("the body must not run")
    if begun is complete:
        with pytest.raises(InputError, match=r"in another layout\. Remove it"):
            read_config(tmp_path, "things")
    assert tree(tmp_path) == before


def test_a_folder_with_other_files_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="holds other files"), Workplace(tmp_path, "things", JOB).working():
        pytest.fail("the body must not run")
    assert tree(tmp_path) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize("content", ["{}", "[]", "not JSON", '{"architectures": ["GPT2LMHeadModel"]}'])
def test_a_folder_with_a_config_of_something_else_is_refused_and_not_touched(
    content: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    with (
        pytest.raises(InputError, match=re.escape(str(tmp_path))),
        Workplace(tmp_path, "things", JOB).working(),
    ):
        pytest.fail("the body must not run")
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        read_config(tmp_path, "things")
    assert tree(tmp_path) == {"config.json": content.encode()}


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    complete(tmp_path)
    assert sorted(tree(tmp_path)) == ["config.json", "first"]


def test_a_job_killed_before_its_first_file_was_whole_can_begin_again(tmp_path: Path) -> None:
    (tmp_path / ".unfinished.json.0123456789abcdef.partial").write_text('{"requ')
    (tmp_path / ".lock").write_text("")
    complete(tmp_path)
    assert sorted(tree(tmp_path)) == ["config.json", "first"]


def test_a_job_killed_at_its_very_end_is_finished_by_the_next_call(tmp_path: Path) -> None:
    interrupted(tmp_path / "x")
    marker = (tmp_path / "x" / "unfinished.json").read_bytes()
    complete(tmp_path / "x")
    (tmp_path / "x" / "unfinished.json").write_bytes(marker)
    place = Workplace(tmp_path / "x", "things", JOB)
    with place.working():
        if not place.finished:
            place.finish()
    assert read_config(tmp_path / "x", "things")["request"] == place.request


# Failure


@pytest.mark.parametrize("error", [InputError("bad"), RuntimeError("defect"), OSError(errno.EIO, "broken")])
@pytest.mark.parametrize("there_before", [False, True])
def test_a_job_that_fails_leaves_nothing(there_before: bool, error: Exception, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    if there_before:
        folder.mkdir()

    def work() -> None:
        with Workplace(folder, "things", JOB).working():
            (folder / "first").write_text("done")
            (folder / "inner").mkdir()
            (folder / "inner" / "second").write_text("done")
            raise error

    with pytest.raises(type(error)):
        work()
    assert folder.exists() == there_before
    assert tree(tmp_path) == {}
    assert not there_before or not any(folder.iterdir())


def test_folders_made_for_a_job_that_fails_go_and_those_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()

    def work(beside: Path | None) -> None:
        with Workplace(tmp_path / "mine" / "a" / "b", "things", JOB).working():
            if beside is not None:
                beside.write_text("someone else's")
            raise InputError("bad")

    for beside, left in ((None, ["mine"]), (tmp_path / "mine" / "a" / "c", ["mine", "mine/a", "mine/a/c"])):
        with pytest.raises(InputError, match="bad"):
            work(beside)
        assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == left


def test_what_an_earlier_call_has_done_outlives_the_failure_of_a_later_one(tmp_path: Path) -> None:
    interrupted(tmp_path / "x")

    def go_on() -> None:
        with Workplace(tmp_path / "x", "things", JOB).working():
            raise InputError("bad")

    with pytest.raises(InputError, match="bad"):
        go_on()
    assert tree(tmp_path / "x")["first"] == b"done"
    complete(tmp_path / "x")
    assert sorted(tree(tmp_path / "x")) == ["config.json", "first"]


def test_a_finished_folder_survives_what_fails_in_it_later(tmp_path: Path) -> None:
    complete(tmp_path / "x")
    before = tree(tmp_path / "x")

    def read() -> None:
        with Workplace(tmp_path / "x", "things", JOB).working():
            raise InputError("bad")

    with pytest.raises(InputError, match="bad"):
        read()
    assert tree(tmp_path / "x") == before


def unwritable(tmp_path: Path) -> list[Path]:
    (tmp_path / "file").write_text("")
    return [
        tmp_path / "file" / "x",
        tmp_path / "file" / "x" / "y",
        tmp_path / "file",
        tmp_path / ("x" * 300),
        Path("/proc/matlens/x"),
    ]


@pytest.mark.parametrize(
    "which", range(5), ids=["below file", "deep below file", "a file", "too long", "proc"]
)
def test_a_place_that_cannot_be_written_is_the_users_error(which: int, tmp_path: Path) -> None:
    folder = unwritable(tmp_path)[which]
    with pytest.raises(InputError, match="cannot be written"), Workplace(folder, "things", JOB).working():
        pytest.fail("the body must not run")
    assert tree(tmp_path) == {"file": b""}


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("there_before", [False, True])
@pytest.mark.parametrize("at", ["start", "middle", "end"])
def test_a_full_disk_is_the_users_error_and_leaves_nothing(
    at: str, there_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"
    if there_before:
        folder.mkdir()

    def work() -> None:
        place = Workplace(folder, "things", JOB)
        if at == "start":
            monkeypatch.setattr(os, "fsync", full_disk)
        with place.working():
            write_text(folder / "first", "done")
            if at == "middle":
                monkeypatch.setattr(os, "fsync", full_disk)
            write_text(folder / "second", "done")
            monkeypatch.setattr(os, "fsync", full_disk)
            place.finish()

    with pytest.raises(InputError, match=re.escape(f"no room on the disk of {folder}")):
        work()
    assert tree(tmp_path) == {}
    assert folder.exists() == there_before


# What a folder says of itself


def test_what_is_not_a_finished_folder_of_the_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no finished things"):
        read_config(tmp_path / "nowhere", "things")
    with pytest.raises(InputError, match="holds no finished things"):
        read_config(tmp_path, "things")
    complete(tmp_path / "x")
    with pytest.raises(InputError, match="Expected a folder that holds maps"):
        read_config(tmp_path / "x", "maps")
    assert read_config(str(tmp_path / "x"), "things")["request"]["seed"] == 0


# Two processes


def test_a_folder_whose_markers_come_and_go_is_not_taken_for_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process begins, works and finishes between any two looks at the folder."""
    looks, is_file = [0], Path.is_file

    def at_work(self: Path) -> bool:
        looks[0] += 1
        answer = is_file(self)
        if looks[0] == 1:
            monkeypatch.setattr(Path, "is_file", is_file)
            interrupted(tmp_path / "x")
            monkeypatch.setattr(Path, "is_file", at_work)
        return answer

    monkeypatch.setattr(Path, "is_file", at_work)
    complete(tmp_path / "x")
    assert looks[0] > 1
    assert sorted(tree(tmp_path / "x")) == ["config.json", "first"]


def test_the_folder_of_another_job_at_work_is_refused_without_waiting(tmp_path: Path) -> None:
    with Workplace(tmp_path / "x", "things", JOB).working():

        def other() -> None:
            with pytest.raises(InputError, match="belongs to another job"), working_on_another:
                pytest.fail("the body must not run")

        working_on_another = Workplace(tmp_path / "x", "things", OTHER).working()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()


def test_a_finished_folder_that_cannot_be_written_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(tmp_path)
    (tmp_path / ".lock").write_text("left by a kill")

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr("matlens.io.folders.read_json", lambda path: json.loads(path.read_text()))
    place = Workplace(tmp_path, "things", JOB)
    with place.working():
        assert place.finished
