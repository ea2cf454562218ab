"""Several processes give what one gives, however many they are; one that is gone is named, and none hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_sentences
from identities import make_activations, make_identity
from several import run_ranks
from torch import Tensor

import matlens
from matlens import parallel
from matlens.activations import stream
from matlens.activations.activations import Activations
from matlens.data.examples import Batch, Examples
from matlens.errors import InputError
from matlens.ffn.trace import Trace
from matlens.linear import stream_least_squares
from matlens.linear.fitting import fit_samples, fit_stream
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
from matlens.models.identity import Provenance
from matlens.models.layout import ModelLayout
from matlens.patching.submodules import fit_submodules, submodule_pairs
from matlens.study.steps import fit_maps

BATCH = 40  # tokens of a batch: about fifteen batches of the forty sentences
PAIRS = [(0, 3), (1, 3), (0, 1)]


def in_float64(w: Tensor, b: Tensor | None, source: str, target: str, provenance: Any = None) -> LinearMap:
    """Keep maps in the float64 that they are solved in, to compare more digits than a float32 has."""
    return LinearMap(w, b, source, target, provenance or Provenance())


def weights(maps: Any) -> dict[tuple[str, str], Tensor]:
    made = maps.values() if isinstance(maps, MapSet) else maps
    return {(linear.source, linear.target): linear.weight for linear in made}


def everything(model: Any, examples: Examples, few: Examples, folder: Path) -> dict[str, Any]:
    """All that sums over tokens, with the same calls in each process."""
    layout = ModelLayout.from_model(model)
    quiet: dict[str, Any] = {"batch_tokens": BATCH, "progress": False}
    kept = matlens.collect(model, examples, **quiet)
    ends = submodule_pairs(layout)
    inner = matlens.collect(model, examples, sorted({site for pair in ends for site in pair}), **quiet)
    one = matlens.collect(model, few, **quiet)
    whole = matlens.collect(model, examples, positions="all", folder=folder / "rows", **quiet)
    trace = Trace.run(model, examples, k=3, folder=folder / "trace", **quiet)
    passing = stream(model, examples, ["h.0", "h.1", "h.3"], positions="all", divided=True, **quiet)
    again = stream(model, examples, ["h.0", "h.1", "h.3"], positions="all", divided=True, **quiet)
    some = torch.arange(len(examples.tokens)) % 3 != 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearMap, "from_solution", in_float64)
        maps = {
            "sampled": weights(MapSet.fit(kept, pairs="all", intercept=True, progress=False)),
            "few": weights(MapSet.fit(one, progress=False)),
            "submodules": weights(fit_submodules(inner, ends, progress=False)),
            "stored": weights(MapSet.fit(whole, pairs=PAIRS, ridge=0.5, progress=False)),
            "streamed": weights(fit_stream(passing, PAIRS, ridge=0.5, divided=True)),
            "selected": weights(fit_stream(again, PAIRS, rows=some, ridge=0.5, divided=True)),
        }
    moments = stream_least_squares(model, examples, folder / "statistics", pairs=PAIRS, **quiet)
    fit_maps(folder, ridge=0.5, progress=False)
    return {
        "maps": maps,
        "written": weights(MapSet.load(folder / "maps")),
        "activations": {site: kept[site].clone() for site in kept},
        "few": {site: one[site].clone() for site in one},
        "trace": {"before": trace.before, "rank": trace.rank, "index": trace.index["dominant"],
                  "score": trace.score["dominant", "final"].clone()},
        "n": moments.n_samples,
    }  # fmt: skip


@pytest.fixture(scope="module")
def model(model_folder):
    return matlens.load(str(model_folder("llama")), device="cpu")


@pytest.fixture(scope="module")
def examples(model):
    return matlens.make_examples(model, make_sentences())


@pytest.fixture(scope="module")
def alone_made(model, examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return everything(model, examples, examples.head(3), folder), folder


@pytest.fixture(scope="module", params=[3])
def together(request, model, examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"together{request.param}")

    def work() -> Any:
        return everything(model, examples, examples.head(3), folder)

    outcomes = run_ranks(request.param, work, folder / "outcomes")
    assert [outcome.get("trace") for outcome in outcomes] == [None] * request.param
    return [outcome["result"] for outcome in outcomes], folder


def check_same(made: list[Any], folder: Path, whole: Any, of_one: Path) -> None:
    """Maps that predict what those of one process do, and the same rows, counts and files."""
    points = {site: vectors.double() for site, vectors in whole["activations"].items()}
    for of_process in made:
        assert of_process["n"] == whole["n"]
        for part in ("activations", "few", "trace"):
            for name, values in whole[part].items():
                torch.testing.assert_close(of_process[part][name], values, rtol=0, atol=0)
        for name, maps in whole["maps"].items():
            assert maps.keys() == of_process["maps"][name].keys()
            assert len(maps) > 2
            for pair, weight in maps.items():
                x = points.get(pair[0], torch.eye(weight.shape[1], dtype=torch.float64))
                ours, theirs = x @ of_process["maps"][name][pair].T, x @ weight.T
                assert weight.dtype == torch.float64
                assert float((ours - theirs).norm()) <= 1e-10 * float(theirs.norm()), (name, pair)
    for name in ("rows", "trace"):
        files = {path.name: path.read_bytes() for path in (of_one / name).glob("*.safetensors")}
        assert len(files) > 1
        for file, content in files.items():
            assert (folder / name / file).read_bytes() == content


def test_several_processes_give_what_one_gives(together, alone_made):
    (whole, of_one), (made, folder) = alone_made, together
    assert whole["n"] > 400
    check_same(made, folder, whole, of_one)
    assert Activations.load(folder / "rows")["h.3"].isfinite().all()
    names = {path.name for path in (of_one / "statistics").iterdir()}
    assert {path.name for path in (folder / "statistics").iterdir()} == names
    for pair, weight in whole["written"].items():
        torch.testing.assert_close(made[0]["written"][pair], weight, rtol=1e-6, atol=1e-8)


def test_processes_without_examples_have_the_same(model, examples, tmp_path):
    """Of four processes three have nothing to add to any sum, nor a row."""
    given = examples.head(1), examples.head(1)
    whole = everything(model, *given, tmp_path / "alone")
    outcomes = run_ranks(4, lambda: everything(model, *given, tmp_path / "together"), tmp_path / "outcomes")
    assert [outcome.get("trace") for outcome in outcomes] == [None] * 4
    made = [outcome["result"] for outcome in outcomes]
    check_same(made, tmp_path / "together", whole, tmp_path / "alone")


def killed(folder: Path, model: Any, examples: Examples, rank: int = 1) -> Any:
    if parallel.rank() == rank:  # in its second batch
        inputs, turns = Batch.inputs, iter(range(1))

        def last(*arguments: Any) -> Any:
            if next(turns, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return inputs(*arguments)

        Batch.inputs = last  # type: ignore[method-assign]
    return matlens.collect(model, examples, folder=folder, batch_tokens=BATCH, progress=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_process_was_killed_the_others_end_and_the_folder_resumes(rank, model, examples, tmp_path):
    folder = tmp_path / "rows"

    def work() -> Any:
        return killed(folder, model, examples, rank)

    outcomes = run_ranks(3, work, tmp_path / "a")
    assert outcomes.pop(rank) == {}
    assert {outcome["kind"] for outcome in outcomes} == {"ProcessLost"}
    stored = {path: path.stat().st_ino for path in folder.glob("0*.safetensors")}
    assert stored
    whole = matlens.collect(model, examples, progress=False)
    again = matlens.collect(model, examples, folder=folder, batch_tokens=BATCH, progress=False)
    assert {path: path.stat().st_ino for path in stored} == stored  # not written again
    torch.testing.assert_close(again["h.3"], whole["h.3"])


def test_tensors_of_any_dtype_come_in_rank_order(tmp_path):
    dtypes = (torch.float64, torch.bfloat16, torch.bool, torch.int32)

    def work() -> Any:
        rank = parallel.rank()
        own = {str(dtype): torch.tensor([[rank, 1]]).to(dtype) for dtype in dtypes}
        own |= {"none": torch.zeros(0, 2), "scalar": torch.tensor(float(rank))}
        gathered = [(float(of["scalar"]), of["torch.float64"].tolist()) for of in parallel.gather(own, "all")]
        stacked = parallel.concatenate({str(dtype): own[str(dtype)] for dtype in dtypes}, "rows")
        merged = parallel.merge({f"of {rank}": torch.tensor(rank)}, "names")
        return gathered, stacked, merged, parallel.broadcast(f"from {rank}", "a text")

    outcomes = run_ranks(3, work, tmp_path / "a")
    assert [outcome.get("trace") for outcome in outcomes] == [None] * 3
    assert outcomes[0]["result"][0] == [(float(rank), [[float(rank), 1.0]]) for rank in range(3)]
    for gathered, stacked, merged, text in (outcome["result"] for outcome in outcomes):
        assert not gathered or len(gathered) == 3
        for dtype in dtypes:
            assert torch.equal(stacked[str(dtype)], torch.tensor([[0, 1], [1, 1], [2, 1]]).to(dtype))
        assert {name: int(value) for name, value in merged.items()} == {"of 0": 0, "of 1": 1, "of 2": 2}
        assert text == "from 0"


def test_an_error_of_one_process_ends_the_others(tmp_path):
    def work() -> None:
        if parallel.rank() == 1:
            raise InputError("The second has had enough.")
        parallel.barrier("never")

    outcomes = run_ranks(2, work, tmp_path / "a")
    assert outcomes[1]["error"] == "The second has had enough."
    assert outcomes[0]["kind"] == "ProcessLost"


def test_processes_that_fit_otherwise_are_refused(tmp_path):
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    origin = Provenance(make_identity(n_layers=1))

    def fitted(change: Callable[[int], dict[str, Any]]) -> Callable[[], Any]:
        def work() -> Any:
            samples = make_activations({"h.0": x, "h.1": x + 1}, origin)
            return [linear.weight for linear in fit_samples(samples, [(0, 1)], **change(parallel.rank()))]

        return work

    cases = {
        "rows": fitted(lambda rank: {"rows": torch.arange(50) % 2 == rank}),
        "ridge": fitted(lambda rank: {"ridge": float(rank)}),
    }
    for name, work in cases.items():
        outcomes = run_ranks(2, work, tmp_path / name)
        assert "given other arguments" in outcomes[1]["error"]
        assert "error" in outcomes[0]
    (whole,) = fit_stream([{"h.0": x, "h.1": x + 1}], [(0, 1)])
    for outcome in run_ranks(2, fitted(lambda rank: {}), tmp_path / "same"):
        torch.testing.assert_close(outcome["result"][0], whole.weight)


def test_processes_that_do_different_things_are_told_so(tmp_path):
    def work() -> Any:
        parallel.check_same(parallel.rank(), "what they are given")

    def apart() -> Any:
        parallel.barrier("here" if parallel.is_main() else "there")

    def early() -> Any:
        if parallel.is_main():
            parallel.broadcast(1, "one step more")

    for name, task, words in (
        ("a", apart, "Process 1 is at 'there' while process 0 is at 'here'"),
        ("b", work, "given other arguments than process 0 (what they are given differ)"),
        ("c", early, "Process 1 is at 'the end of the job' while process 0 is at 'one step more'"),
    ):
        outcomes = run_ranks(2, task, tmp_path / name)
        assert [words in outcome["error"] for outcome in outcomes] == [True, True]


@pytest.mark.parametrize(
    ("size", "rank", "expected"),
    [("2", "1", True), ("1", "0", False), ("x", "0", False), (None, None, False)],
)
def test_the_environment_says_whether_there_are_several(size, rank, expected, monkeypatch):
    for name, value in (("WORLD_SIZE", size), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert parallel.is_launched() is expected


def test_a_process_that_does_not_come_in_time_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "_LONGEST", timedelta(seconds=1))

    def work() -> None:
        with parallel.distributed():
            if parallel.rank() == 1:
                time.sleep(4)
            parallel.barrier("the middle")

    outcomes = run_ranks(2, work, tmp_path / "a", join=False)
    assert outcomes[0]["kind"] == "ProcessLost"


@pytest.mark.parametrize("stream_divides", [False, True])
def test_a_stream_and_a_fit_that_divide_otherwise_are_refused(stream_divides, model, examples, tmp_path):
    """Each sample would count once for every process, or maps of a part would pass for those of all."""

    def work() -> Any:
        rows = stream(
            model, examples, ["h.0", "h.3"], batch_tokens=BATCH, progress=False, divided=stream_divides
        )
        return list(fit_stream(rows, [("h.0", "h.3")], ridge=0.5, divided=not stream_divides))

    for outcome in run_ranks(2, work, tmp_path / "a"):
        assert "must have the same divided" in outcome.get("error", "none")
    (alone_fitted,) = work()
    rows = stream(model, examples, ["h.0", "h.3"], batch_tokens=BATCH, progress=False)
    (expected,) = fit_stream(rows, [("h.0", "h.3")], ridge=0.5)
    assert torch.equal(alone_fitted.weight, expected.weight)
