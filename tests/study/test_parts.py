"""Both parts of a corpus collected: which sentences, what is done again, which positions, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from studying import collect_parts

import matlens


def test_the_parts_share_no_sentence_and_are_those_of_the_corpus(
    small_model: Callable[[str], Any], sentences: matlens.data.Corpus, collected: Path
) -> None:
    tokenizer = small_model("gpt2").tokenizer
    read: dict[str, list[str]] = {}
    for part, size in (("train", 25), ("validation", 15)):
        examples = matlens.activations.Activations.load(collected / part).examples
        pieces = np.split(examples.tokens, examples.offsets[1:-1])
        read[part] = [tokenizer.decode(piece) for piece in pieces]
        assert len(read[part]) == size
    assert sorted(read["train"] + read["validation"]) == sorted(sentences.sentences)


def test_a_failed_collection_leaves_nothing_and_a_finished_part_stays(
    small_model: Callable[[str], Any],
    sentences: matlens.data.Corpus,
    collect: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = matlens.activations.collecting._run
    n_calls = 0

    def fails_late(*arguments: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == fails_at:
            raise RuntimeError("out of memory")
        return run(*arguments)

    monkeypatch.setattr("matlens.activations.collecting._run", fails_late)
    fails_at = 4
    with pytest.raises(RuntimeError, match="out of memory"):
        collect(small_model("gpt2"), tmp_path / "out", batch_tokens=40)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    train, _ = sentences.split(n_train=25, n_validation=15)
    read = matlens.make_examples(small_model("gpt2"), train).up_to_positions()
    n_calls, fails_at = 0, len(list(read.batches(40))) + 2  # the second batch of the validation part
    with pytest.raises(RuntimeError, match="out of memory"):
        collect(small_model("gpt2"), tmp_path / "out", batch_tokens=40)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]
    assert matlens.activations.Activations.load(tmp_path / "out" / "train").n_rows == 25


@pytest.mark.parametrize("options", [{}, {"sample_special": False}])
def test_all_positions_of_a_masked_model_are_no_predictions(
    options: dict[str, Any],
    small_model: Callable[[str], Any],
    sentences: matlens.data.Corpus,
    tmp_path: Path,
) -> None:
    name = "llama" if options else "bert"
    with pytest.raises(matlens.InputError, match=r"masked|special tokens"):
        collect_parts(
            small_model(name),
            sentences,
            tmp_path,
            positions="all",
            **options,
        )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "free", "positions"),
    [
        ("gpt2", {}, 1 << 40, "all"),
        ("gpt2", {}, 40_000, "sampled"),
        ("bert", {}, 1 << 40, "sampled"),
    ],
    ids=["room", "no room", "masked"],
)
def test_all_positions_are_taken_where_sentences_are_few_and_it_can_be(
    name: str,
    options: dict[str, Any],
    free: int,
    positions: str,
    small_model: Callable[[str], Any],
    collect: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("matlens.study.plan.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    train, validation = collect(small_model(name), tmp_path, positions="auto", **options)
    assert (train.positions, validation.positions) == (positions, "sampled")
    if free == 1 << 40:  # what has been begun goes on, whatever room is left
        monkeypatch.setattr("matlens.study.plan.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        again, _ = collect(small_model(name), tmp_path, positions="auto", **options)
        assert again.positions == positions
