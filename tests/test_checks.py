"""Public names check the kinds of what they are given, from their annotations."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int
from sklearn.utils import check_random_state
from torch import Tensor

import matlens
from matlens import InputError
from matlens.errors import Fraction, Seed, Tokenizer, check, check_int, checked, plain_number  # fmt: skip

if TYPE_CHECKING:
    from matlens import MapSet


# Made by the library, checks of its own, or below what a user hands over; `cli` takes its words from typer.
UNCHECKED = {
    "InputError", "controlled", "InputWarning", "added", "scaled", "CoefficientChange", "SinkWarning",
    "csv_text", "sink_counts", "Report", "main", "run_study", "Rows",
    "Artifact", "Plan", "result_row", "result_table", "write_files", "write_results",
    "print_members", "print_atlas", "Family", "register", "write_maps", "make_token_examples",
}  # fmt: skip


def public() -> list[tuple[str, Any]]:
    """The functions and classes that `matlens` and its packages export, with their full names."""
    root, found = Path(matlens.__file__).parent, []
    for face in (root / "__init__.pyi", *sorted(root.glob("*/__init__.pyi"))):
        package = "matlens" if face.parent == root else f"matlens.{face.parent.name}"
        for name in re.findall(r"^from \S+ import \w+ as (\w+)", face.read_text(), flags=re.MULTILINE):
            value = getattr(importlib.import_module(package), name)
            if inspect.isfunction(value) or inspect.isclass(value):
                found.append((f"{package}.{name}", value))
    return found


def is_checked(value: Any) -> bool:
    if not inspect.isclass(value):
        return hasattr(value, "__checked__")
    if issubclass(value, tuple):
        return True
    members = [getattr(member, "__func__", member) for name, member in vars(value).items() if name[0] != "_"]
    return all(hasattr(member, "__checked__") for member in members if inspect.isfunction(member))


def test_every_public_function_and_method_is_checked():
    assert len(public()) > 100
    unchecked = {name.rpartition(".")[2] for name, value in public() if not is_checked(value)}
    assert unchecked - UNCHECKED == set()


def test_a_seed_that_is_not_given_is_zero_everywhere():
    """So a number that is made twice, by other parts of the library, is the same."""
    defaults = dict[str, Any]()
    for name, value in public():
        members = {"": value} | (vars(value) if inspect.isclass(value) else {})
        for member, of_member in members.items():
            function = getattr(of_member, "__func__", of_member)
            if inspect.isclass(value) == (not member) or not inspect.isfunction(function):
                continue
            parameter = inspect.signature(function).parameters.get("seed")
            if parameter is not None and parameter.default is not parameter.empty:
                defaults[f"{name}.{member}"] = parameter.default
    assert len(defaults) > 5
    assert {name: seed for name, seed in defaults.items() if seed != 0} == {}


@checked
def taking(
    whole: int = 1,
    number: float = 1.0,
    text: str = "a",
    truth: bool = True,
    word: Literal["all", "last"] = "all",
    texts: Sequence[str] = (),
    named: Mapping[str, int] | None = None,
    ends: Sequence[tuple[int, str]] = (),
    folder: str | Path = "here",
    maps: MapSet | None = None,
    table: pd.DataFrame | None = None,
    vectors: Float[Tensor, "n d"] | None = None,
    any_vectors: Float[Tensor, "... d"] | None = None,
    rows: Bool[Tensor, " n"] | None = None,
    places: Int[np.ndarray, " n"] | None = None,
    function: Callable[[int], int] | None = None,
    layers: Iterable[int | str] | None = None,
    seed: Seed = 0,
    tokenizer: Tokenizer = "unset",
    anything: Any = None,
) -> str:
    return "taken"


GOOD: dict[str, list[Any]] = {
    "whole": [0, -3, np.int64(5), 10**30],
    "number": [1, 2.5, np.float32(3)],
    "text": ["", "a"],
    "truth": [False, np.bool_(True)],
    "word": ["last"],
    "texts": [[], ["a"], ("a", "b"), np.array(["a"])],
    "named": [{}, {"a": 1}],
    "ends": [[], [(1, "a")], [[1, "a"], (2, "b")]],
    "folder": ["out", Path("out")],
    "maps": [matlens.MapSet()],
    "table": [pd.DataFrame()],
    "vectors": [torch.zeros(2, 3), torch.zeros(0, 3, dtype=torch.float16)],
    "any_vectors": [torch.zeros(3), torch.zeros(2, 2, 3)],
    "rows": [torch.ones(3, dtype=torch.bool)],
    "places": [np.arange(3)],
    "function": [abs],
    "layers": [{1: 2}, [1, "h.2"], (layer for layer in range(3)), range(2)],
    "seed": [2**32 - 1],
    "anything": [object()],
}
BAD: dict[str, list[Any]] = {
    "whole": [True, float("nan"), 1 + 0j, 1.5, "1", None, np.arange(2)],
    "number": [float("nan"), float("-inf"), True, torch.zeros(1), "1", None, 1j],
    "text": [1, b"a", None, ["a"]],
    "truth": [0, "yes", None],
    "word": ["first", "", 1, None],
    "texts": ["ab", {"a": 1}, torch.zeros(2, 2), 1, [1], ["a", None], np.arange(2)],
    "named": [{"a": "b"}, {"a": 1, "b": None}, {1: 1}, [], "a"],
    "ends": [[(1,)], ["1a"], (1, "a"), [("a", 1)], [(1, "a", 2)], 1],
    "folder": [1, None, b"here", ["here"]],
    "maps": [{}, "maps", matlens.MapSet],
    "table": [[], {}, np.zeros((1, 1))],
    "vectors": [
        torch.zeros(3),
        torch.zeros(1, 2, 3),
        torch.zeros(2, 3, dtype=torch.int64),
        np.zeros((2, 3)),
        [[1.0]],
    ],
    "any_vectors": [torch.zeros(()), torch.zeros(2, dtype=torch.bool), "v"],
    "rows": [torch.ones(3), torch.ones(3, 1, dtype=torch.bool), [True]],
    # The values behind a mask are not read.
    "places": [
        np.ma.masked_equal(np.arange(3), 1),
        np.zeros(3),
        np.zeros((2, 2), dtype=int),
        torch.arange(3),
    ],
    "function": [1, "abs"],
    "layers": ["h.1", [None], np.array([2.5]), 1, [1.5]],
    "seed": [True, -1, 2**32, 1.0, None],
    "tokenizer": [None, object(), "gpt2"],
}


@pytest.mark.refused
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GOOD for value in GOOD[name]])
def test_what_an_annotation_allows_is_taken(name, value):
    assert taking(**{name: value, "tokenizer": _Tokenizer()}) == "taken"


@pytest.mark.refused
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_what_an_annotation_excludes_raises_and_names_the_argument(name, value):
    with pytest.raises(InputError, match=name) as refusal:
        taking(**{"tokenizer": _Tokenizer(), name: value})
    assert len(str(refusal.value)) < 500


@pytest.mark.refused
@pytest.mark.parametrize("at", [0, 150, 299])
def test_one_wrong_item_of_a_long_list_raises(at):
    texts = ["a"] * 300
    with pytest.raises(InputError, match="texts"):
        taking(tokenizer=_Tokenizer(), texts=[*texts[:at], None, *texts[at:]])


@checked
def of_all_kinds(first: int, /, second: int, *rest: int, third: int = 3, **others: int) -> tuple[Any, ...]:
    return first, second, rest, third, others


def test_arguments_are_passed_on_as_python_binds_them():
    assert of_all_kinds(1, second=2) == (1, 2, (), 3, {})
    assert of_all_kinds(1, 2, 4, 5, third=6, fourth=7) == (1, 2, (4, 5), 6, {"fourth": 7})
    for call in (of_all_kinds, lambda: of_all_kinds(1), lambda: taking(1, whole=2), lambda: taking(what=1)):
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize(
    ("args", "named", "wrong"),
    [(("1", 2), {}, "first"), ((1, "2"), {}, "second"), ((1, 2), {"third": "3"}, "third")],
)
def test_an_argument_is_checked_wherever_it_is_given(args, named, wrong):
    with pytest.raises(InputError, match=wrong):
        of_all_kinds(*args, **named)


def test_scalars_of_numpy_arrive_as_numbers_of_python():
    first, second, rest, third, _ = of_all_kinds(np.int64(1), second=np.int32(2))
    assert [type(each) for each in (first, second, third)] == [int, int, int]
    assert rest == ()


class _Tokenizer:
    def encode(self) -> str:
        return ""

    def decode(self) -> str:
        return ""


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-50, 50))
def test_integers_within_their_bounds_are_taken_and_others_refused(value, low, high):
    if low <= value <= high:
        assert check_int(value, "k", min=low, max=high) == value
    else:
        with pytest.raises(InputError, match="k"):
            check_int(value, "k", min=low, max=high)


@pytest.mark.parametrize("value", [-1e-9, 1.5, float("nan"), "1", None, True, 1j])
def test_fractions_are_from_zero_to_one(value):
    check(np.float32(0.5), Fraction, "share")
    with pytest.raises(InputError, match="share"):
        check(value, Fraction, "share")


def test_the_largest_seed_is_taken_by_torch_numpy_and_scikit_learn():
    check(2**32 - 1, Seed, "seed")
    with pytest.raises(InputError):
        check(2**32, Seed, "seed")
    torch.Generator().manual_seed(2**32 - 1)
    check_random_state(2**32 - 1)


def test_numbers_of_numpy_are_written_as_json():
    given = {"seed": np.int64(3), "ridge": np.float32(0.5), "n": np.array(4), "on": np.bool_(True)}
    written = json.dumps(given, default=plain_number)
    assert json.loads(written) == {"seed": 3, "ridge": 0.5, "n": 4, "on": True}
    for other in (np.zeros(2), object(), b"x"):
        with pytest.raises(TypeError):
            json.dumps(other, default=plain_number)
