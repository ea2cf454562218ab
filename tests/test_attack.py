"""The attack of `benchmarks/attack` tells faults from refusals, and names only what is public."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attack.annotations import calls
from attack.arguments import TAKEN
from attack.cases import Case, Unnamed, judge
from attack.world import RECIPES

from matlens import InputError


def _fail(error: BaseException) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run


@pytest.mark.parametrize(
    ("verdict", "run"),
    [
        ("clear", _fail(InputError("layer must be between 0 and 29, got 31."))),
        ("unclear", _fail(InputError("No."))),
        ("unclear", _fail(Unnamed("h is not named"))),
        ("silent", lambda: 3.0),
        ("silent", lambda: None),
        ("traceback", _fail(KeyError("method"))),
    ],
)
def test_a_case_is_judged_by_what_comes_of_it(verdict, run):
    assert judge(Case("a fault", "a case", run)).verdict == verdict
    assert judge(Case("a fault", "a case", lambda: 3.0, right=(3.0).__eq__)).verdict == "clear"
    assert judge(Case("a fault", "a case", lambda: 4.0, right=(3.0).__eq__)).verdict == "silent"


def test_what_the_attack_names_is_public():
    """A recipe for a parameter, or what may be taken, that nothing has any more is to be removed."""
    parameters = [f"{call.name}.{name}" for call in calls() for name in call.hints]
    qualified = [name for name in RECIPES if "." in name and not name.startswith("lens.")]
    assert [name for name in qualified if not any(each.endswith(f".{name}") for each in parameters)] == []
    taken = [name.replace("(", ".") for name in TAKEN]
    assert [name for name in taken if not any(name in each for each in parameters)] == []
