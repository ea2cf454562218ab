"""Rows land where they should in any order, a disk without room says so, and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_LAYERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from matlens import InputError, collect, make_examples
from matlens.corpora.corpus import Corpus
from matlens.storage import rows
from matlens.storage.rows import Column, RowFiles, keep_rows, read_rows

ARRAYS = {"tokens": np.arange(3), "offsets": np.arange(2), "positions": np.zeros(1, dtype=np.int64)}

KINDS = {"h.0": "float32", "attn_out.1": "float32", "token": "int32", "count": "int64"}


def columns_of(whole: dict[str, torch.Tensor]) -> dict[str, Column]:
    return {name: Column(rows.shape[1], KINDS[name]) for name, rows in whole.items()}


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), n_rows=st.integers(1, 60), width=st.integers(1, 9))
def test_rows_land_where_they_should(
    data: st.DataObject, n_rows: int, width: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any permutation of the rows, cut into batches anywhere, fills the files with the right rows."""
    folder = tmp_path_factory.mktemp("rows")
    order = np.array(data.draw(st.permutations(range(n_rows))))
    if data.draw(st.booleans()):
        # Mostly runs, as sentences of several tokens make them.
        order = np.concatenate([np.sort(part) for part in np.array_split(order, max(n_rows // 7, 1))])
    cuts = sorted(data.draw(st.sets(st.integers(1, max(n_rows - 1, 1)), max_size=6)))
    generator = torch.Generator().manual_seed(n_rows * 10 + width)
    whole = {name: torch.randn(n_rows, width, generator=generator) for name in ("h.0", "attn_out.1")}
    whole["token"] = torch.randint(-(2**31), 2**31 - 1, (n_rows, 2), dtype=torch.int32, generator=generator)
    whole["count"] = torch.randint(2**60, (n_rows, width), generator=generator)
    with RowFiles(folder, columns_of(whole), n_rows, ARRAYS) as files:
        for index in np.split(order, cuts):
            if len(index):
                files.write(index, {name: rows[torch.from_numpy(index)] for name, rows in whole.items()})
    for name, vectors in whole.items():
        there = np.load(folder / f"{name}.npy")
        assert there.dtype == KINDS[name]
        assert np.array_equal(there, vectors.numpy())
    for name, array in ARRAYS.items():
        assert np.array_equal(np.load(folder / f"{name}.npy"), array)
    assert not (folder / "batches_done").exists()


def test_rows_that_do_not_lie_together_in_memory(tmp_path: Path) -> None:
    """A view with strides is written as the numbers that it shows."""
    wide = torch.arange(48.0).reshape(4, 12)
    with RowFiles(tmp_path, {"h.0": Column(6), "h.1": Column(6)}, 4, ARRAYS) as files:
        files.write(np.arange(4), {"h.0": wide[:, ::2], "h.1": wide[:, :6]})
    assert np.array_equal(np.load(tmp_path / "h.0.npy"), wide.numpy()[:, ::2])
    assert np.array_equal(np.load(tmp_path / "h.1.npy"), wide.numpy()[:, :6])


def test_a_write_that_the_system_cuts_short_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, bytes(data)[:5], offset))
    rows = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    with RowFiles(tmp_path, {"h.0": Column(3)}, 7, ARRAYS) as files:
        files.write(np.array([3, 4, 5, 0, 6, 1, 2]), {"h.0": rows[[3, 4, 5, 0, 6, 1, 2]]})
    assert np.array_equal(np.load(tmp_path / "h.0.npy"), rows.numpy())


def test_room_for_all_rows_is_taken_at_once(tmp_path: Path) -> None:
    files = RowFiles(tmp_path, {"h.0": Column(64), "h.1": Column(64)}, 1000, ARRAYS)
    with files:
        for name in ("h.0", "h.1"):
            status = (tmp_path / f"{name}.npy").stat()
            assert status.st_size == 128 + 1000 * 64 * 4
            assert status.st_blocks * 512 >= 1000 * 64 * 4


def test_files_that_are_there_are_gone_on_with(tmp_path: Path) -> None:
    """Opening them again keeps the rows that were written and the count of the batches."""
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    with contextlib.suppress(KeyboardInterrupt), RowFiles(tmp_path, {"h.0": Column(3)}, 6, ARRAYS) as files:
        files.write(np.array([4, 1]), {"h.0": rows[[4, 1]]})
        files.write(np.array([0]), {"h.0": rows[[0]]})
        raise KeyboardInterrupt
    with RowFiles(tmp_path, {"h.0": Column(3)}, 6, ARRAYS) as files:
        assert files.batches_done == 2
        files.write(np.array([2, 3, 5]), {"h.0": rows[[2, 3, 5]]})
    assert np.array_equal(np.load(tmp_path / "h.0.npy"), rows.numpy())


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let so many files be allocated, and no more."""

    def after(n_files: int) -> None:
        allocate, allocated = os.posix_fallocate, [0]

        def failing(*args: Any) -> None:
            allocated[0] += 1
            if allocated[0] > n_files:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            allocate(*args)

        monkeypatch.setattr(os, "posix_fallocate", failing)

    return after


@pytest.mark.parametrize("n_files", [0, 2])
@pytest.mark.parametrize("existing", [False, True])
def test_no_room_on_the_disk_is_said_and_leaves_nothing(
    existing: bool,
    n_files: int,
    small_model: Callable[[str], Any],
    sentences: Corpus,
    tmp_path: Path,
    full_disk: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, folder = small_model("gpt2"), tmp_path / "some" / "where"
    examples = make_examples(model, sentences)
    if existing:
        folder.mkdir(parents=True)
    monkeypatch.setattr("matlens.activations.collecting._run", lambda *args: pytest.fail("the model was run"))
    full_disk(n_files)
    with pytest.raises(InputError, match=rf"no room on the disk of {folder}"):
        collect(model, examples, folder=folder, progress=False)
    assert folder.exists() == existing
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_no_room_on_the_disk_gives_back_what_was_taken(
    tmp_path: Path, full_disk: Callable[[int], None]
) -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    full_disk(2)
    with pytest.raises(OSError, match="No space left"):
        RowFiles(tmp_path, {f"h.{layer}": Column(8) for layer in range(N_LAYERS + 1)}, 100, ARRAYS)
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, None])
def test_files_are_closed_whatever_happens(error: type[BaseException] | None, tmp_path: Path) -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    try:
        with RowFiles(tmp_path, {"h.0": Column(8), "h.1": Column(8)}, 100, ARRAYS):
            assert len(os.listdir("/proc/self/fd")) > len(before)
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert set(os.listdir("/proc/self/fd")) == before


def test_where_a_disk_fills_up_while_rows_are_written(
    small_model: Callable[[str], Any], sentences: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may promise room that it has not got."""

    def failing(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", failing)
    model = small_model("gpt2")
    with pytest.raises(InputError, match="no room on the disk"):
        collect(model, make_examples(model, sentences), folder=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_has_no_room_for_the_tokens(
    small_model: Callable[[str], Any], sentences: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What numpy.save raises on a full disk, word for word."""

    def failing(*args: Any) -> None:
        raise OSError("100000 requested and 496 written")

    monkeypatch.setattr(np, "save", failing)
    model = small_model("gpt2")
    with pytest.raises(InputError, match="no room on the disk"):
        collect(model, make_examples(model, sentences), folder=tmp_path / "out", progress=False)


def test_systems_without_posix_fallocate_can_collect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with RowFiles(tmp_path, {"h.0": Column(2)}, 5, ARRAYS) as files:
        files.write(np.arange(5), {"h.0": torch.ones(5, 2)})
    assert np.array_equal(np.load(tmp_path / "h.0.npy"), np.ones((5, 2)))


@pytest.mark.parametrize(
    ("index", "runs"),
    [
        ([0], [(0, 1)]),
        ([0, 1, 2], [(0, 3)]),
        ([2, 1, 0], [(0, 1), (1, 2), (2, 3)]),
        ([5, 6, 1, 2, 3, 9], [(0, 2), (2, 5), (5, 6)]),
    ],
)
def test_neighbours_are_written_at_once(index: list[int], runs: list[tuple[int, int]]) -> None:
    starts, ends = rows._runs(np.array(index))
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == runs


# Rows in memory or in a folder


ROWS = {
    "h.0": torch.randn(7, 3, generator=torch.Generator().manual_seed(0)),
    "token": torch.arange(14, dtype=torch.int32).view(7, 2) + 2**24,  # float32 has no odd number from here on
    "count": torch.arange(7)[:, None] + 2**53,
}
ORDER = [np.array([3, 4, 5]), np.array([0, 6]), np.array([2, 1])]


def kept(folder: Path | None, asked: list[int], break_at: int | None = None, **request: Any) -> Any:
    def batches(skip: int) -> Any:
        asked.append(skip)
        for number, index in enumerate(ORDER[skip:], start=skip):
            if number == break_at:
                raise KeyboardInterrupt
            yield index, {name: rows[torch.from_numpy(index)] for name, rows in ROWS.items()}

    return keep_rows(
        "things", {"seed": 3, **request}, columns_of(ROWS), 7, batches, folder=folder, arrays=ARRAYS
    )


def test_rows_in_memory_and_in_a_folder_are_one(tmp_path: Path) -> None:
    asked: list[int] = []
    memory, folder = kept(None, asked), kept(tmp_path / "out", asked)
    assert memory[0]["request"]["columns"]["token"] == [2, "int32"]
    assert json.loads(json.dumps(memory[0])).items() <= folder[0].items()
    assert "files" not in memory[0]
    config, arrays, rows = read_rows(tmp_path / "out", "things", ARRAYS)
    assert config == folder[0]
    assert {name: array.tolist() for name, array in arrays.items()} == {
        name: array.tolist() for name, array in ARRAYS.items()
    }
    for found in (memory[1], folder[1], rows):
        for name, values in ROWS.items():
            assert found[name].dtype == values.dtype
            assert torch.equal(found[name], values)
    again = kept(tmp_path / "out", asked)
    assert again[0] == config
    assert asked == [0, 0]


def test_rows_that_were_broken_off_go_on_with_the_batch_that_is_missing(tmp_path: Path) -> None:
    asked: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        kept(tmp_path / "out", asked, break_at=2)
    with pytest.raises(InputError, match="broken off"):
        read_rows(tmp_path / "out", "things")
    with pytest.raises(InputError, match=r"belongs to another job .seed: 3 there, 4 now"):
        kept(tmp_path / "out", asked, seed=4)
    _, rows = kept(tmp_path / "out", asked)
    assert asked == [0, 2]
    for name, values in ROWS.items():
        assert torch.equal(rows[name], values)


@pytest.mark.parametrize(
    "wrong", [np.zeros((7, 2)), np.zeros((7, 3), dtype=np.int32), np.zeros((7, 4), dtype=np.float32)]
)
def test_a_file_of_another_kind_is_damage(wrong: np.ndarray, tmp_path: Path) -> None:
    kept(tmp_path / "out", [])
    np.save(tmp_path / "out" / "h.0.npy", wrong)
    with pytest.raises(InputError, match=r"h\.0\.npy (holds|has) .* were written: .*damaged"):
        read_rows(tmp_path / "out", "things")
