"""Lenses are named in tables as before, and what a configuration cannot mean is refused."""

from __future__ import annotations

from typing import Any

import pytest

from matlens import InputError
from matlens.lens.config import PRESETS, LensConfig, closed_forms, layers_read, parse_methods


def test_names_are_those_of_published_tables() -> None:
    assert all(config is None or config.name == name for name, config in PRESETS.items())
    everything = LensConfig(standardise=True, intercept=True, rank=64, sinks="exclude")
    assert everything.name == "normed+affine+narrow(64) without sinks"
    assert LensConfig(ridge=0.01, weighted=True, shared_map=True).name == "one-jump+weighted+ridge(0.01)"
    assert LensConfig(ridge=0.01, toward="identity").name == "ridge-identity(0.01)"
    assert list(parse_methods(["tuned", everything, "mat"])) == ["tuned", everything.name, "mat"]
    assert closed_forms("affine") == {"affine": LensConfig(intercept=True)}


def test_sinks_are_known_from_all_layers() -> None:
    assert layers_read(parse_methods(["mat", "tuned"]), [2], 3) == [2, 3]
    assert layers_read(parse_methods([LensConfig(sinks="exclude"), "tuned"]), [2], 3) == [0, 1, 2, 3]


@pytest.mark.refused
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ridge": -1.0}, "^ridge must be"), ({"ridge": float("nan")}, "^ridge must be"),
        ({"ridge": "best"}, "^ridge must be"), ({"rank": 0}, "^rank must be"),
        ({"sinks": "out"}, "^sinks must be"), ({"toward": "identity"}, "needs a ridge"),
        ({"toward": "identity", "ridge": 1.0, "rank": 3}, "full rank"),
        ({"weighted": True, "standardise": True}, "not both"),
    ],
)  # fmt: skip
def test_what_a_configuration_cannot_mean_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        LensConfig(**options)


@pytest.mark.refused
def test_names_that_there_are_not_are_refused() -> None:
    with pytest.raises(InputError, match=r"method must be one of id, mat, .*, got 'tune'.*'tuned'"):
        parse_methods(["mat", "tune"])
    with pytest.raises(InputError, match="one lens or more"):
        parse_methods([])
    with pytest.raises(InputError, match="tuned cannot be fitted in closed form"):
        closed_forms(["mat", "tuned"])
