"""A job that memory or disk have no room for is refused before it begins, and one that is done never."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import matlens.study.plan as module
from matlens import InputError, make_examples, parallel
from matlens.data.corpus import Corpus
from matlens.linear import StoredLeastSquares, stream_least_squares
from matlens.study import Study, fit_maps
from matlens.study.plan import check_merge, free_memory, written_bytes


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says how many bytes are free, in memory and on disk."""

    def say(*, memory: int = 1 << 50, disk: int = 1 << 50) -> None:
        monkeypatch.setattr(module, "free_memory", lambda: memory)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=disk))

    return say


@pytest.fixture
def study(small_model: Callable[[str], Any], sentences: Corpus, tmp_path: Path) -> Callable[..., Study]:
    """A study of a small model at all positions, in the same folder each time."""

    def make(**options: Any) -> Study:
        asked: dict[str, Any] = {"positions": "all", "keep_rows": False, "main_folder": tmp_path, **options}
        return Study(
            load_model=lambda: small_model("gpt2"), load_corpus=lambda: sentences, out=tmp_path, n_train=20,
            n_validation=4, **asked,
        )  # fmt: skip

    return make


def test_jobs_that_have_no_room_are_refused_before_they_begin(
    study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2000))
        with pytest.raises(InputError, match=r"takes 1.* kB of disk at .*train, and 2 kB are free.*--out"):
            _ = study(positions="sampled", keep_rows=True).stream
        with pytest.raises(InputError, match="--positions sampled"):
            _ = study(keep_rows=True).stream
    assert not list(tmp_path.iterdir())
    _ = study(positions="sampled", keep_rows=True).stream
    monkeypatch.setattr(module, "free_memory", lambda: 30_000)
    with pytest.raises(InputError, match=r"Fitting 6 maps of 32 .* 30 kB are free\..*--pairs last.*--train"):
        fit_maps(tmp_path, progress=False)
    assert not list(tmp_path.glob("maps/*.safetensors"))
    monkeypatch.setattr(module, "free_memory", lambda: None)
    fit_maps(tmp_path, progress=False)


def test_moments_that_have_no_room_are_refused_before_they_begin(
    study: Callable[..., Study], free: Callable[..., None], tmp_path: Path
) -> None:
    free(memory=30_000)
    said = r"Keeping moments for 6 maps of 32 dimensions takes .* of memory, and 30 kB are free\."
    with pytest.raises(InputError, match=said + r".*--pairs last.*machine with more memory"):
        _ = study().maps
    with pytest.raises(InputError, match=r"for 3 maps of 32 dimensions takes .* of memory"):
        study(pairs="last").part_moments(1, 2)
    free(disk=30_000)
    with pytest.raises(InputError, match=r"takes .* of disk at .*moments, and 30 kB .*--pairs last"):
        _ = study().maps
    with pytest.raises(InputError, match=r"for 3 maps .* of disk at .*--pairs last.*--out"):
        study(pairs="last").part_moments(2, 2)
    assert not list(tmp_path.iterdir())
    free()
    maps = study().maps
    free(memory=0, disk=0)  # what is done answers at once
    assert study().maps.keys() == maps.keys()
    shutil.rmtree(tmp_path / "maps")
    with pytest.raises(InputError, match=r"Fitting 6 maps of 32 dimensions takes .*machine with more memory"):
        fit_maps(tmp_path, progress=False)


def test_a_job_has_as_much_room_as_its_files_and_a_state_of_before_take(
    study: Callable[..., Study], free: Callable[..., None], tmp_path: Path
) -> None:
    made = study().part_moments(1, 1)
    pairs = [(source, target) for source, targets in made.targets.items() for target in targets]
    planned = written_bytes(made.n_samples, pairs, made.widths)
    tensors = [part for source in made.targets for part in made[source].tensors().values()]
    assert planned == sum(8 * part.numel() for part in tensors)
    (tmp_path / "config.json").unlink()
    held = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    free(disk=2 * planned - held - 1)
    with pytest.raises(InputError, match="of disk"):
        study().part_moments(1, 1)
    free(disk=2 * planned - held)
    module.check_moments(made.n_samples, pairs, made.widths, tmp_path)


def test_shards_that_cannot_be_joined_for_want_of_room(
    small_model: Callable[[str], Any], sentences: Corpus, free: Callable[..., None], tmp_path: Path
) -> None:
    model = small_model("gpt2")
    examples = make_examples(model, sentences).head(20)
    folders = [tmp_path / "s1", tmp_path / "s2"]
    for number, folder in enumerate(folders, 1):
        stream_least_squares(model, examples, folder, part=(number, 2), progress=False)
    shards = StoredLeastSquares(*folders)
    for few, missing in ({"memory": 9000}, "of memory"), ({"disk": 9000}, "of disk at .*joined"):
        free(**few)
        with pytest.raises(InputError, match=f"Merging 2 parts of moments of 32 dimensions .* {missing}"):
            check_merge(shards, tmp_path / "joined")
    free()
    check_merge(shards, tmp_path / "joined")
    shards.merge(tmp_path / "joined")
    free(memory=0, disk=0)
    check_merge(shards, tmp_path / "joined")


def test_each_process_of_a_machine_needs_room_and_one_of_them_asks(
    free: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, widths = [("h.0", "h.2"), ("h.1", "h.2")], dict.fromkeys(("h.0", "h.1", "h.2"), 32)

    def asked(rank: int, local_rank: int) -> None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr(parallel, "rank", lambda: rank)
        monkeypatch.setattr(parallel, "world_size", lambda: 8)
        module.check_moments(10**6, pairs, widths, tmp_path)

    seen: list[tuple[int, str]] = []
    monkeypatch.setattr(module, "check_memory", lambda needed, what, _: seen.append((needed, what)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank, local_rank in ((0, 0), (1, 1), (4, 0), (7, 3)):
        asked(rank, local_rank)
    monkeypatch.undo()
    monkeypatch.setattr(module, "check_memory", lambda needed, what, _: seen.append((needed, what)))
    module.check_moments(10**6, pairs, widths, tmp_path)
    assert [needed for needed, _ in seen] == [4 * seen[2][0], 4 * seen[2][0], seen[2][0]]
    assert ["in 4 processes" in what for _, what in seen] == [True, True, False]


def test_free_memory_is_what_the_limits_of_containers_and_jobs_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least that any group leaves; files, which go when memory is needed, do not count as taken."""
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < (free_memory() or 0) < total
    job = tmp_path / "groups" / "jobs" / "job_7"
    job.mkdir(parents=True)
    (tmp_path / "own").write_text("4:memory:/other\n0::/jobs/job_7\n")
    monkeypatch.setattr(module, "_CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(module, "_OWN_GROUP", tmp_path / "own")
    files = "anon 3\ninactive_file 2000000\nactive_file 1000000\n"
    for folder, limit in ((job, 9_000_000), (job.parent, 5_000_000)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("4000000\n")
        (folder / "memory.stat").write_text(files)
        assert free_memory() == limit - 1_000_000
    (job.parent / "memory.max").write_text("max\n")
    assert free_memory() == 8_000_000
    (job / "memory.current").write_text("99000000\n")
    assert free_memory() == 0
    (tmp_path / "own").write_text("0::/what/the/host/calls/it\n")  # a container sees its own as the top
    for name, text in (("max", "4500000"), ("current", "4000000"), ("stat", files)):
        (tmp_path / "groups" / f"memory.{name}").write_text(text)
    assert free_memory() == 3_500_000
