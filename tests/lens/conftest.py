"""A small model, rows of it to fit on and tokens to evaluate on, collected once."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from conftest import make_sentences

from matlens import collect, make_examples
from matlens.activations.activations import Activations


class Setting(NamedTuple):
    model: Any
    train: Activations
    validation: Activations


@pytest.fixture(scope="session")
def setting(small_model):
    made: dict[str, Setting] = {}

    def of(name: str) -> Setting:
        if name not in made:
            model = small_model(name)
            train, validation = make_sentences().split(n_train=28, n_validation=12, seed=0)
            where = "sampled" if name == "bert" else "all"
            made[name] = Setting(
                model,
                collect(model, make_examples(model, train), positions=where, progress=False),
                collect(model, make_examples(model, validation), progress=False),
            )
        return made[name]

    return of
