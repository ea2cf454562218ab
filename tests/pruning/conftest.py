"""Windows of calibration text, and a small model without a block."""

from __future__ import annotations

import pytest
from calibration_texts import running_text

from matlens import pruning
from matlens.data import make_windows


@pytest.fixture(scope="session")
def windows(small_model):
    """Windows of 24 tokens for a model, of a text of 1,200 words unless told otherwise."""
    return lambda name, n=1200: make_windows(small_model(name), running_text(n), size=24)


@pytest.fixture(scope="session")
def pruned_llama(small_model, windows):
    """A model without its second block."""
    return pruning.prune(small_model("llama"), windows("llama", 600), [1], progress=False)
