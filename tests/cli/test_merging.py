"""Parts of a job on the command line, merged and evaluated like one run."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pandas as pd
import pytest
from command_lines import Outcome
from conftest import make_sentences

import matlens
from matlens.activations import Activations

Matlens = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Figures take longer than all else."""
    monkeypatch.setattr("matlens.study.steps.plot_results", lambda *_, **__: [])


@pytest.fixture
def options(model_folder, tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(make_sentences().sentences))
    corpus = str(tmp_path / "words.txt")
    sizes = ["--train", "30", "--val", "10", "--device", "cpu", "--positions", "all"]
    return ["--model", str(model_folder("llama")), "--corpus", corpus, *sizes]


def test_parts_merged_give_the_table_of_one_run(run_matlens, options, tmp_path):
    whole = run_matlens("run", *options, "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err
    # All positions leave sufficient statistics, and no vectors.
    assert {path.name for path in (tmp_path / "whole").iterdir() if path.is_dir()} == {
        "statistics", "validation", "maps",
    }  # fmt: skip
    for number in (2, 1):
        done = run_matlens("part", "--part", f"{number}/2", *options, "--out", tmp_path / f"s{number}")
        assert done.code == 0, done.err
        assert f"Part {number}/2: sufficient statistics of" in done.out
    joined = run_matlens("merge", tmp_path / "s2", tmp_path / "s1", "--out", tmp_path / "joined")
    assert joined.code == 0, joined.err
    assert "6 maps of" in joined.out
    finished = run_matlens("run", *options, "--out", tmp_path / "joined")
    assert finished.code == 0, finished.err
    tables = [pd.read_csv(tmp_path / name / "results.csv") for name in ("whole", "joined")]
    pd.testing.assert_frame_equal(*tables, rtol=1e-4)
    # The same maps as of stored vectors.
    kept = run_matlens("run", *options, "--keep-rows", "--out", tmp_path / "kept")
    assert kept.code == 0, kept.err
    train, validation = (Activations.load(tmp_path / "kept" / part) for part in ("train", "validation"))
    assert (train.positions, validation.positions) == ("all", "sampled")
    assert train.n_rows == int(train.examples.lengths.sum())
    one, other = (matlens.MapSet.load(tmp_path / name / "maps") for name in ("whole", "kept"))
    assert one.provenance.to_json() == other.provenance.to_json()
    table = pd.read_csv(tmp_path / "kept" / "results.csv")
    pd.testing.assert_frame_equal(tables[0], table, rtol=1e-4)
    # Maps of merged parts are not fitted on other vectors, which lie there.
    refused = run_matlens("merge", tmp_path / "s2", tmp_path / "s1", "--out", tmp_path / "kept")
    assert refused.code == 2
    assert not (tmp_path / "kept" / "statistics").exists()


def test_missing_duplicate_and_unknown_parts_are_refused(run_matlens, options, tmp_path):
    assert run_matlens("part", "--part", "1/3", *options, "--out", tmp_path / "s").code == 0
    refused = run_matlens("merge", tmp_path / "s", "--out", tmp_path / "joined")
    assert refused.code == 2
    assert "missing are 2/3, 3/3" in " ".join(refused.err.split())
    refused = run_matlens("merge", tmp_path / "s", "--pairs", "0:9", "--out", tmp_path / "joined")
    assert refused.code == 2
    assert "out of range" in refused.err
    assert not (tmp_path / "joined").exists()
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    refused = run_matlens("merge", tmp_path / "s", tmp_path / "copy", "--out", tmp_path / "joined")
    assert "1/3, 1/3" in refused.err
    assert not (tmp_path / "joined").exists()
