"""Public names check the kinds of what they are given, from their annotations."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import matlens
from matlens import InputError
from matlens.signatures import checked

if TYPE_CHECKING:
    from matlens import MapSet

ROOT = Path(matlens.__file__).parent
# Made by the library, checks of its own, or below what a user hands over; `cli` takes its words from typer.
UNCHECKED = {
    "InputError", "fingerprint", "rounded_fingerprints", "unembed_hash", "controlled", "Family",
    "number_text", "InputWarning", "added", "scaled", "CoefficientChange", "SinkWarning", "csv_text",
    "require_writable", "sink_counts",
    "block_hook", "require_finite", "Report", "main", "run_study", "Rows", "Column",
    "RowFiles", "Workplace", "command_line", "keep_rows", "make_config", "read_rows",
    "result_row", "result_table", "software_versions", "system_errors", "to_json", "write_bytes",
    "print_members", "print_atlas", "register", "WikiLMForCausalLM", "distributed",
    "write_json", "write_results", "write_text", "write_together", "write_maps", "make_token_examples",
    "agglomerate",
}  # fmt: skip


def public() -> Iterator[tuple[str, Any]]:
    for face in (ROOT / "__init__.pyi", *sorted(ROOT.glob("*/__init__.pyi"))):
        room = "matlens" if face.parent == ROOT else f"matlens.{face.parent.name}"
        for name in re.findall(r"^from \S+ import \w+ as (\w+)", face.read_text(), flags=re.MULTILINE):
            value = getattr(importlib.import_module(room), name)
            if (inspect.isfunction(value) or inspect.isclass(value)) and name not in UNCHECKED:
                yield f"{room}.{name}", value


def is_checked(value: Any) -> bool:
    if not inspect.isclass(value):
        return hasattr(value, "__checked__")
    if issubclass(value, tuple) or getattr(value, "_is_protocol", False):
        return True
    members = [getattr(member, "__func__", member) for name, member in vars(value).items() if name[0] != "_"]
    return all(hasattr(member, "__checked__") for member in members if inspect.isfunction(member))


def test_every_public_function_and_method_is_checked() -> None:
    names = dict(public())
    assert len(names) > 150
    assert [name for name, value in names.items() if not is_checked(value)] == []


def test_a_seed_that_is_not_given_is_zero_everywhere() -> None:
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
    assert len(defaults) > 25
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
    seed: int = 0,
    tokenizer: Any = "unset",
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
    "seed": [2**63 - 1],
    "anything": [object()],
}
BAD: dict[str, list[Any]] = {
    "whole": [None, "3", 2.0, True, [1], float("nan"), 1 + 0j],
    "number": [None, "1", float("nan"), float("-inf"), 10**400, [1.0], True, torch.zeros(1)],
    "text": [None, b"a", 3, ["a"]],
    "truth": [None, "no", 1, []],
    "word": ["first", None, 3, ["all"]],
    "texts": ["ab", b"ab", None, 3, [3], [None], ["a", b"b"], {"a": 1}, [["a"]], torch.zeros(2, 2)],
    "named": [[("a", 1)], "a", 3, {"a": "b"}, {"a": 1, "b": None}],
    "ends": [[(1,)], [(1, "a", 2)], [("a", 1)], ["1a"], [1], (1, "a")],
    "folder": [None, 3, "", "a\0b", "x" * 5000, b"x", ["out"]],
    "maps": [{}, [], "maps", 3, torch.zeros(2, 2)],
    "table": [{}, [], "table", pd.Series([1]), np.zeros((2, 2))],
    "vectors": [[[1.0]], np.zeros((2, 3)), torch.zeros(3), torch.zeros(1, 2, 3), torch.zeros(2, 3).long()],
    "any_vectors": [torch.tensor(1.0), torch.zeros(3, dtype=torch.complex64), "h", None.__class__],
    "rows": [torch.ones(3), torch.ones(3, 1, dtype=torch.bool), [True], np.ones(3, dtype=bool)],
    "places": [torch.arange(3), np.zeros(3), [0, 1]],
    "function": ["abs", 3],
    "layers": ["h.1", 3, [None], [2.5]],
    "seed": [-1, 2**63, None, "0", True, 0.0],
    "tokenizer": [None, "gpt2", 3],
}


@pytest.mark.refused
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GOOD for value in GOOD[name]])
def test_what_an_annotation_allows_is_taken(name: str, value: Any) -> None:
    assert taking(**{name: value, "tokenizer": _Tokenizer()}) == "taken"


@pytest.mark.refused
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_what_an_annotation_excludes_is_refused_with_the_parameters_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name} of taking is .*\. Expected .*\.$") as refusal:
        taking(**{name: value})
    assert len(str(refusal.value)) < 500


class _Tokenizer:
    def decode(self) -> str:
        return ""


@checked
@dataclass(frozen=True)
class Kept:
    number: int
    texts: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Kept:
        return cls(int(text))

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    def plus(self, other: int) -> int:
        return self.number + other

    def _hidden(self, other: int) -> str:
        return f"{other}"


def test_all_public_methods_of_a_class_are_checked_and_no_others() -> None:
    assert Kept(3, ("a",)).plus(4) == 7
    assert Kept.parse("5") == Kept(5)
    assert Kept.double(4) == 8
    assert Kept(1)._hidden("x") == "x"  # type: ignore[arg-type]
    attempts: list[tuple[str, Callable[[Any], Any]]] = [
        ("number of Kept is '3'", Kept),
        ("text of Kept.parse is 3", lambda _: Kept.parse(3)),  # type: ignore[arg-type]
        ("number of Kept.double is '3'", Kept.double),
        ("other of Kept.plus is '3'", Kept(1).plus),
    ]
    for message, attempt in attempts:
        with pytest.raises(InputError, match=re.escape(message)):
            attempt("3")


@checked
@contextmanager
def lasting(number: int) -> Iterator[int]:
    yield number


def test_a_context_is_checked_before_it_is_entered() -> None:
    with lasting(3) as number:
        assert number == 3
    with pytest.raises(InputError, match="number of lasting is '3'"):
        lasting("3")  # type: ignore[arg-type]


class Pair(NamedTuple):
    first: int


@checked
def of_other_kinds(pair: Pair, maps: MapSet) -> None:
    pass


def test_classes_are_known_by_name_and_the_message_says_how_to_come_by_one() -> None:
    of_other_kinds(Pair(1), matlens.MapSet())
    with pytest.raises(InputError, match=r"maps of of_other_kinds is the class MapSet\. .*MapSet\.fit"):
        of_other_kinds(Pair(1), matlens.MapSet)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"pair of of_other_kinds is of the kind list, \[1\]"):
        of_other_kinds([1], matlens.MapSet())  # type: ignore[arg-type]


@checked
def of_any_numbers(x: Any, several: Mapping[str, Tensor] | None = None) -> None:
    pass


MATRIX = torch.eye(2)


UNUSUAL: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (Tensor.to_sparse, r"sparse\. Give tensor\.to_dense"),
    "rows": (Tensor.to_sparse_csr, "sparse"),
    "meta": (lambda x: x.to("meta"), "on no device"),
    "quantised": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), r"quantised.*dequantize"),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), r"of eight bits or fewer.*float\(\)"),
    "nested": (lambda x: torch.nested.nested_tensor([x[:1], x], layout=torch.jagged), "nested"),
    "masked": (lambda x: np.ma.masked_equal(x.numpy(), 0), "partly masked"),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_arrays_whose_numbers_do_not_lie_there_are_refused(kind: str) -> None:
    make, message = UNUSUAL[kind]
    array = make(MATRIX)
    with pytest.raises(InputError, match=f"x of of_any_numbers holds numbers that are {message}"):
        of_any_numbers(array)
    with pytest.raises(InputError, match=f"several of of_any_numbers holds numbers that are {message}"):
        of_any_numbers(3, {"h.0": MATRIX, "h.1": array})
    of_any_numbers(MATRIX, {"h.0": MATRIX})
    of_any_numbers(np.ma.array(MATRIX.numpy()))  # nothing in it is masked


def test_calls_that_do_not_fit_the_signature_fail_as_they_do_everywhere() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        taking(unknown=1)  # type: ignore[call-arg]
