"""Value vectors are chosen by what a grader says of their top tokens, and chance is the seed's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import N_LAYERS, make_tokenizer
from control.selection import grade_values
from plain_values import plain_values

from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors


class EvenWords:
    """A grader to which words with an even number are toxic."""

    name, attributes = "even", ("toxicity",)

    def grade(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        return {"toxicity": np.array([share_of_even_words(text) for text in texts])}


def share_of_even_words(text: str) -> float:
    return sum(word[-1] in "02468" for word in text.split()) / len(text.split())


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_top_tokens_of_every_value_vector_are_graded_together(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model, plain = small_model(name), plain_model(name)
    values = ValueVectors(model)
    graded = grade_values(
        values,
        Projection.from_model(model).top_of_all(values, 5, progress=False),
        model.tokenizer,
        EvenWords(),
    )
    assert len(graded) == len(values)
    tokenizer, e = make_tokenizer(bert=name == "bert"), plain.get_output_embeddings().weight.detach()
    assert list(graded) == ["value", "layer", "index", "text", "score"]
    for layer in range(N_LAYERS):
        of_layer = graded[graded["layer"] == layer]
        for row, v in zip(of_layer.itertuples(), plain_values(name, plain, layer), strict=True):
            words = [tokenizer.decode([t]) or f"<{t}>" for t in (e @ v).topk(5).indices.tolist()]
            assert row.value == f"L{layer}D{row[3]}"
            assert row.text == " ".join(words)
            assert row.score == share_of_even_words(row.text)
