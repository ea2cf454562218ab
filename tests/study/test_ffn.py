"""What analyses share is the trace of the named job, and it is made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_sentences

from matlens import InputError, load_corpus, make_examples
from matlens.ffn import trace as module
from matlens.ffn.trace import Trace
from matlens.study.ffn import traced


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "words.txt"
    path.write_text("\n".join(make_sentences().sentences))
    return str(path)


@pytest.mark.parametrize("loaded", [False, True], ids=["by name", "loaded"])
def test_it_is_the_trace_of_the_validation_part_in_a_folder_of_the_jobs_name(
    loaded: bool,
    corpus: str,
    small_model: Callable[[str], Any],
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = small_model("gpt2") if loaded else str(model_folder("gpt2"))
    options: dict[str, Any] = {"sentences": 20, "seed": 3, "k": 2, "device": "cpu"}
    model, found = traced(given, corpus, tmp_path / "out", **options)
    _, part = load_corpus(corpus).split(n_train=1, n_validation=20, seed=3)
    expected = Trace.run(model, make_examples(model, part, seed=3), k=2, seed=3, progress=False)
    assert found.examples.fingerprint == expected.examples.fingerprint
    for key, scores in expected.score.items():
        assert torch.equal(found.score[key], scores)
    (folder,) = (tmp_path / "out" / "traces").iterdir()
    assert folder.name.startswith("gpt2-")
    assert folder.name.endswith("--20-seed3-k2")
    assert "words.txt" in folder.name
    with monkeypatch.context() as patch:
        patch.setattr(module, "stream", None)  # nothing is run again
        traced(given, corpus, tmp_path / "out", **options)
    for other in ({"sentences": 10}, {"seed": 4}, {"k": 3}):
        traced(given, corpus, tmp_path / "out", **(options | other))
    assert len(list((tmp_path / "out" / "traces").iterdir())) == 4


def test_a_corpus_that_is_too_small_is_told_before_the_model_is_loaded(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"1\+40 sentences .* were asked for"):
        traced("no such model", corpus, tmp_path / "out", sentences=40)
    assert not (tmp_path / "out").exists()
