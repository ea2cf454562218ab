"""Windows of running text, and the correct token at each of their positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from matlens import InputError
from matlens.data import Corpus, make_windows

Models = Callable[[str], Any]


def test_a_decoder_has_the_next_token_as_target(small_model: Models, sentences: Corpus) -> None:
    model = small_model("gpt2")
    windows = make_windows(model, sentences, size=10, max_windows=4)
    text = make_windows(model, sentences, size=10, max_windows=4, targets=True)
    assert text.tokens.tolist() == windows.tokens.tolist()
    assert text.sentences.tolist() == sorted([0, 1, 2, 3] * 9)
    for s in range(4):
        window = windows.tokens[10 * s : 10 * (s + 1)]
        assert text.positions[text.sentences == s].tolist() == list(range(9))
        assert text.targets[text.sentences == s].tolist() == window[1:].tolist()
    assert text.select(np.array([1, 3])).targets.tolist() == text.targets[text.sentences % 2 == 1].tolist()
    with pytest.raises(InputError, match="one per position"):
        replace(text, targets=np.arange(3))


def test_a_masked_model_has_the_masked_tokens_as_targets(small_model: Models, sentences: Corpus) -> None:
    model = small_model("bert")
    text = make_windows(model, sentences, size=30, max_windows=12, targets=True)
    assert len(text) == 12
    whole = [model.tokenizer(sentence)["input_ids"] for sentence in sentences.sentences[:12]]
    for s, ids in enumerate(whole):
        tokens = text.tokens[text.offsets[s] : text.offsets[s + 1]].copy()
        places = text.positions[text.sentences == s]
        assert len(places) == max(1, round(0.15 * (len(ids) - 2)))
        assert set(tokens[places]) == {model.tokenizer.mask_token_id}
        tokens[places] = text.targets[text.sentences == s]
        assert tokens.tolist() == ids
    other = make_windows(model, sentences, size=30, max_windows=12, targets=True, seed=1)
    assert other.positions.tolist() != text.positions.tolist()


def test_a_single_window_is_refused(small_model: Models) -> None:
    one = Corpus("one", ("w1 w2 w3 w4",), 1, 0, 0, 0)
    for name in ("gpt2", "bert"):
        with pytest.raises(InputError, match="at least two"):
            make_windows(small_model(name), one, size=20, targets=True)
