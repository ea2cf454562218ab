"""Rows land where they should in any order, a disk without room says so, and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_LAYERS
from damage import harmed, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from matlens import InputError, collect, make_examples
from matlens.data.corpus import Corpus
from matlens.io import rows
from matlens.io.files import sealed
from matlens.io.rows import Column, RowFiles, keep_rows, read_rows

ARRAYS = {"tokens": np.arange(3), "offsets": np.arange(2), "positions": np.zeros(1, dtype=np.int64)}

KINDS = {"h.0": "float32", "attn_out.1": "float32", "token": "int32", "count": "int64"}


def columns_of(whole: dict[str, torch.Tensor]) -> dict[str, Column]:
    return {name: Column(rows.shape[1], KINDS[name]) for name, rows in whole.items()}


@settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# Damage


def read_all(folder: Path) -> Any:
    config, arrays, rows = read_rows(folder, "things", ARRAYS)
    return config, {k: v.tolist() for k, v in arrays.items()}, {k: rows[k].tolist() for k in rows}


def test_no_damage_to_any_file_is_read_as_other_numbers(tmp_path: Path) -> None:
    kept(tmp_path / "out", [])
    whole, asked = read_all(tmp_path / "out"), []
    for path in sorted((tmp_path / "out").iterdir()):
        for harm in harmed(path, 25):
            read, refusal = outcome(lambda: read_all(tmp_path / "out"))
            if refusal is not None:
                named = path.name if path.name != "config.json" else str(tmp_path / "out")
                assert named in refusal, harm
            else:
                assert path.name == "config.json", harm
                assert read == whole, harm  # what JSON says was not touched
            with contextlib.suppress(InputError):
                _, rows = kept(tmp_path / "out", asked)
                assert path.name == "config.json" or {k: rows[k].tolist() for k in rows} == whole[2], harm
        path.unlink()
        path.mkdir()
        with pytest.raises(InputError, match=r"folder, a pipe|no finished"):
            read_all(tmp_path / "out")
        path.rmdir()
        os.mkfifo(path)
        with pytest.raises(InputError, match=r"folder, a pipe|no finished"):
            read_all(tmp_path / "out")
        path.unlink()
        with pytest.raises(InputError, match=re.escape(path.name)):
            read_all(tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
        kept(tmp_path / "out", asked)
    assert asked == [0] * len(asked)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["request"].update(seed=4),
        lambda config: config.update(command="another"),
        lambda config: config["files"]["h.0.npy"].update(bytes=1),
        lambda config: config["request"]["columns"].update({"h.0": [4, "float32"]}),
    ],
)
def test_an_edited_config_is_refused_by_its_name(change: Callable[[Any], None], tmp_path: Path) -> None:
    kept(tmp_path, [])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json does not hold what matlens has written into it"):
        read_rows(tmp_path, "things")


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.pop("files"),
        lambda config: config.update(files=[]),
        lambda config: config["files"].pop("h.0.npy"),
        lambda config: config["files"].update({"h.0.npy": 3}),
        lambda config: config["files"]["h.0.npy"].update(bytes="many"),
        lambda config: config["files"]["h.0.npy"].update(bytes=-1),
        lambda config: config["files"]["h.0.npy"].update(shape=[10**12, 3]),
        lambda config: config["files"]["h.0.npy"].update(dtype="float64"),
        lambda config: config["files"]["h.0.npy"].update(sha256=None),
        lambda config: config["request"].pop("columns"),
        lambda config: config["request"].update(columns={}),
        lambda config: config["request"].update(columns=["h.0"]),
        lambda config: config["request"]["columns"].update({"h.0": [3]}),
        lambda config: config["request"]["columns"].update({"h.0": [10**9, "float32"]}),
        lambda config: config["request"]["columns"].update({"h.0": [3, "object"]}),
        lambda config: config["request"]["columns"].update({"../out/h.0": [3, "float32"]}),
        lambda config: config["request"]["columns"].update({f"h.{n}": [3, "float32"] for n in range(10**5)}),
        lambda config: config.update(request=[]),
        lambda config: config.pop("holds"),
        lambda config: config.update(holds=7),
    ],
)
def test_a_config_that_cannot_be_is_refused_though_its_own_hash_is_right(
    change: Callable[[Any], Any], tmp_path: Path
) -> None:
    kept(tmp_path / "out", [])
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(sealed(config)))
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "out"))):
        read_all(tmp_path / "out")


def header_of(**changes: Any) -> bytes:
    described = {"descr": "<f4", "fortran_order": False, "shape": (7, 3)} | changes
    text = repr(described).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        header_of(shape=(10**15, 3)) + bytes(84),
        header_of(shape=(7, -3)) + bytes(84),
        header_of(shape=7) + bytes(84),
        header_of(descr="|O") + bytes(84),
        header_of(descr="<f8") + bytes(84),
        header_of(descr=">f4") + bytes(84),
        header_of(descr=[("a", "<f4")]) + bytes(84),
        header_of(fortran_order=True) + bytes(84),
        header_of(fortran_order=None) + bytes(84),
        header_of(more=1) + bytes(84),
        b"\x93NUMPY\x02\x00" + (10**8).to_bytes(4, "little") + bytes(300),
        b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 202,
        b"\x93NUMPY\x01\x00\x76\x00" + b"[" * 117 + b"\n" + bytes(84),
        b"\x93NUMPY\x09\x09" + bytes(204),
        b"PK\x03\x04" + bytes(208),
        b"\x80\x04\x95" + bytes(209),
    ],
)
@pytest.mark.parametrize("known", [False, True], ids=["hash of another", "hash of this"])
def test_a_damaged_npy_of_every_kind_is_refused(content: bytes, known: bool, tmp_path: Path) -> None:
    kept(tmp_path / "out", [])
    path, config = tmp_path / "out" / "h.0.npy", tmp_path / "out" / "config.json"
    path.write_bytes(content)
    if known:  # as if whoever damaged it had made up its record too
        changed = json.loads(config.read_text())
        digest = hashlib.sha256(content).hexdigest()
        changed["files"]["h.0.npy"] |= {"sha256": digest, "bytes": len(content)}
        config.write_text(json.dumps(sealed(changed)))
    with pytest.raises(InputError, match=r"h\.0\.npy"):
        read_all(tmp_path / "out")


def test_numbers_that_are_not_finite_are_refused_unless_they_may_be(tmp_path: Path) -> None:
    rows = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])

    def batches(_: int) -> Any:
        yield np.arange(2), {"h.0": rows}

    keep_rows("things", {}, {"h.0": Column(2)}, 2, batches, folder=tmp_path)
    with pytest.raises(InputError, match=r"h\.0\.npy holds a number that is not finite"):
        read_rows(tmp_path, "things")[2]["h.0"]
    assert torch.equal(read_rows(tmp_path, "things", finite=False)[2]["h.0"].nan_to_num(), rows.nan_to_num())


def broken_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("matlens.io.rows._NOTED_EVERY", -1.0)
        with pytest.raises(KeyboardInterrupt):
            kept(folder, [], break_at=2)


def contents_but_command(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_happens_to_unfinished_rows_is_never_taken_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path / "whole", [])
    whole = contents_but_command(tmp_path / "whole")
    broken_off(tmp_path / "begun", monkeypatch)
    names = sorted(path.name for path in (tmp_path / "begun").iterdir())
    assert "progress.jsonl" in names
    refused = 0
    for name in names:
        for harm in harmed(tmp_path / "begun" / name, 20, seed=1):
            shutil.copytree(tmp_path / "begun", tmp_path / "out")
            _, refusal = outcome(lambda: kept(tmp_path / "out", []))
            if refusal is not None:
                refused += 1
                assert str(tmp_path / "out") in refusal, harm
            else:
                assert contents_but_command(tmp_path / "out") == whole, harm
            shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "begun", tmp_path / "out")
        (tmp_path / "out" / name).unlink()
        if name == "unfinished.json":
            with pytest.raises(InputError, match="holds other files"):
                kept(tmp_path / "out", [])
        else:
            kept(tmp_path / "out", [])
            assert contents_but_command(tmp_path / "out") == whole
        shutil.rmtree(tmp_path / "out")
    assert refused > 40


def test_row_files_that_were_exchanged_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_off(tmp_path / "out", monkeypatch)
    other, ours = tmp_path / "other", tmp_path / "out" / "h.0.npy"
    with monkeypatch.context() as patch:
        patch.setitem(ROWS, "h.0", ROWS["h.0"] + 1)
        broken_off(other, monkeypatch)
    (other / "h.0.npy").replace(ours)
    before = ours.read_bytes()
    with pytest.raises(InputError, match=r"h\.0\.npy does not hold the rows that were noted"):
        kept(tmp_path / "out", [])
    assert ours.read_bytes() == before


@pytest.mark.parametrize("planted", ["link", "hard link"])
def test_rows_are_not_written_through_a_link(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(tmp_path / "out", monkeypatch)
    ours, victim = tmp_path / "out" / "h.0.npy", tmp_path / "victim"
    ours.rename(victim)
    ours.symlink_to(victim) if planted == "link" else ours.hardlink_to(victim)
    before = victim.read_bytes()
    with pytest.raises(InputError, match=r"h\.0\.npy|cannot be written"):
        kept(tmp_path / "out", [])
    assert victim.read_bytes() == before
