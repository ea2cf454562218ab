"""Calibration text of small models, and the matrices that pruning changes."""

from __future__ import annotations

import numpy as np
from conftest import SITE_MODULES, WORDS

from matlens.data import Corpus

# The matrix by which an FFN writes, in each block.
WRITERS = {name: sites["ffn_post"][0] for name, sites in SITE_MODULES.items() if "ffn_post" in sites}
WRITERS["bloom"] = "mlp.dense_4h_to_h"


def running_text(n_words: int, seed: int = 3, name: str = "text") -> Corpus:
    words = np.random.default_rng(seed).choice(WORDS, n_words)
    return Corpus(name, (" ".join(words),), 1, 0, 0, 0)
