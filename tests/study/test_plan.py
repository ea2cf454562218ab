"""What a job needs, and campaigns of jobs."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from identities import make_activations
from studying import collect_parts, study_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import matlens.study.plan as module
from matlens import InputError, make_examples, parallel
from matlens.io.artifact import Artifact
from matlens.linear import (
    LeastSquares,
    StoredLeastSquares,
    fit_samples,
    fit_stream,
    fitting,
    stream_least_squares,
    streaming,
)
from matlens.models import Provenance
from matlens.study import Study, fit_maps
from matlens.study import plan as needs
from matlens.study.plan import Shape, check_merge, collected_bytes, format_bytes, free_memory, plan_study

BIG = Shape(n_layers=32, d_model=4096, d_mlp=14336, d_vocab=128_256, n_parameters=8_030_261_248)


def written(folder: Path, *but: str) -> int:
    """Bytes of all tensors in a folder, without the headers of their files."""
    paths = [path for path in folder.glob("*.safetensors") if path.stem not in but]
    return sum(path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little") for path in paths)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("pairs", ["last", "all"])
def test_statistics_and_their_checkpoints_take_the_planned_bytes(
    pairs, few, small_model, sentences, tmp_path, monkeypatch
):
    """With a checkpoint after every batch, the disk is once as full as planned, and never fuller."""
    model, shape = small_model("llama"), Shape.from_model(small_model("llama"))
    study = study_of(
        model, sentences, tmp_path, n_train=4 if few else 25, n_validation=10, pairs=pairs, positions="all",
        keep_rows=False, batch_tokens=40,
    )  # fmt: skip
    train, validation = study.examples
    seen = [0]
    write = Artifact.write

    def watched(artifact: Artifact, name: str, tensors: Any) -> None:
        write(artifact, name, tensors)
        seen.append(written(tmp_path / "statistics"))

    monkeypatch.setattr(streaming, "_STATE_EVERY", 0.0)
    monkeypatch.setattr(streaming, "_SHARE_OF_WRITING", 0)
    monkeypatch.setattr("matlens.linear.fitting.chunk_size", lambda _: 1)  # no samples are buffered
    monkeypatch.setattr(Artifact, "write", watched)
    _ = study.validation
    needs = plan_study(shape, len(train), 0, positions="all", pairs=pairs, train_tokens=len(train.tokens))
    assert (len(train.tokens) < 2 * shape.d_model) is few
    assert 2 * written(tmp_path / "statistics") == needs["collect"].disk
    assert written(tmp_path / "statistics") < max(seen) <= needs["collect"].disk
    if not few:  # norms of few samples are stored, and a checkpoint has fewer
        assert max(seen) == needs["collect"].disk
    n_tokens, n_validation = len(validation.tokens), len(validation)
    assert written(tmp_path / "validation") == collected_bytes(shape, n_validation, n_tokens, n_validation)
    kept = plan_study(shape, len(train), len(train), positions="all", train_tokens=len(train.tokens))
    without = plan_study(shape, len(train), positions="all", train_tokens=len(train.tokens))
    rows = collected_bytes(shape, len(train), len(train) * (len(train.tokens) // len(train)), len(train))
    assert kept["collect"].disk - without["collect"].disk == rows


@pytest.mark.parametrize("pairs", ["last", "all"])
def test_maps_are_written_in_as_many_bytes_as_planned(pairs, small_model, sentences, tmp_path):
    model = small_model("gpt2")
    collect_parts(model, sentences, tmp_path, n_train=20, n_validation=4)
    fit_maps(tmp_path, pairs=pairs, progress=False)
    planned = plan_study(Shape.from_model(model), 20, pairs=pairs)
    assert planned["fit from collected vectors"].disk == written(tmp_path / "maps")


def test_the_configuration_tells_the_shape_that_the_weights_have(small_model, plain_model, model_folder):
    for name in ("llama", "gpt2", "bert", "qwen2-moe", "opt", "vit"):
        shape, loaded = Shape.from_name(str(model_folder(name))), Shape.from_model(small_model(name))
        # A bridge can hold queries, keys and values apart and together.
        assert shape == replace(loaded, n_parameters=shape.n_parameters)
        assert shape.n_parameters == sum(weight.numel() for weight in plain_model(name).parameters())
    longer = Shape.from_name(str(model_folder("t5")))  # of its two stacks
    assert (longer.n_layers, longer.d_model, longer.d_mlp, longer.d_vocab) == (3, 32, 48, 60)
    assert longer.n_parameters == sum(weight.numel() for weight in plain_model("t5").parameters())


def test_a_model_of_eight_billion_parameters():
    """Triangles and products are stored: less than the 8.9 and 146 GB of all second moments."""
    last, all_pairs = (plan_study(BIG, 10_000, pairs=pairs) for pairs in ("last", "all"))
    assert (format_bytes(last.statistics), format_bytes(all_pairs.statistics)) == ("8.59 GB", "75.2 GB")
    weights = last["load the model"].memory
    assert format_bytes(weights) == "32.1 GB"
    plans = [plan_study(BIG, n, positions="all") for n in (10**5, 10**6)]
    for plan in plans:
        collecting, fitting = plan["collect"], plan["fit from sufficient statistics"]
        assert weights + plan.statistics < collecting.memory == plans[0]["collect"].memory
        assert fitting.memory < plan.statistics / 5
        assert plan.job == (collecting.memory, collecting.disk + fitting.disk)


# Free memory and disk, and jobs that need more


@pytest.fixture
def free(monkeypatch):
    """Set the free bytes of memory and disk."""

    def say(*, memory: int = 1 << 50, disk: int = 1 << 50) -> None:
        monkeypatch.setattr(module, "free_memory", lambda: memory)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=disk))

    return say


@pytest.fixture
def study(small_model, sentences, tmp_path):
    """A study of a small model at all positions, in the same folder each time."""

    def make(**options: Any) -> Study:
        asked: dict[str, Any] = {"positions": "all", "keep_rows": False, **options}
        return study_of(small_model("gpt2"), sentences, tmp_path, n_train=20, n_validation=4, **asked)

    return make


def test_jobs_without_memory_or_disk_are_refused_before_they_begin(study, free, tmp_path):
    free(disk=2000)
    with pytest.raises(InputError, match=r"takes 1.* kB of disk at .*train, and 2 kB are free.*--out"):
        _ = study(positions="sampled", keep_rows=True).stream
    with pytest.raises(InputError, match="--positions sampled"):
        _ = study(keep_rows=True).stream
    needed = r"6 maps of 32 dimensions takes .* of memory, and 30 kB are free\..*--pairs last"
    free(memory=30_000)
    with pytest.raises(InputError, match=needed):
        _ = study().maps
    free(disk=30_000)
    with pytest.raises(InputError, match=r"for 3 maps .* of disk at .*--pairs last.*--out"):
        study(pairs="last").part_statistics(2, 2)
    assert not list(tmp_path.iterdir())
    free()
    maps = study().maps
    free(memory=0, disk=0)  # what is done answers at once
    assert study().maps.keys() == maps.keys()
    shutil.rmtree(tmp_path / "maps")
    with pytest.raises(InputError, match=r"Fitting 6 maps of 32 dimensions takes .*machine with more memory"):
        fit_maps(tmp_path, progress=False)
    free()
    _ = replace(study(positions="sampled", keep_rows=True), out=tmp_path / "rows").stream
    free(memory=30_000)
    with pytest.raises(InputError, match=rf"Fitting {needed}.*--train"):
        fit_maps(tmp_path / "rows", progress=False)


def test_a_merge_without_memory_or_disk_is_refused(small_model, sentences, free, tmp_path):
    model = small_model("gpt2")
    examples = make_examples(model, sentences).head(20)
    folders = [tmp_path / "s1", tmp_path / "s2"]
    for number, folder in enumerate(folders, 1):
        stream_least_squares(model, examples, folder, part=(number, 2), progress=False)
    shards = StoredLeastSquares(*folders)
    for few, missing in ({"memory": 9000}, "of memory"), ({"disk": 9000}, "of disk at .*joined"):
        free(**few)
        with pytest.raises(InputError, match=f"Merging 2 parts of 32 dimensions .* {missing}"):
            check_merge(shards, tmp_path / "joined")
    free()
    shards.merge(tmp_path / "joined")
    free(memory=0, disk=0)
    check_merge(shards, tmp_path / "joined")


def test_each_process_of_a_machine_needs_memory_and_one_of_them_checks(tmp_path, monkeypatch):
    pairs, widths = [("h.0", "h.2"), ("h.1", "h.2")], dict.fromkeys(("h.0", "h.1", "h.2"), 32)
    seen: list[tuple[int, str]] = []
    monkeypatch.setattr(module, "check_memory", lambda needed, what, _: seen.append((needed, what)))
    module.check_streaming(10**6, pairs, widths, tmp_path)
    monkeypatch.setattr(parallel, "world_size", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank, local_rank in ((0, 0), (1, 1), (4, 0), (7, 3)):
        monkeypatch.setattr(parallel, "rank", lambda rank=rank: rank)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        module.check_streaming(10**6, pairs, widths, tmp_path)
    assert [needed for needed, _ in seen] == [seen[0][0], 4 * seen[0][0], 4 * seen[0][0]]
    assert ["in 4 processes" in what for _, what in seen] == [False, True, True]


def test_free_memory_respects_the_limits_of_control_groups(tmp_path, monkeypatch):
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


Pairs = Literal["last", "all"]
JOBS: list[tuple[int, int, int, Pairs]] = [
    (4, 96, 500, "all"), (4, 96, 500, "last"), (3, 64, 9000, "all"), (3, 64, 4500, "last"),
    (3, 256, 700, "last"),
]  # fmt: skip


def check(planned: int, work: Callable[[], object], before: int = 0, most: float = 1.35) -> None:
    """Compare with the most bytes that torch holds while some work is done, apart from those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    taken = before + max(itertools.accumulate(event.nbytes() for event in events))
    assert 0.97 * taken < planned < most * taken


def vectors(n_layers: int, width: int, n_rows: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"h.{layer}": torch.randn(n_rows, width) for layer in range(n_layers + 1)}


def sites(n_layers: int, pairs: Pairs) -> list[tuple[str, str]]:
    targets = range(1, n_layers + 1) if pairs == "all" else [n_layers]
    return [(f"h.{a}", f"h.{b}") for a in range(n_layers) for b in targets if a < b]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("n_layers", "width", "n_rows", "pairs"), JOBS)
def test_a_fit_on_collected_vectors(n_layers, width, n_rows, pairs, copied, monkeypatch):
    monkeypatch.setattr(fitting, "CONVERTED_BYTES", fitting.CONVERTED_BYTES if copied else 0)
    collected = make_activations(vectors(n_layers, width, n_rows), Provenance())
    wanted = sites(n_layers, pairs)

    def fit() -> None:
        for _, maps in itertools.groupby(fit_samples(collected, wanted), key=lambda linear: linear.source):
            list(maps)

    n_targets = n_layers if pairs == "all" else 1
    check(needs.collected_fit_bytes(n_rows, width, n_sites=n_layers + 1, most_targets=n_targets), fit)


@pytest.mark.parametrize(("n_layers", "width", "n_rows", "pairs"), JOBS)
def test_a_fit_while_streaming(n_layers, width, n_rows, pairs):
    samples, wanted = vectors(n_layers, width, n_rows), sites(n_layers, pairs)

    def batches() -> Iterator[dict[str, Tensor]]:
        for start in range(0, n_rows, 128):
            yield {site: rows[start : start + 128].clone() for site, rows in samples.items()}

    sources = needs.stream_widths(n_layers, width, pairs)
    planned = needs.streamed_fit_bytes(n_rows, sources, of_sample=(n_layers + 1) * width, widest=width)
    check(planned, lambda: list(fit_stream(batches(), wanted)))


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize(("width", "n_targets"), [(96, 4), (96, 1), (256, 1)])
def test_a_fit_on_stored_moments(width, n_targets, n_parts):
    torch.manual_seed(0)
    d_out = n_targets * width
    moments = LeastSquares(width, d_out).update(torch.randn(800, width), torch.randn(800, d_out)).tensors()

    def read() -> LeastSquares:
        return LeastSquares.from_tensors({name: part.clone() for name, part in moments.items()})

    def fit() -> object:
        whole = read()
        for _ in range(n_parts - 1):
            whole.merge(read())
        return whole.solve()

    check(needs.stored_fit_bytes([(width, d_out)], n_shards=n_parts), fit)


def test_moments_are_as_large_as_planned_however_many_samples_there_are():
    moments = LeastSquares(20, 60)
    for n in (7, 50, 50):
        moments.update(torch.randn(n, 20), torch.randn(n, 60))
        stored = sum(8 * moments.tensors()[name].numel() for name in "rz")
        assert stored == needs.statistics_bytes(20, 60, moments.n)
    many = [needs.streamed_fit_bytes(10**n, [(64, 64)] * 6, of_sample=7 * 64, widest=64) for n in (4, 5, 9)]
    assert len(set(many)) == 1
    # LAPACK's own memory for singular values is not torch's: 6.5 times the triangle, measured at 1,024.
    assert (
        needs.stored_fit_bytes([(96, 96)], n_rows=100) == needs.statistics_bytes(96, 96) + 8 * 6.5 * 96 * 96
    )
