"""Several processes give what one gives, however many they are; one that is gone is named, and none hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import batches_noted
from conftest import make_sentences
from several import run_ranks
from torch import Tensor

import matlens
from matlens import processes
from matlens.activations import collecting, stream, stream_moments
from matlens.activations.activations import Activations
from matlens.corpora.examples import Examples
from matlens.errors import InputError
from matlens.ffn.trace import Trace
from matlens.linear.fitting import fit_samples, fit_stream
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
from matlens.models.anatomy import Anatomy
from matlens.models.identity import Provenance
from matlens.patching.submodules import fit_submodules, submodule_pairs
from matlens.processes.group import Processes, alone, current
from matlens.storage import rows
from matlens.study.fits import fit_moments

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
    anatomy = Anatomy.from_model(model)
    quiet: dict[str, Any] = {"batch_tokens": BATCH, "progress": False}
    kept = matlens.collect(model, examples, **quiet)
    ends = submodule_pairs(anatomy)
    inner = matlens.collect(model, examples, sorted({site for pair in ends for site in pair}), **quiet)
    one = matlens.collect(model, few, **quiet)
    whole = matlens.collect(model, examples, positions="all", folder=folder / "rows", **quiet)
    trace = Trace.run(model, examples, k=3, folder=folder / "trace", **quiet)
    passing = stream(model, examples, ["h.0", "h.1", "h.3"], positions="all", divided=True, **quiet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearMap, "from_solution", in_float64)
        maps = {
            "drawn": weights(MapSet.fit(kept, pairs="all", intercept=True, progress=False)),
            "few": weights(MapSet.fit(one, progress=False)),
            "submodules": weights(fit_submodules(inner, ends, progress=False)),
            "stored": weights(MapSet.fit(whole, pairs=PAIRS, ridge=0.5, progress=False)),
            "streamed": weights(fit_stream(passing, PAIRS, ridge=0.5, divided=True)),
        }
    moments = stream_moments(model, examples, folder / "moments", pairs=PAIRS, **quiet)
    fit_moments(moments, folder / "maps", ridge=0.5, progress=False)
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
def model(model_folder: Callable[[str], Path]) -> Any:
    return matlens.load(str(model_folder("llama")), device="cpu")


@pytest.fixture(scope="module")
def examples(model: Any) -> Examples:
    return matlens.make_examples(model, make_sentences())


@pytest.fixture(scope="module")
def alone_made(model: Any, examples: Examples, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("alone")
    return everything(model, examples, examples.head(3), folder), folder


@pytest.fixture(scope="module", params=[2, 4])
def together(
    request: pytest.FixtureRequest, model: Any, examples: Examples, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp(f"together{request.param}")

    def work(_: Processes) -> Any:
        return everything(model, examples, examples.head(3), folder)

    outcomes = run_ranks(request.param, work, folder / "outcomes")
    assert [outcome.get("trace") for outcome in outcomes] == [None] * request.param
    return [outcome["result"] for outcome in outcomes], folder


def require_same_maps(made: list[Any], whole: Any) -> None:
    points = {site: vectors.double() for site, vectors in whole["activations"].items()}
    for of_process in made:
        for name, maps in whole["maps"].items():
            assert maps.keys() == of_process["maps"][name].keys()
            assert len(maps) > 2
            for pair, weight in maps.items():
                x = points.get(pair[0], torch.eye(weight.shape[1], dtype=torch.float64))
                ours, theirs = x @ of_process["maps"][name][pair].T, x @ weight.T
                assert weight.dtype == torch.float64
                assert float((ours - theirs).norm()) <= 1e-10 * float(theirs.norm()), (name, pair)


def require_same_rows(made: list[Any], whole: Any) -> None:
    for of_process in made:
        assert of_process["n"] == whole["n"]
        for part in ("activations", "few", "trace"):
            for name, values in whole[part].items():
                torch.testing.assert_close(of_process[part][name], values, rtol=0, atol=0)


def test_maps_of_several_processes_predict_what_those_of_one_do(
    together: tuple[list[Any], Path], alone_made: tuple[Any, Path]
) -> None:
    require_same_maps(together[0], alone_made[0])


def test_rows_traces_and_counts_are_the_same_in_each_process(
    together: tuple[list[Any], Path], alone_made: tuple[Any, Path]
) -> None:
    assert alone_made[0]["n"] > 400
    require_same_rows(together[0], alone_made[0])


def test_folders_are_those_of_one_process(
    together: tuple[list[Any], Path], alone_made: tuple[Any, Path]
) -> None:
    (_, whole), (_, folder) = alone_made, together
    for name in ("rows", "trace"):
        files = {path.name: path.read_bytes() for path in (whole / name).glob("*.npy")}
        assert len(files) > 4
        assert {path.name: path.read_bytes() for path in (folder / name).glob("*.npy")} == files
    stored = Activations.load(folder / "rows")
    assert stored["h.3"].isfinite().all()
    names = {path.name for path in (whole / "moments").iterdir()}
    assert {path.name for path in (folder / "moments").iterdir()} == names


def test_maps_in_a_folder_are_those_of_one_process_but_for_the_last_digit(
    together: tuple[list[Any], Path], alone_made: tuple[Any, Path]
) -> None:
    (whole, _), (made, _) = alone_made, together
    for pair, weight in whole["written"].items():
        torch.testing.assert_close(made[0]["written"][pair], weight, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("n_examples", [1, 2])
def test_processes_without_examples_have_the_same(
    n_examples: int, model: Any, examples: Examples, tmp_path: Path
) -> None:
    """Of four processes two or three have nothing to add to any sum, nor a row."""
    given = examples.head(n_examples), examples.head(1)
    whole = everything(model, *given, tmp_path / "alone")
    outcomes = run_ranks(4, lambda _: everything(model, *given, tmp_path / "together"), tmp_path / "outcomes")
    assert [outcome.get("trace") for outcome in outcomes] == [None] * 4
    made = [outcome["result"] for outcome in outcomes]
    require_same_maps(made, whole)
    require_same_rows(made, whole)
    files = {path.name: path.read_bytes() for path in (tmp_path / "alone").glob("*/*.npy")}
    assert len(files) > 8
    assert {path.name: path.read_bytes() for path in (tmp_path / "together").glob("*/*.npy")} == files


def killed(folder: Path, model: Any, examples: Examples, processes: Processes, rank: int = 1) -> Any:
    if processes.rank == rank:  # in its third turn
        run, turns = collecting._run, iter(range(2))

        def last(*arguments: Any) -> Any:
            if next(turns, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return run(*arguments)

        collecting._run = last
    return matlens.collect(model, examples, folder=folder, batch_tokens=BATCH, progress=False)


def test_a_killed_process_is_named_and_the_folder_goes_on(
    model: Any, examples: Examples, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    outcomes = run_ranks(3, lambda some: killed(folder, model, examples, some), tmp_path / "a", patience=4.0)
    assert outcomes[1] == {}
    assert "Process 1 of 3 is gone" in outcomes[0]["error"]
    assert "Run the same command again" in outcomes[0]["error"]
    assert {outcome["kind"] for outcome in (outcomes[0], outcomes[2])} == {"ProcessLost"}
    assert batches_noted(folder) == 6
    whole = matlens.collect(model, examples, progress=False)
    again = matlens.collect(model, examples, folder=folder, batch_tokens=BATCH, progress=False)
    torch.testing.assert_close(again["h.3"], whole["h.3"])


def test_the_leading_process_is_killed_and_the_folder_goes_on(
    model: Any, examples: Examples, tmp_path: Path
) -> None:
    """It keeps the board on which all of them write: the others are told at once."""
    folder = tmp_path / "rows"

    def work(some: Processes) -> Any:
        rows._NOTED_EVERY = -1.0  # every batch, for a process that is killed notes nothing at its end
        return killed(folder, model, examples, some, 0)

    outcomes = run_ranks(3, work, tmp_path / "a")
    assert outcomes[0] == {}
    for outcome in outcomes[1:]:
        assert outcome["kind"] == "ProcessLost"
        assert "Process 0 of 3 is gone" in outcome["error"]
        assert "Run the same command again" in outcome["error"]
    assert batches_noted(folder) == 6
    whole = matlens.collect(model, examples, progress=False)
    again = matlens.collect(model, examples, folder=folder, batch_tokens=BATCH, progress=False)
    torch.testing.assert_close(again["h.3"], whole["h.3"])


def test_a_process_that_is_slow_while_it_collects_is_waited_for(
    model: Any, examples: Examples, tmp_path: Path
) -> None:
    patience = 4.0

    def work(some: Processes) -> Any:
        run, turns = collecting._run, iter(range(2))

        def slowly(*arguments: Any) -> Any:
            if some.rank == 1 and next(turns, None) == 1:  # in its second turn
                time.sleep(1.5 * patience)
            return run(*arguments)

        collecting._run = slowly
        kept = matlens.collect(model, examples, folder=tmp_path / "rows", batch_tokens=BATCH, progress=False)
        return {site: kept[site].clone() for site in kept}

    outcomes = run_ranks(2, work, tmp_path / "a", patience=patience)
    assert [outcome.get("trace") for outcome in outcomes] == [None, None]
    whole = matlens.collect(model, examples, batch_tokens=BATCH, progress=False)
    for outcome in outcomes:
        for site, vectors in outcome["result"].items():
            torch.testing.assert_close(vectors, whole[site], rtol=0, atol=0)


def test_a_slow_process_is_waited_for_and_an_error_reaches_all(tmp_path: Path) -> None:
    def work(some: Processes) -> Any:
        if some.rank == 1:
            time.sleep(6)  # three times the patience
        first = [int(parts["x"]) for parts in some.gather({"x": torch.tensor(some.rank)}, "numbers")]
        if some.rank == 1:
            raise InputError("The second has had enough.")
        some.wait("never")
        return first

    outcomes = run_ranks(2, work, tmp_path / "a", patience=2.0)
    assert outcomes[1]["error"] == "The second has had enough."
    assert outcomes[0]["error"] == "Process 1 of 2 has failed: The second has had enough."


def test_a_job_that_was_held_up_as_a_whole_goes_on(tmp_path: Path) -> None:
    """A scheduler stops all processes for longer than their patience, and none has given a sign meanwhile."""
    patience = 3.0

    def work(some: Processes) -> Any:
        (tmp_path / f"{some.rank}.pid").write_text(str(os.getpid()))
        some.wait("start")
        if some.rank == 1:
            time.sleep(0.6)
        return [int(parts["x"]) for parts in some.gather({"x": torch.tensor(some.rank)}, "numbers")]

    def hold_up() -> None:
        places = [tmp_path / f"{rank}.pid" for rank in range(2)]
        while not all(place.is_file() and place.read_text() for place in places):
            time.sleep(0.02)
        time.sleep(0.3)
        numbers = [int(place.read_text()) for place in places]
        for number in reversed(numbers):
            os.kill(number, signal.SIGSTOP)
        time.sleep(2.5 * patience)
        os.kill(numbers[0], signal.SIGCONT)
        time.sleep(0.2)
        os.kill(numbers[1], signal.SIGCONT)

    holder = threading.Thread(target=hold_up)
    holder.start()
    outcomes = run_ranks(2, work, tmp_path / "a", patience=patience)
    holder.join()
    assert [outcome.get("trace") for outcome in outcomes] == [None, None]
    assert outcomes[0]["result"] == [0, 1]


def test_processes_that_fit_other_samples_are_told_so(tmp_path: Path) -> None:
    def fitted(change: Callable[[dict[str, Any], int], Any]) -> Callable[[Processes], Any]:
        def work(some: Processes) -> Any:
            x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
            given = {"samples": {"h.0": x, "h.1": x + 1}, "pairs": [(0, 1)]}
            change(given, some.rank)
            return [linear.weight for linear in fit_samples(**given)]

        return work

    def other_rows(given: dict[str, Any], rank: int) -> None:
        given["rows"] = torch.arange(50) % 2 == rank

    def other_vectors(given: dict[str, Any], rank: int) -> None:
        given["samples"]["h.1"] = given["samples"]["h.1"] * (rank + 1)

    def other_weights(given: dict[str, Any], rank: int) -> None:
        given["weights"] = torch.arange(50.0) + rank * torch.arange(50.0)

    def other_penalty(given: dict[str, Any], rank: int) -> None:
        given["ridge"] = float(rank)

    for number, change in enumerate((other_rows, other_vectors, other_weights, other_penalty)):
        outcomes = run_ranks(2, fitted(change), tmp_path / str(number), patience=5.0)
        words = "other arguments" if change is other_penalty else "other samples"
        assert f"Process 1 was given {words}" in outcomes[1]["error"], change
        assert words in outcomes[0]["error"]

    def slightly_other(given: dict[str, Any], rank: int) -> None:  # as another device would have it
        given["samples"]["h.1"] = given["samples"]["h.1"] * (1 + 1e-6 * rank)

    outcomes = run_ranks(2, fitted(slightly_other), tmp_path / "alike", patience=5.0)
    assert torch.equal(outcomes[0]["result"][0], outcomes[1]["result"][0])


def test_processes_that_do_different_things_are_told_so(tmp_path: Path) -> None:
    def work(some: Processes) -> Any:
        some.agree(some.rank, "what they are given")
        some.wait("nobody comes here")

    def apart(some: Processes) -> Any:
        some.wait("here" if some.leads else "there")

    first, second = run_ranks(2, apart, tmp_path / "a", patience=2.0)
    assert "Process 1 is at 'there' while process 0 is at 'here'" in first["error"]
    assert second["kind"] == "ProcessLost"
    outcomes = run_ranks(2, work, tmp_path / "b", patience=2.0)
    assert "given other arguments than process 0 (what they are given differ)" in outcomes[1]["error"]
    assert "given other arguments" in outcomes[0]["error"]


def test_one_process_is_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    with processes.joined() as some, alone():
        assert (some.rank, some.size, some.leads, some.several) == (0, 1, True, False)
        assert some.share([1, 2], "numbers") == [1, 2]
        assert some.gather({"x": torch.ones(2)}, "ones")[0]["x"].sum() == 2
        assert current().size == 1


@pytest.mark.parametrize("stream_divides", [False, True])
def test_a_stream_and_a_fit_that_divide_otherwise_are_refused(
    stream_divides: bool, model: Any, examples: Examples, tmp_path: Path
) -> None:
    """Each sample would count once for every process, or maps of a part would pass for those of all."""

    def work(_: Processes) -> Any:
        rows = stream(
            model, examples, ["h.0", "h.3"], batch_tokens=BATCH, progress=False, divided=stream_divides
        )
        return list(fit_stream(rows, [("h.0", "h.3")], ridge=0.5, divided=not stream_divides))

    for outcome in run_ranks(2, work, tmp_path / "a", patience=5.0):
        assert "Expected the same of both: stream(..., divided=True)" in outcome.get("error", "none")
    (alone_fitted,) = work(Processes())
    rows = stream(model, examples, ["h.0", "h.3"], batch_tokens=BATCH, progress=False)
    (expected,) = fit_stream(rows, [("h.0", "h.3")], ridge=0.5)
    assert torch.equal(alone_fitted.weight, expected.weight)


@pytest.mark.parametrize("early", [0, 1])
def test_a_process_that_ends_early_is_not_waited_for(early: int, tmp_path: Path) -> None:
    """It waits for the others at the end, and lives; they must not wait for it in the middle for ever."""

    def work(some: Processes) -> None:
        some.wait("start")
        if some.rank == early:
            return
        for number in range(3):
            some.share(number, f"step {number}")  # who leads says this, and does not wait
        some.wait("the middle")

    outcomes = run_ranks(2, work, tmp_path / "a", patience=30.0)
    assert f"Process {early} of 2 has ended while process {1 - early} was waiting for it" in outcomes[
        1 - early
    ].get("error", "none")
    assert "has failed" in outcomes[early].get("error", "none")
