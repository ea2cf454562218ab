"""A folder with activations of training and validation sentences, new for each test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from studying import collect_parts


@pytest.fixture
def collect(sentences):
    """Collects 25 training and 15 validation sentences into a folder."""

    def collect_both(model: Any, folder: Path, *, seed: int = 0, **options: Any) -> Any:
        return collect_parts(model, sentences, folder, seed=seed, **options)

    return collect_both


@pytest.fixture
def collected(small_model, collect, tmp_path):
    """A folder with both parts."""
    collect(small_model("gpt2"), tmp_path / "collected")
    return tmp_path / "collected"
