"""Sufficient statistics of a streamed corpus: those of its vectors, whole, in parts, and after a kill."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from conftest import make_sentences

import matlens
from matlens.data.examples import Batch
from matlens.errors import InputError
from matlens.io.verification import verify
from matlens.linear import StoredLeastSquares, streaming
from matlens.linear.least_squares import LeastSquares
from matlens.linear.mapsets import MapSet
from matlens.linear.streaming import stream_least_squares
from matlens.study.steps import fit_maps, typical_penalty

PAIRS = [("h.0", "h.3"), ("attn_in.1", "attn_out.1"), ("h.0", "h.1")]
QUIET: dict[str, Any] = {"batch_tokens": 40, "progress": False}


@pytest.fixture(scope="module")
def model(model_folder):
    return matlens.load(str(model_folder("llama")), device="cpu")


@pytest.fixture(scope="module")
def examples(model):
    return matlens.make_examples(model, make_sentences())


@pytest.fixture(scope="module")
def whole(model, examples, tmp_path_factory):
    return stream_least_squares(model, examples, tmp_path_factory.mktemp("whole") / "m", pairs=PAIRS, **QUIET)


def assert_same_predictions(one: StoredLeastSquares, other: StoredLeastSquares, most: float = 1e-10) -> None:
    for source in one.targets:
        x = torch.eye(one.widths[source], dtype=torch.float64)
        ours, _ = one[source].solution(intercept=True, ridge=0.1)
        theirs, _ = other[source].solution(intercept=True, ridge=0.1)
        assert float((x @ ours.T - x @ theirs.T).norm() / (x @ theirs.T).norm()) < most


@pytest.mark.parametrize("positions", ["all", "sampled"])
def test_moments_are_those_of_collected_vectors_whole_and_in_parts(positions, model, examples, tmp_path):
    sites = sorted({site for pair in PAIRS for site in pair})
    collected = matlens.collect(model, examples, sites, positions=positions, **QUIET)
    asked: dict[str, Any] = {"pairs": PAIRS, "positions": positions, **QUIET}
    stored = stream_least_squares(model, examples, tmp_path / "m", **asked)
    parts = [
        stream_least_squares(model, examples, tmp_path / str(number), part=(number, 3), **asked)
        for number in (1, 2, 3)
    ]
    assert stored.n_samples == collected.n_rows == sum(part.n_samples for part in parts)
    assert stored.provenance.data == collected.provenance.data
    joined = StoredLeastSquares(*(tmp_path / name for name in "312"))
    assert joined.parts == [(1, 3), (2, 3), (3, 3)]
    in_order = StoredLeastSquares(*(tmp_path / name for name in "123"))
    for source in joined.targets:
        ours, theirs = (parts_of[source].tensors() for parts_of in (joined, in_order))
        assert all(torch.equal(ours[name], theirs[name]) for name in "rz")
    for source, targets in stored.targets.items():
        x, y = collected[source], torch.cat([collected[target] for target in targets], 1)
        direct = LeastSquares(x.shape[1], y.shape[1]).update(x, y)
        for ridge, intercept in ((0.0, False), (0.3, True)):
            if ridge == 0 and positions == "sampled":
                continue  # fewer samples than dimensions
            theirs, bias = direct.solution(intercept=intercept, ridge=ridge)
            # In parts there are other batches, so the vectors themselves agree to float32 alone.
            for ours, limit in ((stored, 1e-10), (joined, 1e-5)):
                weight, other = ours[source].solution(intercept=intercept, ridge=ridge)
                difference = (x.double() @ (weight - theirs).T).norm() / (x.double() @ theirs.T).norm()
                assert float(difference) < limit
                torch.testing.assert_close(other, bias, rtol=1e-4, atol=1e-6)
    merged = joined.merge(tmp_path / "merged")
    assert_same_predictions(merged, joined)
    # It is the folder of the undivided job, which need not be run any more.
    again = stream_least_squares(model, examples, tmp_path / "merged", **asked)
    assert torch.equal(again["h.0"].tensors()["r"], merged["h.0"].tensors()["r"])
    joined.merge(tmp_path / "statistics")
    maps = fit_maps(tmp_path, intercept=True, progress=False)
    assert list(maps) == joined.pairs
    assert all(linear.bias is not None for linear in maps.values())


def test_parts_that_overlap_are_of_another_job_or_missing_are_refused(model, examples, tmp_path):
    jobs: dict[str, tuple[Any, dict[str, Any]]] = {
        "1-2": (examples, {"part": (1, 2)}), "2-2": (examples, {"part": (2, 2)}),
        "1-3": (examples, {"part": (1, 3)}),
        "other": (matlens.make_examples(model, make_sentences(), seed=1), {"part": (2, 2)}),
        "pairs": (examples, {"part": (2, 2), "pairs": [(0, 2)]}),
    }  # fmt: skip
    for name, (of, options) in jobs.items():
        stream_least_squares(model, of, tmp_path / name, **{"pairs": [(0, 1)], **QUIET, **options})
    shutil.copytree(tmp_path / "1-2", tmp_path / "copy")
    refused = {
        "1-2 1-2": "got the parts 1/2, 1/2", "1-2 copy": "got the parts 1/2, 1/2",
        "2-2 1-3": "got the parts 1/3, 2/2",
        "1-2 other": "provenance differ", "1-2 pairs": "pairs and widths differ",
    }  # fmt: skip
    for names, message in refused.items():
        with pytest.raises(InputError, match=message):
            StoredLeastSquares(*(tmp_path / name for name in names.split()))
    with pytest.raises(InputError, match="missing are 2/3, 3/3"):
        StoredLeastSquares(tmp_path / "1-3").merge(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    StoredLeastSquares(tmp_path / "2-2", tmp_path / "1-2").check_complete()


class _Killed(BaseException):
    """As a kill, nothing that code of the library could catch."""


@pytest.mark.parametrize("chunk", [1, 90])
def test_a_killed_run_goes_on_from_its_last_state_to_the_same_bytes(
    chunk, model, examples, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr("matlens.linear.streaming.chunk_size", lambda _: chunk)
    stream_least_squares(model, examples, tmp_path / "lone", pairs=PAIRS, **QUIET)
    inputs, passes = Batch.inputs, list[int]()

    def counted(*arguments: Any) -> Any:
        if len(passes) == 7:
            raise _Killed
        passes.append(1)
        return inputs(*arguments)

    monkeypatch.setattr(Batch, "inputs", counted)
    monkeypatch.setattr(streaming, "_STATE_EVERY", 0.0)
    monkeypatch.setattr(streaming, "_SHARE_OF_WRITING", 0)
    with pytest.raises(_Killed):
        stream_least_squares(model, examples, tmp_path / "m", pairs=PAIRS, **QUIET)
    states = {int(path.stem.partition("@")[2]) for path in (tmp_path / "m").glob("*.safetensors")}
    assert len(states) == 1  # and none of an earlier state
    done = states.pop()
    assert done == 7 if chunk == 1 else 3 <= done < 7
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 2
    assert [verdict.damage for verdict in verify(tmp_path / "m")] == [None]
    passes.clear()
    passes += [-1] * 8  # never seven again
    stored = stream_least_squares(model, examples, tmp_path / "m", pairs=PAIRS, **QUIET)
    n_batches = sum(1 for _ in examples.batches(40))
    assert len(passes) - 8 == n_batches - done > 3
    assert_same_predictions(stored, whole)
    for name in ("h.0.safetensors", "attn_in.1.safetensors"):
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "lone" / name).read_bytes()
    assert {path.name for path in (tmp_path / "m").iterdir()} == {
        "config.json", "h.0.safetensors", "attn_in.1.safetensors",
    }  # fmt: skip


def test_few_samples_have_the_penalty_of_their_rows(model, examples, tmp_path):
    few = examples.head(4)
    rows = matlens.collect(model, few, positions="all", **QUIET)
    assert rows.n_rows < 2 * rows.provenance.identity.d_model
    stream_least_squares(model, few, tmp_path / "statistics", pairs="last", **QUIET)
    maps = fit_maps(tmp_path, ridge=None, progress=False)
    expected = typical_penalty(rows, ["h.0", "h.1", "h.2"])
    assert maps.provenance.details["ridge"] == expected > 0
    reference = MapSet.fit(rows, ridge=expected, progress=False)
    for pair, linear in maps.items():
        torch.testing.assert_close(linear.weight, reference[pair].weight, rtol=1e-4, atol=1e-6)
