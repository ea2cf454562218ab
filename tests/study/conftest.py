"""A folder with what a model reads of the training and validation sentences, collected anew for each test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from studying import collect_parts

import matlens


@pytest.fixture
def collect(sentences: matlens.data.Corpus) -> Callable[..., Any]:
    """25 sentences to train on and 15 to validate on, read by a model into a folder."""

    def collect_both(model: Any, folder: Path, *, seed: int = 0, **options: Any) -> Any:
        return collect_parts(model, sentences, folder, seed=seed, **options)

    return collect_both


@pytest.fixture
def collected(small_model: Callable[[str], Any], collect: Callable[..., Any], tmp_path: Path) -> Path:
    """A folder with both parts, read by the first model."""
    collect(small_model("gpt2"), tmp_path / "collected")
    return tmp_path / "collected"
