"""A study of a model in memory, in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matlens.activations import Activations
from matlens.data import Corpus
from matlens.study import Study


def study_of(
    model: Any, sentences: Corpus, folder: Path, *, n_train: int = 25, n_validation: int = 15, seed: int = 0,
    **options: Any
) -> Study:  # fmt: skip
    return Study(
        load_model=lambda: model,
        load_parts=lambda: sentences.split(n_train=n_train, n_validation=n_validation, seed=seed),
        out=folder, seed=seed, **options,
    )  # fmt: skip


def collect_parts(
    model: Any, sentences: Corpus, folder: Path, **options: Any
) -> tuple[Activations, Activations]:
    return study_of(model, sentences, folder, **options).stream
