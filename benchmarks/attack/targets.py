"""Every public name of the Python API that takes something from a user."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import matlens
from attack.signatures import OF_EACH
from attack.targets_atlas import ATLAS
from attack.targets_comparing import COMPARING
from attack.targets_first import FIRST
from attack.targets_judging import JUDGING
from attack.targets_lenses import LENSES
from attack.targets_parts import PARTS
from attack.targets_reading import READING
from attack.targets_rooms import ROOMS
from attack.targets_seeing import SEEING
from attack.targets_training import TRAINING

TARGETS = [*FIRST, *READING, *COMPARING, *SEEING, *LENSES, *JUDGING, *ROOMS, *PARTS, *TRAINING, *ATLAS]

# What takes nothing from a user, or is made by the library alone; and where it is tried instead.
EXEMPT = {
    "models.Family": "made by the library",
    "models.block_hook": "a name",
    "models.check_finite": "a check of the library's own",
    "cli.print_atlas": "prints what the library has computed",
    "cli.print_members": "prints what the library has computed",
    "pruning.task_scores": "needs a package that is no part of the installation",
    "cli.Report": "writes what analyses have computed",
    "cli.run_study": "takes an analysis, which is no user's input",
    "metrics.Estimate.without_interval": "made by the library",
    "metrics.r2_and_steady": "what metrics.r2 calls",
    "metrics.warn_of_steady": "takes what metrics.r2_and_steady gives",
    "linear.arrays_of": "what linear.convert_published calls",
    "linear.read_pickle": "what linear.convert_published calls",
    "linear.write_maps": "what MapSet.save and fit_maps call",
    "models.describe_changes": "words of what changes_of gives",
    "distributed": "takes what torchrun says",
    **{
        f"parallel.{name}": "takes what other processes of the job have"
        for name in (
            "distributed", "broadcast", "check_same", "barrier", "gather", "broadcast_tensors", "concatenate",
            "merge", "silence", "waiting",
        )
    },
    "io.number_text": "words of numbers that the library has computed",
    **dict.fromkeys(
        (
            "Lens.push_to_hub", "Lens.from_pretrained", "io.HubRepository.snapshot",
            "io.HubRepository.download", "io.HubRepository.commit",
        ),
        "asks the hub, of which tests have a stand-in",
    ),
    "numerics.agglomerate": "what ffn.Clusters.fit calls",
    "numerics.split_product": "what linear.LeastSquares calls",
    "io.HubRepository": "a name that the hub's client looks at",
    "io.HubSnapshot": "made by the library",
    "models.WikiLMConfig": "refuses what makes no model, as tests/models/test_modelling.py tries",
    "models.WikiLMForCausalLM": "takes a WikiLMConfig and nothing else",
    "models.WikiLMForCausalLM.features": "what TransformerLens and transformers call",
    "models.WikiLMForCausalLM.forward": "what TransformerLens and transformers call",
    # The library's own writers and readers: what users pass through them is tried by what calls them, and
    # what lies in the files by mutations.
    **dict.fromkeys(
        (
            f"io.{name}"
            for name in (
                "check_writable", "system_errors", "to_json", "write_bytes", "write_json", "write_text",
                "write_together", "Workplace", "make_config", "RowFiles", "keep_rows", "read_rows",
                "Column.header", "csv_text", "result_row", "result_table", "write_results",
            )
        ),
        "called by the library alone",
    ),
}  # fmt: skip
_CALLED = ("__call__", "__getitem__")


def untried() -> Iterator[str]:
    """Public functions, classes and methods that take something, and that no target calls."""
    tried = {id(_resolved(target.name)) for target in TARGETS}
    named = {target.name.rpartition(".")[2] for target in TARGETS}
    for name, value in public_names():
        if name in EXEMPT or id(_plain(value)) in tried:
            continue
        if inspect.isfunction(value) and _takes_something(value):
            yield name
        elif inspect.isclass(value):
            yield from _untried_of_class(name, value, tried, named)


def _untried_of_class(name: str, value: type, tried: set[int], named: set[str]) -> Iterator[str]:
    methods = {
        key: member
        for key, member in vars(value).items()
        if isinstance(member, classmethod | staticmethod) or inspect.isfunction(member)
        if key in _CALLED or not key.startswith("_")
    }
    for key, member in methods.items():
        function = _plain(member)
        if id(function) not in tried and f"{name}.{key}" not in EXEMPT and _takes_something(member):
            yield f"{name}.{key}"
    makers = [member for member in methods.values() if isinstance(member, classmethod)]
    made = _is_result(value) or any(id(_plain(member)) in tried for member in makers)
    if not made and value.__name__ not in named and _takes_something(value):
        yield name


def _resolved(name: str) -> Any:
    value: Any = matlens
    for part in name.split("."):
        value = getattr(value, part)
    return _plain(value)


def _plain(value: Any) -> Any:
    """A function itself, of what binds it to a class."""
    return getattr(value, "__func__", value)


def _takes_something(value: Any) -> bool:
    function = _plain(value)
    parameters = [*inspect.signature(function).parameters.values()]
    if not inspect.isclass(value) and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    listed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(each.name not in OF_EACH for each in parameters if each.kind not in listed)


def _is_result(value: Any) -> bool:
    """Whether a class is no more than what functions give back, a name, a warning or a protocol."""
    kinds = (tuple, Enum, BaseException)
    protocol = getattr(value, "_is_protocol", False)
    return is_dataclass(value) or protocol or issubclass(value, kinds)


def public_names() -> Iterator[tuple[str, Any]]:
    """Functions and classes of the package's face, and of the faces of the rooms that it names."""
    root = Path(matlens.__file__).parent
    top = (root / "__init__.pyi").read_text()
    rooms = re.findall(r"^from \. import (\w+) as", top, flags=re.MULTILINE)
    for room in ("", *rooms):
        face, module = root / room / "__init__.pyi", getattr(matlens, room) if room else matlens
        listed = _names_on(face) if face.is_file() else _own_names(module)
        for name in listed:
            value = getattr(module, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{room}.{name}" if room else name, value


def _names_on(face: Path) -> list[str]:
    return re.findall(r"^from \S+ import \w+ as (\w+)", face.read_text(), flags=re.MULTILINE)


def _own_names(module: Any) -> list[str]:
    """Public names of a floor of one module."""
    homes = {name: getattr(value, "__module__", "") for name, value in vars(module).items()}
    return [name for name, home in homes.items() if home == module.__name__ and not name.startswith("_")]
