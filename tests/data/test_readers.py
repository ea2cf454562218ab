"""How much a model reads is the least of what it and its tokenizer can take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from conftest import N_CTX
from sentences import corpus_of, many

import matlens
from matlens import make_examples


def test_the_shorter_of_the_models_and_the_tokenizers_context_counts(
    model_folder: Callable[[str], Path],
) -> None:
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    corpus = corpus_of(many(3, N_CTX + 10))
    model.tokenizer.model_max_length = 10**30  # what tokenizers say that know of no limit
    assert set(make_examples(model, corpus).lengths.tolist()) == {N_CTX}
    model.tokenizer.model_max_length = 12
    assert set(make_examples(model, corpus).lengths.tolist()) == {12}
