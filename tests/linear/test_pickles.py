"""Pickles are walked and never run: arrays come out as they went in, and anything else is refused."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge

from matlens.errors import InputError
from matlens.linear.pickles import arrays_of, read_pickle

NUMBERS = np.random.default_rng(0).normal(size=(5, 3))
PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


def read(content: bytes) -> list[np.ndarray]:
    return arrays_of(read_pickle(content, "a.pickle"), "a.pickle")


def assert_arrays(content: bytes, *expected: np.ndarray) -> None:
    arrays = read(content)
    assert [array.dtype for array in arrays] == [array.dtype for array in expected]
    for ours, theirs in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_and_tensors_come_out_as_they_went_in(protocol: int) -> None:
    for array in (NUMBERS, NUMBERS.astype(np.float32), np.asfortranarray(NUMBERS), NUMBERS.astype(">f8")):
        assert_arrays(pickle.dumps(array, protocol), array)
    single = torch.from_numpy(NUMBERS).float()
    for tensor in (single, single.double(), single.half(), single.T, single[1:, 1:], single[2]):
        assert_arrays(pickle.dumps(tensor, protocol), tensor.numpy())
    both = [single, single[:, 0]]
    assert_arrays(pickle.dumps(both, protocol), *(tensor.numpy() for tensor in both))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("intercept", [False, True])
def test_linear_models_give_their_coefficients(protocol: int, intercept: bool) -> None:
    x = np.random.default_rng(1).normal(size=(20, 5))
    model = LinearRegression(fit_intercept=intercept).fit(x, x @ NUMBERS + 1)
    assert model.coef_.shape == (3, 5)
    expected = [model.coef_, model.intercept_] if intercept else [model.coef_]
    assert_arrays(pickle.dumps(model, protocol), *expected)


class Runs:
    """What runs a command when it is loaded."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.arguments


def harmful(path: Path) -> list[bytes]:
    """Pickles that leave a file when they are loaded, in some of the ways that there are."""
    command = f"touch {path}"
    tensor = torch.zeros(2)
    state = {"coef_": NUMBERS, "intercept_": Runs(os.system, command)}
    inner = pickle.dumps(Runs(os.system, command))
    return [
        *(pickle.dumps(Runs(os.system, command), protocol) for protocol in range(6)),
        pickle.dumps([tensor, Runs(os.system, command)]),
        pickle.dumps(Runs(eval, f"__import__('pathlib').Path({str(path)!r}).touch()")),
        pickle.dumps(state),
        pickle.dumps(Runs(torch.storage._load_from_bytes, inner)),
        f"(S'{command}'\nios\nsystem\n.".encode(),
        f"(cos\nsystem\nS'{command}'\no.".encode(),
        pickle.dumps(tensor)[:-1] + pickle.dumps(Runs(os.system, command)),
    ]


def test_nothing_is_run(tmp_path: Path) -> None:
    path = tmp_path / "touched"
    for content in harmful(path):
        with pytest.raises(InputError, match=r"a.pickle is a pickle|a.pickle is damaged|a.pickle holds"):
            read(content)
        assert not path.exists()
    for content in harmful(path)[:10]:  # where they are loaded they do harm
        with contextlib.suppress(Exception):
            pickle.loads(content)
        assert path.exists()
        path.unlink()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Path("a"), r"asks for 'pathlib\S*Path'.*Expected arrays of numpy.*Nothing of it was run"),
        (Ridge(), r"asks for 'sklearn.linear_model._ridge.Ridge'"),
        ({1, 2}, "with the instruction EMPTY_SET"),
        (LinearRegression(), "is damaged"),  # not fitted
        (np.arange(3), "not of floating point"),
        (torch.arange(3), "asks for 'torch.LongStorage'"),
        ("text", "holds 'text'. Expected an array or a tensor"),
        ([], r"holds \[\]"),
    ],
)
def test_what_is_no_array_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(pickle.dumps(value))


def test_damaged_pickles_are_refused_in_words() -> None:
    whole = pickle.dumps(torch.from_numpy(NUMBERS)), pickle.dumps(NUMBERS), pickle.dumps([NUMBERS])
    draw = np.random.default_rng(0)
    refused = 0
    for content in whole:
        cut = [content[:length] for length in range(0, len(content), 11)]
        changed = []
        for place in draw.integers(len(content), size=60):
            changed.append(content[:place] + bytes([draw.integers(256)]) + content[place + 1 :])
        for damaged in [*cut, *changed]:
            try:
                assert all(array.dtype.kind == "f" for array in read(damaged))
            except InputError:
                refused += 1
    assert refused > 60
    shape = pickle.dumps(NUMBERS, 2).replace(b"K\x05K\x03\x86", b"K\x06K\x03\x86")
    with pytest.raises(InputError, match="more or fewer numbers than it says"):
        read(shape)


def test_a_tensor_of_more_numbers_than_are_stored_takes_no_memory() -> None:
    one = torch.zeros(1).expand(300_000, 300_000)  # 360 GB, if it were made
    with pytest.raises(InputError, match="more numbers than its storage"):
        arrays_of(read_pickle(pickle.dumps(one), "map"), "map")


def test_what_holds_itself_many_times_over_is_named_shortly() -> None:
    # Forty tuples, each of two of the one before, and a call of all of them.
    nested = b"(" + b"t" + b"".join(b"\x94" + b"h" + bytes([i]) + b"\x86" for i in range(40))
    content = b"\x80\x04" + b"ccollections\nOrderedDict\n" + nested + b"\x85R."
    with pytest.raises(InputError, match="a Record"):
        arrays_of(read_pickle(content, "map"), "map")
