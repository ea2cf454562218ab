"""Calibration text of small models, and the matrices that pruning changes."""

from __future__ import annotations

import numpy as np
from conftest import WORDS

from matlens.data import Corpus

# The matrix by which an FFN writes, in each block.
WRITERS = {
    "gpt2": "mlp.c_proj", "llama": "mlp.down_proj", "neox": "mlp.dense_4h_to_h", "gptj": "mlp.fc_out",
    "falcon-alibi": "mlp.dense_4h_to_h", "bloom": "mlp.dense_4h_to_h",
}  # fmt: skip


def running_text(n_words: int, seed: int = 3, name: str = "text") -> Corpus:
    words = np.random.default_rng(seed).choice(WORDS, n_words)
    return Corpus(name, (" ".join(words),), 1, 0, 0, 0)
