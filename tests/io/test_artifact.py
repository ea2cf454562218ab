"""Every kind of folder that matlens writes keeps one contract, and folders of others are left alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts import Make, Read, assert_same, check_artifact, contents
from conftest import make_sentences, tree
from several import run_ranks

import matlens
from matlens import InputError, ffn, verify
from matlens.activations import Activations
from matlens.data import make_windows
from matlens.explorer import value_pages, write_value_pages
from matlens.io import Artifact
from matlens.io.artifact import LAYOUT
from matlens.io.files import checksummed
from matlens.io.rows import read_rows
from matlens.linear import StoredLeastSquares, fitting, stream_least_squares, streaming
from matlens.linearity import linearity_atlas
from matlens.patching import variants

QUIET: dict[str, Any] = {"progress": False}
FINISHED = {"layout": LAYOUT, "holds": "maps", "request": {"a": 1}, "finished": True, "files": {}}
KINDS = ("activations", "trace", "moments", "maps", "clusters", "lens", "variants", "atlas", "pages")


@pytest.fixture(scope="module")
def kind_of(small_model):
    """How an artifact of a kind is made and read; the other job has other sentences or another seed."""
    model = small_model("gpt2")
    values = ffn.ValueVectors(model)
    samples = [matlens.make_examples(model, make_sentences(), seed=seed).head(20) for seed in (0, 1)]
    vectors = [matlens.collect(model, examples, positions="all", **QUIET) for examples in samples]
    maps = [matlens.MapSet.fit(of, pairs="all", **QUIET) for of in vectors]
    lenses = [matlens.Lens.fit(model, of, method="mat", **QUIET) for of in vectors]
    texts = [make_windows(model, make_sentences(), size=12, max_windows=n, targets=True) for n in (6, 3)]
    runs = [variants.Variant(0, matlens.jump(of, 0, 2)) for of in maps]

    def read_trace(folder: Path) -> Any:
        trace = ffn.Trace.load(folder)
        return [trace.before, trace.rank, trace.index, trace.coefficient, trace.score, trace.norm]

    def read_moments(folder: Path) -> Any:
        stored = StoredLeastSquares(folder)
        return {source: stored[source].tensors() for source in stored.targets}

    def read_lens(folder: Path) -> Any:
        lens = matlens.Lens.load(folder)
        return {layer: held.parts for layer, held in lens.maps.items()}

    def read_atlas(folder: Path) -> Any:
        artifact = Artifact.open(folder, "atlas of linearity")
        return [artifact.read_json(name.removesuffix(".json"))["rows"] for name in artifact.files]

    def read_pages(folder: Path) -> Any:
        artifact = Artifact.open(folder, value_pages.HOLDS)
        artifact.check()
        return len(artifact.files)

    kinds: dict[str, tuple[Make, Read]] = {
        "activations": (
            lambda folder, job: matlens.collect(
                model, samples[job], folder=folder, batch_tokens=40, positions="all", **QUIET
            ),
            lambda folder: [dict(Activations.load(folder)), Activations.load(folder).examples.arrays],
        ),
        "trace": (
            lambda folder, job: ffn.Trace.run(
                model, samples[job], k=3, folder=folder, batch_tokens=40, **QUIET
            ),
            read_trace,
        ),
        "moments": (
            lambda folder, job: stream_least_squares(
                model, samples[job], folder, pairs="all", batch_tokens=40, **QUIET
            ),
            read_moments,
        ),
        "maps": (
            lambda folder, job: maps[job].save(folder),
            lambda folder: _parts(matlens.MapSet.load(folder)),
        ),
        "clusters": (
            lambda folder, job: ffn.Clusters.fit(values, 5 + job, folder=folder, **QUIET),
            lambda folder: ffn.Clusters.load(folder).labels,
        ),
        "lens": (lambda folder, job: lenses[job].save(folder), read_lens),
        "variants": (
            lambda folder, job: variants.run_variants(
                model, samples[job], {"jump": runs[job]}, folder=folder, batch_tokens=40, **QUIET
            ),
            lambda folder: dict(read_rows(folder, "variants")[2]),
        ),
        "atlas": (
            lambda folder, job: linearity_atlas(
                model, *texts, folder=folder, jumps=[2 + job], every=2, **QUIET
            ),
            read_atlas,
        ),
        "pages": (
            lambda folder, job: write_value_pages(
                model, folder, corpus=make_sentences(), neighbors=2 + job, **QUIET
            ),
            read_pages,
        ),
    }  # fmt: skip
    return kinds.__getitem__


def _parts(maps: matlens.MapSet) -> Any:
    return {pair: [linear.weight, linear.bias] for pair, linear in maps.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_artifacts_keep_the_contract(kind, kind_of, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_STATE_EVERY", 0.0)  # a state after every batch
    monkeypatch.setattr(streaming, "_SHARE_OF_WRITING", 0)
    monkeypatch.setattr("matlens.linearity.atlas.time.process_time", lambda: 0.0)
    if kind == "moments":  # where chunks fall depends on where a run resumes
        monkeypatch.setattr(streaming, "chunk_size", lambda _: 1)
    make, read = kind_of(kind)
    is_own = kind in ("activations", "moments")  # all others write by the same code
    check_artifact(make, read, tmp_path, kills=8 if is_own else 1, harms=80 if is_own else 15)


@pytest.mark.parametrize(
    ("kind", "n"), [("activations", 3), ("trace", 2), ("moments", 3), ("maps", 2), ("clusters", 2)]
)
def test_several_processes_write_what_one_writes(kind, n, kind_of, tmp_path):
    make, read = kind_of(kind)
    make(tmp_path / "one", 0)
    outcomes = run_ranks(n, lambda: make(tmp_path / "several", 0) and None, tmp_path / "ranks")
    assert [outcome.get("error") for outcome in outcomes] == [None] * n
    if kind == "moments":  # merged in another order: maps are the same, factors need not be
        one, several = (StoredLeastSquares(tmp_path / name) for name in ("one", "several"))
        for source in one.targets:
            ours, theirs = (stored[source].solve(intercept=True) for stored in (one, several))
            for target, linear in ours.items():
                torch.testing.assert_close(linear.weight, theirs[target].weight)
    else:
        assert_same(read(tmp_path / "several"), read(tmp_path / "one"))
        assert contents(tmp_path / "several") == contents(tmp_path / "one")


def test_a_collection_larger_than_memory_is_fitted_shard_by_shard(kind_of, tmp_path, monkeypatch):
    """The maps are those of vectors in memory, of all rows and of some, weighted."""
    make, _ = kind_of("activations")
    make(tmp_path / "a", 0)
    stored = Activations.load(tmp_path / "a")
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(stored.n_rows, generator=generator) > 0.2
    weights = torch.rand(stored.n_rows, generator=generator)
    for options in ({}, {"rows": rows}, {"rows": rows, "weights": weights, "intercept": True, "ridge": 0.1}):
        monkeypatch.setattr(fitting, "CONVERTED_BYTES", 1 << 40)
        in_memory = matlens.MapSet.fit(stored, pairs="all", **QUIET, **options)
        monkeypatch.setattr(fitting, "CONVERTED_BYTES", 0)
        by_shard = matlens.MapSet.fit(stored, pairs="all", **QUIET, **options)
        assert by_shard.provenance == in_memory.provenance
        assert_same(_parts(by_shard), _parts(in_memory), tolerance=1e-5)


# Folders that are not this job's


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"model_type": "gpt2"}), "{", "",
        json.dumps({"layout": LAYOUT, "holds": "maps", "request": {}, "digest": "0"}),
        json.dumps(checksummed({**FINISHED, "layout": LAYOUT - 1})),
    ],
)  # fmt: skip
def test_folders_of_others_are_refused_and_not_touched(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    before = tree(tmp_path)
    with pytest.raises(InputError), Artifact.writing(tmp_path, "maps", {"a": 1}):
        pass
    with pytest.raises(InputError):
        Artifact.open(tmp_path, "maps")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_a_full_disk_is_the_users_error_and_leaves_nothing(call, tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work() -> None:
        with Artifact.writing(tmp_path / "a", "maps", {}) as artifact:
            monkeypatch.setattr(call, full)
            artifact.write("0", {"x": torch.ones(3)})

    with pytest.raises(OSError, match="No space"):
        work()
    assert not list(tmp_path.iterdir())


def finished(folder: Path) -> Path:
    with Artifact.writing(folder, "maps", {}) as artifact:
        artifact.write("0", {"x": torch.ones(3)})
        artifact.finish()
    return folder


def assert_outside(folder: Path) -> None:
    """Reading and verifying an artifact both notice a file outside of its folder."""
    with pytest.raises(InputError, match="elsewhere"):
        Artifact.open(folder, "maps").read("0", "x")
    (verdict,) = verify(folder)
    assert "elsewhere" in str(verdict.damage)


@pytest.mark.parametrize("name", ["0.safetensors", "config.json"])
def test_a_link_out_of_an_artifact_is_refused(name, tmp_path):
    folder = finished(tmp_path / "a")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(Path("..", name))  # the very bytes that were written
    assert_outside(folder)


@pytest.mark.parametrize("name", ["../0.safetensors", "deep/../../0.safetensors", "{}/0.safetensors"])
def test_a_name_out_of_an_artifact_is_refused(name, tmp_path):
    folder = finished(tmp_path / "a")
    (folder / "0.safetensors").rename(tmp_path / "0.safetensors")
    name, config = name.format(tmp_path), json.loads((folder / "config.json").read_text())
    config["files"] = {name: config["files"]["0.safetensors"]}
    del config["digest"]
    (folder / "config.json").write_text(json.dumps(checksummed(config)))
    assert_outside(folder)
    for way in (Artifact(folder, config).tensors, Artifact(folder, config).read_json):
        with pytest.raises(InputError, match="elsewhere"):
            way(name.removesuffix(".safetensors"))


def test_links_within_an_artifact_and_of_the_hubs_cache_are_read(tmp_path):
    folder = finished(tmp_path / "repository" / "snapshots" / "0" / "lens")
    blobs = tmp_path / "repository" / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("../../../blobs", path.name))
    (tmp_path / "link").symlink_to(folder)
    for place in (folder, tmp_path / "link"):
        assert Artifact.open(place, "maps").read("0", "x").tolist() == [1, 1, 1]
    (tmp_path / "here").mkdir()
    within = finished(tmp_path / "here" / "a")
    (within / "0.safetensors").rename(within / "other")
    (within / "0.safetensors").symlink_to("other")
    assert Artifact.open(within, "maps").read("0", "x").tolist() == [1, 1, 1]


def write_and_raise(folder: Path, error: BaseException) -> None:
    with Artifact.writing(folder, "maps", {}) as artifact:
        artifact.write("0", {"x": torch.ones(3)})
        raise error


def test_what_was_written_outlives_a_failure(tmp_path):
    for error in (KeyboardInterrupt(), ValueError("mine")):
        with pytest.raises(type(error)):
            write_and_raise(tmp_path / "a", error)
        with Artifact.writing(tmp_path / "a", "maps", {}) as artifact:
            assert artifact.written() == ["0"]


def test_a_folder_that_was_written_again_is_noticed(small_model, tmp_path):
    """An object that was opened before has another provenance than the new vectors."""
    model = small_model("gpt2")
    for positions in ("sampled", "all"):
        folder, opened = tmp_path / positions, []
        for seed in (0, 1):
            shutil.rmtree(folder, ignore_errors=True)
            examples = matlens.make_examples(model, make_sentences(), seed=seed).head(20 + seed)
            opened.append(
                matlens.collect(model, examples, [1, 2], positions=positions, folder=folder, **QUIET)
            )
            if not seed:
                assert list(opened[0].shards(["h.1"]))
        for read in (lambda of: of["h.1"], lambda of: of["h.2"], lambda of: list(of.shards(["h.1"]))):
            with pytest.raises(InputError):
                read(opened[0])
        assert opened[1]["h.1"].isfinite().all()


def test_vectors_of_a_folder_that_were_edited_in_place_are_read_again(small_model, tmp_path):
    model = small_model("gpt2")
    examples = matlens.make_examples(model, make_sentences()).head(20)
    stored = matlens.collect(model, examples, [1], folder=tmp_path / "a", **QUIET)
    vectors = stored["h.1"]
    before = vectors.clone()
    vectors -= vectors.mean(0)
    assert torch.equal(stored["h.1"], before)


def test_a_job_that_failed_before_it_wrote_leaves_no_folder(tmp_path):
    """But one that was there, and what others put into it meanwhile."""

    def fail(folder: Path, *theirs: str) -> None:
        with Artifact.writing(folder, "maps", {}):
            for name in theirs:
                (folder / name).write_text("theirs")
            raise ValueError("mine")

    (tmp_path / "old").mkdir()
    for name in ("old", "new"):
        with pytest.raises(ValueError, match="mine"):
            fail(tmp_path / name)
    with pytest.raises(ValueError, match="mine"):
        fail(tmp_path / "shared", "notes.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "shared"]
    assert not list((tmp_path / "old").iterdir())
    assert (tmp_path / "shared" / "notes.txt").read_text() == "theirs"
