"""A list of texts is taken wherever a corpus is, and gives what a corpus of these texts gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import matlens
from matlens import InputError
from matlens.data import Corpus, make_judged_text, make_windows
from matlens.ffn import text_losses

TEXTS = ["w1 w2 w3", "w7", "w4 w40 w11 w2 w9 w9", "w7"]  # short and repeated ones as well
USES: dict[str, Callable[[Any, Any], Any]] = {
    "make_examples": lambda m, texts: matlens.make_examples(m, texts).tokens,
    "make_windows": lambda m, texts: make_windows(m, texts, size=4).tokens,
    "make_judged_text": lambda m, texts: make_judged_text(m, texts, size=3).truth,
    "text_losses": lambda m, texts: text_losses(m, texts, progress=False).total,
    "Lens.fit": lambda m, texts: matlens.Lens.fit(m, texts, method="ridge(1)", progress=False).maps[1].weight,
}


@pytest.mark.parametrize("name", USES)
def test_texts_are_a_corpus_of_these(name: str, small_model: Callable[[str], Any]) -> None:
    model, use = small_model("gpt2"), USES[name]
    corpus = Corpus("given texts", tuple(TEXTS), len(TEXTS), 0, 0, 0)
    ours, expected = (torch.as_tensor(np.asarray(use(model, texts))) for texts in (TEXTS, corpus))
    assert torch.equal(ours, expected)
    wrong: Any
    for wrong in ("w1 w2", [1, 2], [["w1"]]):
        with pytest.raises(InputError):
            use(model, wrong)
