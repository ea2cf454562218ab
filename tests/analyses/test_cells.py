"""Results of long analyses are computed once by name, and several studies share a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from studies import Cells, Report, Study, run_study

from matlens.io import Artifact


def test_an_analysis_of_several_is_given_a_study_for_each_and_a_model_is_loaded_once(
    corpora, tmp_path, monkeypatch
):
    loads, seen = list[str](), list[tuple[Any, str]]()
    monkeypatch.setattr("matlens.models.places.locate", lambda *_: None)
    monkeypatch.setattr("matlens.models.loading.load", lambda name, **_: loads.append(name) or object())

    def work(studies: Iterator[Study], report: Report) -> None:
        seen.extend((study.model, study.corpus.name) for study in studies)

    files = [str(corpora / f"{name}.txt") for name in ("words", "others")]
    given = ["--model", "m1", "--model", "m2", "--model", "m1", "--corpus", files[0], "--corpus", files[1]]
    monkeypatch.setattr(sys, "argv", ["analysis.py", *given, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run_study(work, model=["a"], corpus=["b"])
    assert not ended.value.code
    assert loads == ["m1", "m2"]
    assert [name for _, name in seen] == files * 2
    assert seen[0][0] is seen[1][0] is not seen[2][0]


def test_a_cell_is_computed_once_and_stored_with_its_seconds(tmp_path):
    made, seconds = list[str](), list[dict[str, float]]()

    def make(name: str) -> dict[str, Any]:
        made.append(name)
        total = sum(i * i for i in range(400_000))  # some work
        return {"value": torch.tensor([total, len(made)]), "words": [name]}

    for _ in range(2):
        with Artifact.writing(tmp_path / "cells", "cells", {"a": 1}) as artifact:
            cells = Cells(artifact)
            for name in ("chain 1 2", "chain, healed 1 2", "chain 1 2"):
                cell = cells.get(name, partial(make, name))
                assert (int(cell["value"][1]), cell["words"]) == (1 + ("," in name), [name])
            seconds.append(cells.seconds)
    assert seconds[0] == seconds[1]
    assert min(seconds[0].values()) > 0
    assert made == ["chain 1 2", "chain, healed 1 2"]
