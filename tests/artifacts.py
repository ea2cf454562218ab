"""One contract for everything that is stored in folders: `check_artifact(make, read, ...)`."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from damage import HARMS

from matlens import InputError
from matlens.io.artifact import is_finished
from matlens.io.verification import verify

Make = Callable[[Path, int], Any]
Read = Callable[[Path], Any]


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(write: int, *, before: bool) -> Iterator[list[int]]:
    """Die before or after a file is put in its place, the first of which is number 0."""
    replace, count = Path.replace, [0]

    def counting(self: Path, target: Any) -> Path:
        number, count[0] = count[0], count[0] + 1
        if before and number == write:
            raise Killed
        replaced = replace(self, target)
        if not before and number == write:
            raise Killed
        return replaced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", counting)
        yield count


def contents(folder: Path) -> dict[str, Any]:
    """The bytes of all files; of records, what does not say by which call they were made."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        found[name] = path.read_bytes()
        if path.name == "config.json":
            record = json.loads(found[name])
            found[name] = {key: record.get(key) for key in ("holds", "request", "finished", "files")}
    return found


def numbers(value: Any) -> list[Any]:
    """All numbers in a result, in an order of their own."""
    if isinstance(value, torch.Tensor):
        return [value.double().numpy()]
    if isinstance(value, np.ndarray | int | float):
        return [np.asarray(value, dtype=float)]
    if isinstance(value, pd.DataFrame):
        return [value.select_dtypes("number").to_numpy(dtype=float)]
    if isinstance(value, Mapping):
        return [number for key in sorted(value, key=str) for number in numbers(value[key])]
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers(item)]
    if is_dataclass(value):
        return [number for field in fields(value) for number in numbers(getattr(value, field.name))]
    return []


def assert_same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    ours, theirs = numbers(ours), numbers(theirs)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def refused(call: Callable[[], Any]) -> Any:
    """The result, or the InputError that was raised; anything else fails the test."""
    try:
        return call()
    except InputError as error:
        return error


def check_artifact(make: Make, read: Read, root: Path, *, kills: int = 12, harms: int = 60) -> None:
    """Everything that holds of a folder of results, whatever it holds.

    ``make(folder, 0)`` writes it, ``make(folder, 1)`` is another job; ``read`` gives its numbers.
    """
    whole = root / "whole"
    with killed_at(-1, before=True) as count:
        make(whole, 0)
    expected, files = read(whole), contents(whole)
    assert not list(whole.rglob("*.partial"))
    assert not list(whole.rglob(".lock"))
    assert [verdict.damage for verdict in verify(whole)] == [None]

    # Once more: nothing is written, and the same comes back.
    make(whole, 0)
    assert_same(read(whole), expected)
    assert contents(whole) == files

    # Another job is refused, and leaves the folder as it is.
    assert isinstance(refused(lambda: make(whole, 1)), InputError)
    assert contents(whole) == files

    # A killed run is unfinished for whoever reads it, refuses another job, and resumes to the same bytes.
    rng, n_writes = random.Random(0), count[0]
    points = [(write, before) for write in range(n_writes) for before in (True, False)]
    for write, before in [points[0], points[1], points[-2], *rng.sample(points, min(kills, len(points)))]:
        folder = root / f"killed-{write}-{before}"
        with suppress(Killed), killed_at(write, before=before):
            make(folder, 0)
        if not is_finished(folder):
            assert isinstance(refused(partial(read, folder)), InputError)
            if (folder / "config.json").is_file():
                assert isinstance(refused(partial(make, folder, 1)), InputError)
                _harm_unfinished(folder, make, read, expected, rng)
        make(folder, 0)
        assert contents(folder) == files
        shutil.rmtree(folder)

    # No damage to any byte is read as other numbers.
    for path in sorted(path for path in whole.rglob("*") if path.is_file()):
        for _ in range(max(harms // len(files), 3)):
            content = path.read_bytes()
            name, harm = rng.choice(list(HARMS.items()))
            harmed = harm(content, rng)
            if harmed != content:
                path.write_bytes(harmed)
                found = refused(lambda: read(whole))
                if not isinstance(found, InputError):
                    assert_same(found, expected)
                damage = [verdict.damage for verdict in refused(lambda: list(verify(whole)))]
                assert any(damage) or path.name == "config.json", f"{name} of {path.name} is not found"
                path.write_bytes(content)
        content = path.read_bytes()
        path.unlink()
        assert isinstance(refused(lambda: read(whole)), InputError)
        path.write_bytes(content)

    # A file of another job under the same name is refused.
    other = root / "other"
    make(other, 1)
    for name in sorted({*contents(other)} & {*files}):
        content = (whole / name).read_bytes()
        if (other / name).read_bytes() != content and name != "config.json":
            (whole / name).write_bytes((other / name).read_bytes())
            assert any(verdict.damage for verdict in verify(whole)), f"an exchanged {name} is not found"
            (whole / name).write_bytes(content)
    assert_same(read(whole), expected)

    # Two at once: one works, the other waits for it.
    both = root / "both"
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=make, args=(both, 0)) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    assert [job.exitcode for job in jobs] == [0, 0]
    assert contents(both) == files


def _harm_unfinished(folder: Path, make: Make, read: Read, expected: Any, rng: random.Random) -> None:
    """Damage or remove a file of an unfinished folder: resuming refuses it, or does not use it."""
    copy = folder.with_name("harmed")
    shutil.copytree(folder, copy)
    path = rng.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
    if rng.random() < 0.3:
        path.unlink()
    else:
        path.write_bytes(rng.choice(list(HARMS.values()))(path.read_bytes(), rng))
    if not isinstance(refused(lambda: make(copy, 0)), InputError):
        assert_same(read(copy), expected)
    shutil.rmtree(copy)
