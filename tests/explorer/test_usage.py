"""Sentences of max activating examples are truncated; the pages' tests compare the examples."""

from __future__ import annotations

import numpy as np
from conftest import make_sentences

from matlens import make_examples
from matlens.explorer.usage import shortened


def test_long_sentences_are_truncated(small_model):
    examples = make_examples(small_model("gpt2"), make_sentences())
    cut = shortened(examples, 7)
    assert cut.lengths.tolist() == np.minimum(examples.lengths, 7).tolist()
    for i in range(len(examples)):
        whole = examples.tokens[examples.offsets[i] :][: cut.lengths[i]]
        assert cut.tokens[cut.offsets[i] : cut.offsets[i + 1]].tolist() == whole.tolist()
    assert cut.positions.tolist() == (cut.lengths - 1).tolist()
