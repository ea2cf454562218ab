"""What a user hands over is read or refused in a word."""

from __future__ import annotations

import json
import math
import re
from enum import StrEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from matlens.arguments import (
    plain_number,
    require_choice,
    require_kind,
    require_number,
    require_seed,
    require_whole,
    short,
)
from matlens.errors import InputError


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-50, 50))
def test_whole_numbers_within_their_bounds_are_read_and_others_refused(value, least, most):
    if least <= value <= most:
        assert require_whole(value, "k", least=least, most=most) == value
    else:
        with pytest.raises(InputError, match=re.escape(f"k is {value}. Expected a whole number from")):
            require_whole(value, "k", least=least, most=most)


@pytest.mark.parametrize("value", [True, 2.0, "2", None, math.nan, [2], np.array([1, 2])])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(InputError, match="Expected a whole number"):
        require_whole(value, "k")


def test_numpy_integers_are_whole_numbers():
    assert require_whole(np.int32(3), "k") == 3
    assert type(require_whole(np.int64(3), "k")) is int


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, "1", None, True, 10**400, 1j])
def test_what_is_no_finite_number_of_at_least_zero_is_refused(value):
    with pytest.raises(InputError, match="Expected a number of at least 0"):
        require_number(value, "The ridge", least=0)


def test_numbers_are_read_as_floats():
    assert require_number(0, "The ridge", least=0) == 0.0
    assert require_number(np.float32(0.5), "The share", most=1) == 0.5
    with pytest.raises(InputError, match="of at most 1"):
        require_number(1.5, "The share", most=1)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**4000, 1.5, "1", None])
def test_seeds_that_no_generator_takes_are_refused_shortly(seed):
    with pytest.raises(InputError, match="The seed is ") as refusal:
        require_seed(seed)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_seeds_at_their_bounds_are_taken_by_torch(seed):
    assert torch.Generator().manual_seed(require_seed(seed)).initial_seed() == seed


def test_objects_of_another_kind_are_refused_with_the_way():
    require_kind("a", str, "text", way="")
    with pytest.raises(InputError, match=r"model is a str\. Expected a int or float\. Load it\."):
        require_kind("a", (int, float), "model", way="Load it.")


def test_words_are_chosen_from_a_list():
    assert require_choice("last", ("last", "all"), "pairs") == "last"
    for value in ("first", 3, None, ["last"]):
        with pytest.raises(InputError, match="Expected one of last, all"):
            require_choice(value, ("last", "all"), "pairs")


def test_numbers_of_numpy_are_written_as_json():
    given = {"seed": np.int64(3), "ridge": np.float32(0.5), "n": np.array(4), "on": np.bool_(True)}
    assert json.loads(json.dumps(given, default=plain_number)) == {
        "seed": 3,
        "ridge": 0.5,
        "n": 4,
        "on": True,
    }
    for other in (np.zeros(2), object(), b"x"):
        with pytest.raises(TypeError, match="cannot be written as JSON"):
            json.dumps(other, default=plain_number)


def test_long_values_are_cut():
    assert len(short("a" * 10**6)) < 60
    assert len(short(list(range(10**5)))) < 60
    assert short(torch.zeros(2, 3)) == "a Tensor of the shape (2, 3)"
    assert short(StrEnum("Method", ["chain"]).chain) == "'chain'"
    assert short(10**100) == "a number of more than thirty digits"
