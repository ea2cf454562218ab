"""Text with the right token at each place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from matlens import InputError
from matlens.data import Corpus, JudgedText, make_judged_text, make_windows


def test_a_decoder_is_to_say_the_next_token(small_model: Callable[[str], Any], sentences: Corpus) -> None:
    model = small_model("gpt2")
    text = make_judged_text(model, sentences, size=10, most=4)
    windows = make_windows(model, sentences, size=10, most=4)
    assert text.examples.tokens.tolist() == windows.tokens.tolist()
    assert text.texts.tolist() == sorted([0, 1, 2, 3] * 9)
    for s in range(4):
        window = windows.tokens[10 * s : 10 * (s + 1)]
        assert text.examples.positions[text.texts == s].tolist() == list(range(9))
        assert text.truth[text.texts == s].tolist() == window[1:].tolist()


def test_a_masked_model_is_to_say_what_masks_hide(
    small_model: Callable[[str], Any], sentences: Corpus
) -> None:
    model = small_model("bert")
    text = make_judged_text(model, sentences, size=30, most=12)
    assert len(text.examples) == 12
    whole = [model.tokenizer(sentence)["input_ids"] for sentence in sentences.sentences[:12]]
    for s, ids in enumerate(whole):
        tokens = text.examples.tokens[text.examples.offsets[s] : text.examples.offsets[s + 1]].copy()
        places = text.examples.positions[text.texts == s]
        assert len(places) == max(1, round(0.15 * (len(ids) - 2)))
        assert set(tokens[places]) == {model.tokenizer.mask_token_id}
        tokens[places] = text.truth[text.texts == s]
        assert tokens.tolist() == ids
    other = make_judged_text(model, sentences, size=30, most=12, seed=1)
    assert other.examples.positions.tolist() != text.examples.positions.tolist()


def test_too_little_text_is_refused(small_model: Callable[[str], Any]) -> None:
    one = Corpus("one", ("w1 w2 w3 w4",), 1, 0, 0, 0)
    for name in ("gpt2", "bert"):
        with pytest.raises(InputError, match="Expected two at least"):
            make_judged_text(small_model(name), one, size=20)


def test_as_many_right_tokens_as_positions(small_model: Callable[[str], Any], sentences: Corpus) -> None:
    text = make_judged_text(small_model("gpt2"), sentences, size=10, most=4)
    with pytest.raises(InputError, match="Expected one for each"):
        JudgedText(text.examples, np.arange(3))
