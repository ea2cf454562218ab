"""Every public name of the Python API that takes something from a user."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import matlens
from attack.targets_first import FIRST
from attack.targets_reading import READING
from attack.targets_seeing import SEEING

TARGETS = [*FIRST, *READING, *SEEING]

# What takes nothing from a user, or is made by the library alone; and where it is tried instead.
EXEMPT = {
    "InputError": "an error",
    "models.Family": "made by the library",
    "models.block_hook": "a name",
    "models.require_finite": "a check of the library's own",
}


def untried() -> Iterator[str]:
    """Public functions and classes that no target calls, and that nothing is known to excuse."""
    tried = {target.name for target in TARGETS}
    tried |= {name.rpartition(".")[0] for name in tried}
    tried |= {name.split(".")[-1] for name in tried}
    for name, value in public_names():
        if name.split(".")[-1] not in tried and name not in EXEMPT and not _is_result(value):
            yield name


def _is_result(value: Any) -> bool:
    return inspect.isclass(value) and (is_dataclass(value) or issubclass(value, tuple))


def public_names() -> Iterator[tuple[str, Any]]:
    """Functions and classes of all faces."""
    root = Path(matlens.__file__).parent
    for face in (root / "__init__.pyi", *sorted(root.glob("*/__init__.pyi"))):
        room = "" if face.parent == root else face.parent.name
        module = importlib.import_module(f"matlens.{room}" if room else "matlens")
        for name in re.findall(r"^from \S+ import \w+ as (\w+)", face.read_text(), flags=re.MULTILINE):
            value = getattr(module, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{room}.{name}" if room else name, value
