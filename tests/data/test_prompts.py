"""Prompts, running text in windows, and the correct token at each position of a window."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from conftest import N_CTX
from sentences import positions_of, sentences_of

from matlens import InputError
from matlens.data.making import make_windows
from matlens.models.tokens import TextTokens

# Windows of running text


def test_windows_are_the_tokens_of_the_whole_text_one_after_the_other(small_model, sentences, tmp_path):
    model = small_model("gpt2")
    ids = model.tokenizer(" ".join(sentences.sentences))["input_ids"]
    windows = make_windows(model, sentences, size=20)
    assert sentences_of(windows) == [ids[start : start + 20] for start in range(0, len(ids), 20)]
    assert positions_of(windows) == [[len(window) - 1] for window in sentences_of(windows)]
    assert windows.provenance["corpus"] == "words"
    assert windows.provenance["window"] == 20
    assert make_windows(model, sentences).lengths.max() == N_CTX
    path = tmp_path / "text.txt"
    path.write_text(text := "\n".join(sentences.sentences) + "\n\nw1")
    from_file = make_windows(model, path, size=20)
    assert sentences_of(from_file)[0] == sentences_of(windows)[0]
    assert from_file.provenance["corpus_fingerprint"] == sha256(text.encode()).hexdigest()[:16]


def test_what_stands_in_front_of_a_text_stands_in_front_of_each_window(small_model, sentences, monkeypatch):
    model = small_model("llama")
    ids = model.tokenizer(" ".join(sentences.sentences))["input_ids"]
    around = TextTokens([58, *ids, 59], [True, *[False] * len(ids), True])  # a BOS, and an EOS behind all
    monkeypatch.setattr("matlens.data.making.encode_text", lambda *_: around)
    windows = sentences_of(make_windows(model, sentences, size=20))
    assert {window[0] for window in windows} == {58}
    assert [token for window in windows for token in window[1:]] == ids
    assert max(map(len, windows)) == 20


def test_some_windows_are_spread_over_the_text(small_model, sentences):
    model = small_model("llama")
    every = sentences_of(make_windows(model, sentences, size=16))
    whole = [window for window in every if len(window) == 16]
    assert len(whole) < len(every), "the last one is shorter"
    assert sentences_of(make_windows(model, sentences, size=16, max_windows=3)) == [
        whole[0], whole[round((len(whole) - 1) / 2)], whole[-1]
    ]  # fmt: skip
    assert sentences_of(make_windows(model, sentences, size=16, max_windows=999)) == every
    one_too_many = replace(sentences, sentences=(" ".join(["w1"] * 33),))
    assert len(make_windows(model, one_too_many, size=16)) == 2, "a window of one token predicts nothing"


def test_what_makes_no_windows_is_refused(small_model, sentences, tmp_path):
    model = small_model("llama")
    for text, n in (("", 0), ("w1", 1)):
        (tmp_path / "short.txt").write_text(text)
        with pytest.raises(InputError, match=rf"at least two tokens, got {n}"):
            make_windows(model, tmp_path / "short.txt")
    with pytest.raises(InputError, match="predicts masked tokens"):
        make_windows(small_model("bert"), sentences)
    for name in ("gpt2", "bert"):
        with pytest.raises(InputError, match="at least two"):
            make_windows(small_model(name), ["w1 w2 w3 w4"], size=20, targets=True)


def test_a_decoder_has_the_next_token_as_target(small_model, sentences):
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


def test_a_masked_model_has_the_masked_tokens_as_targets(small_model, sentences):
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
