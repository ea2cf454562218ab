"""Evaluations are read in their protocol, and scored as a loop over items, words and layers does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from matlens import InputError, Lens
from matlens.lens.open_sets import EvaluationItem, evaluate_open_sets, read_evaluations

Models = Callable[[str], Any]


def write(folder: Path, name: str, items: list[Any]) -> Path:
    path = folder / f"lens-eval-{name}.json"
    path.write_text(json.dumps({"items": items}))
    return path


def test_each_evaluation_is_read_at_its_own_token(tmp_path):
    write(
        tmp_path,
        "multihop",
        [{"name": "a", "prompt": "The river of tulips is ", "intermediates": ["W"], "target": "R"}],
    )
    write(tmp_path, "poetry", [{"prompt": "First line,\nsecond", "intermediates": ["rhyme"]}])
    write(
        tmp_path, "order-ops", [{"prompt": "(2 + 3) * 4 = ", "intermediates": ["5", "multiplication", "77"]}]
    )
    items = read_evaluations(tmp_path)
    assert list(items) == ["multihop", "order-ops", "poetry"]
    assert items["multihop"] == [EvaluationItem("a", "The river of tulips is", (("W",),))]
    assert items["poetry"][0].text == "First line,\n"
    assert items["order-ops"][0].words == (
        ("5", "five"), ("multiplication", "*", "times", "multiply", "product"), ("77",)
    )  # fmt: skip


def test_scores_are_those_of_a_loop(small_model):
    model = small_model("llama")
    lens = Lens.identity(model)
    texts = ["w1 w2 w3", "w9 w8", "w4 w5 w6 w7", "w3"]
    words = [(("w10",), ("w11", "w12")), (("w13",),), (("tulip",),), (("tulip",), ("w14",))]
    texts += [f"w{i} w{i + 20}" for i in range(20)]
    words += [((f"w{i + 5}",),) for i in range(20)]
    items = [EvaluationItem(str(i), text, of) for i, (text, of) in enumerate(zip(texts, words, strict=True))]
    table = evaluate_open_sets({"id": lens}, {"own": items}, layers=[1, 2], progress=False)
    shares: dict[int, list[float]] = {1: [], 5: [], 10: []}
    for text, of in zip(texts, words, strict=True):
        trajectory = lens.trajectory(text)
        best = []
        for spellings in of:
            ranks = []
            for layer in (1, 2):
                logits = lens.logits(trajectory._vectors[layer], layer)[-1]
                for spelling in spellings:
                    token = model.tokenizer.convert_tokens_to_ids(spelling)
                    if spelling != "tulip":
                        ranks.append(int((logits > logits[token]).sum()))
            if ranks:
                best.append(min(ranks))
        for k in shares:
            if best:
                shares[k].append(sum(rank < k for rank in best) / len(best))
    rows = table.set_index("k")
    for k, values in shares.items():
        assert rows.loc[k, "value"] == pytest.approx(sum(values) / 23)
        assert rows.loc[k, "n"] == 23
    assert (table["metric"] == "pass").all()
    assert table["corpus"].unique().tolist() == ["own"]


@pytest.mark.refused
def test_files_that_are_not_as_expected_are_refused(tmp_path):
    lines = {"prompt": "one line", "intermediates": ["a"]}
    for name, item in (
        ("typo", {"prompt": "a"}),
        ("typo", {"prompt": "a", "intermediates": [3]}),
        ("typo", {"prompt": "a", "intermediates": "word"}),
        ("typo", {"prompt": "a", "intermediates": []}),
        ("poetry", lines),
    ):
        path = write(tmp_path, name, [item])
        with pytest.raises(InputError, match=f"lens-eval-{name}.json must hold the items"):
            read_evaluations(tmp_path)
        path.unlink()
