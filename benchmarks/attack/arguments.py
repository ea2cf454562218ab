"""Cases of what annotations cannot say: layers that a model has not, vectors and artifacts of another one."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import matlens
from attack.annotations import Call, calls, fits
from attack.cases import Case, quiet
from attack.meaning import has_no_number, is_nothing, meaning
from attack.world import NEW, World
from matlens import data, patching

RANGE, HUGE, SHAPE, STORAGE, FINITE, EMPTY, OTHER, FILES = (
    "numbers and names out of range",
    "huge numbers and texts",
    "wrong shapes",
    "arrays of other kinds",
    "NaN and infinity",
    "nothing at all",
    "other models",
    "paths, links and devices",
)
_HUGE = 10**40
# Items of lists that no model has.
_ITEMS: dict[str, tuple[Any, ...]] = {
    "sites": ("bogus.1", "h.99", "", "x" * 10**6),
    "names": ("L99D0", "L0D999", (0, _HUGE), "x" * 10**6),
    "words": ("absent", "", "w1 w2", "x" * 10**6),
    "prompts": ("", "w1 " * 10**4, "w1 \ud800"),
    "pairs": ((0, 99), (3, 0), ("bogus.0", "h.3"), (0, _HUGE)),
    "methods": ("bogus", "rank=0", "+" * 10**5),
}
_LAYERS = ("layer", "first", "last", "row", "cluster")  # that a model, or a part of it, has or has not
_OF_A_MODEL = (
    "TransformerBridge", "Activations", "MapSet", "LinearMap", "Lens", "Readout", "Trace",
    "ValueVectors", "Projection", "Updates", "Clusters", "Provenance", "ModelIdentity",
)  # fmt: skip
# Where functions may take what is unusual: a site or a value vector is named before a model is known, all are
# given where fewer are there, nothing is changed where no change is asked for, and words are for people.
TAKEN = (
    "Site.parse(text", "resolve(site", "resolve_pairs(pairs",
    "ValueVector.parse(text", "ValueVector(layer", "Variant(first", "Variant(replacements", "Study(",
    "head(n", "at(row",
    "trajectory(layers", "patched(replacements",
    "prune(blocks", "fit_samples(pairs",
    "Study(out", "Study(pairs", "shards(sites", "controlled(vectors", "blocks(vectors", "plots.save(path",
    "prune_attention(attention", "ModelIdentity.difference(other", "origin_of(maps",
)  # fmt: skip


class Bad(NamedTuple):
    """A bad value, the class of what is wrong with it, and what it is called."""

    fault: str
    label: str
    value: Any


def argument_cases(world: World) -> Iterator[Case]:
    """Every public function that can be called with what the world has, with what is bad for it in turn."""
    for call in calls():
        if (found := working(call, world)) is not None:
            yield from _cases_of(call, *found, world)


def working(call: Call, world: World) -> tuple[Callable[..., Any], dict[str, Any], str] | None:
    """What is called, good arguments of it, and what comes of them; None where the world has none."""
    for by_class in (False, True):
        with contextlib.suppress(Exception), quiet():
            function, good = _ready(call, world, by_class=by_class)
            return function, good, meaning(used(world, function(**_fresh(world, good))))
    return None


def _ready(call: Call, world: World, *, by_class: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    function = call.function
    if call.owner is not None:
        function = getattr(world[call.owner.__name__], function.__name__)
    parts, good = call.name.split("."), {}
    for name in inspect.signature(function).parameters:
        hint = call.hints.get(name)
        kinds = [part.__name__ for part in (hint, *get_args(hint)) if getattr(part, "__name__", "") in world]
        qualified = [".".join((*parts[i:], name)) for i in range(len(parts))]
        names = [*qualified, *(kinds if by_class else []), name, *kinds]
        if name == "progress":
            good[name] = False
        elif name in call.arguments or name == "n_clusters":
            good[name] = next(world[each] for each in names if each in world)
    return function, good


def _fresh(world: World, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments, with a path where nothing is yet for each that asks for one."""
    return {name: world.fresh("out") if value is NEW else value for name, value in arguments.items()}


def _cases_of(
    call: Call, function: Callable[..., Any], good: dict[str, Any], expected: str, world: World
) -> Iterator[Case]:
    objects = (*good.values(), getattr(function, "__self__", 0))
    alone = sum(type(value).__name__ in _OF_A_MODEL for value in objects) < 2
    for name, hint in call.hints.items():
        value = good.get(name, world[name] if name in world and fits(world[name], hint) else None)
        for bad in bads(name, value, world):
            if bad.fault == OTHER and alone:
                continue
            label = f"{call.name}({name}={bad.label})"

            def run(name: str = name, bad: Bad = bad) -> Any:
                made = bad.value(world) if callable(bad.value) else bad.value
                return used(world, function(**_fresh(world, good) | {name: made}))

            yield Case(bad.fault, label, run, partial(_may_take, label, bad.fault, expected))


def _may_take(label: str, fault: str, expected: str, result: Any) -> bool:
    """Whether a result is that of the good call, shows that nothing was known, or is expected otherwise."""
    if label.partition("=")[0].endswith(TAKEN) or meaning(result) == expected:
        return True
    return (fault == FINITE and has_no_number(result)) or (fault == EMPTY and is_nothing(result))


def bads(name: str, value: Any, world: World) -> Iterator[Bad]:
    """What is bad in the place of a good value, whatever its annotation says."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor | np.ndarray):
        yield from _arrays(torch.as_tensor(value))
    elif kind in _OF_A_MODEL:
        yield Bad(OTHER, "of other weights", lambda w: w.other[name if name in w else kind])
    elif isinstance(value, data.Examples):
        yield from _examples(value)
    elif isinstance(value, pd.DataFrame):
        yield Bad(EMPTY, "no rows", value.head(0))
    elif isinstance(value, Path) or value is NEW:
        yield from _paths(world)
    elif name in _LAYERS:
        yield from (Bad(RANGE, str(n), n) for n in (99, -99))
    elif name in ("n", "k"):
        yield Bad(HUGE, "10**40", _HUGE)
    elif name == "prompt":
        yield from (Bad(EMPTY, repr(text), text) for text in ("", " "))
        yield from (
            Bad(HUGE, label, text) for label, text in (("long", "w1 " * 10**4), ("half a pair", "w1 \ud800"))
        )
    elif isinstance(value, str):
        yield Bad(EMPTY, "''", "")
        if re.fullmatch(r"h\.\d|L\d+D\d+", value):
            yield from (Bad(RANGE, text, text) for text in ("h.99", "bogus.1", "L99D0", "h." + "9" * 5000))
    elif isinstance(value, list | tuple):
        yield Bad(EMPTY, "[]", [])
        for item in _ITEMS.get(name, (99, -99, _HUGE) if isinstance(value[0], int) else ()):
            yield Bad(RANGE, f"[{str(item)[:9]}]", [item])
    elif isinstance(value, Mapping):
        yield Bad(EMPTY, "{}", {})


def _arrays(good: torch.Tensor) -> Iterator[Bad]:
    yield Bad(SHAPE, "too narrow", good[..., :-1])
    yield Bad(SHAPE, "too wide", torch.cat([good, good], -1))
    yield Bad(STORAGE, "sparse", good.to_sparse())
    yield Bad(STORAGE, "on no device", good.to("meta"))
    yield Bad(EMPTY, "no columns", good[..., :0])
    if good.is_floating_point():
        yield Bad(STORAGE, "quantised", torch.quantize_per_tensor(good.float(), 0.1, 0, torch.qint8))
        for label, number in (("NaN", torch.nan), ("infinity", torch.inf)):
            spoilt = good.clone()
            spoilt[..., 0] = number
            yield Bad(FINITE, f"with {label}", spoilt)


def _examples(good: data.Examples) -> Iterator[Bad]:
    none = {"tokens": good.tokens[:0], "offsets": good.offsets[:1], "positions": good.positions[:0]}
    changes = {
        "no examples": none,
        "tokens past the vocabulary": {"tokens": good.tokens + 1000},
        "negative tokens": {"tokens": good.tokens - 1000},
        "positions past the end": {"positions": good.positions + 500},
        "negative positions": {"positions": good.positions - 500},
        "offsets backwards": {"offsets": good.offsets[::-1].copy()},
    }
    for label, change in changes.items():
        yield Bad(RANGE, label, lambda _, change=change: replace(good, **change))


def _paths(world: World) -> Iterator[Bad]:
    """Where no file can be read, and none written."""
    yield from (Bad(FILES, path, path) for path in ("/proc/nothing/there", "/dev/null/x"))
    yield Bad(FILES, "a link to itself", _loop)
    yield Bad(FILES, "below a text", lambda w: w.text / "folder")


def _loop(world: World) -> Path:
    path = world.fresh("link")
    path.symlink_to(path.name)
    return path


def used(world: World, result: Any) -> Any:
    """What a user would do with a result: draw a figure, patch with replacements, enter a context."""
    if isinstance(result, Figure):
        result.draw_without_rendering()
        plt.close(result)
        return None
    if isinstance(result, list) and result and isinstance(result[0], patching.Replacement):
        result = matlens.patched(world.model, result)
    if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, Mapping):
        with result as model:
            return model(torch.tensor([[5, 6, 7]]), return_type="logits")
    return list(result) if isinstance(result, Iterator) else result
