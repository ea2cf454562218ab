"""Cases of states: models that are patched, hooked or edited, and contexts that are closed out of order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

import matlens
from attack.cases import Case, Misread
from attack.meaning import meaning
from attack.world import WRITERS, World
from matlens import ffn, lens, patching

PATCHED, TOKENS, ORDER, EDITED = (
    "patched is not plain",
    "other tokens, other weights",
    "contexts out of order",
    "weights edited in place",
)
Open = Callable[[], AbstractContextManager[Any]]


def state_cases(world: World) -> Iterator[Case]:
    """All cases of this file."""
    opened = _contexts(world)
    for state, context in (opened | _hooks(world.model)).items():
        for name, job in _jobs(world).items():
            for first in ("state", "plain"):
                # Value vectors are the weights' own, whatever is hooked.
                expected = "the same" if name == "Clusters.fit" else "made anew"
                yield Case(
                    PATCHED,
                    f"{name} while {state}, then the other, {first} first",
                    partial(_in_turn, world, context, job, first),
                    partial(expected.__eq__),
                )
        yield Case(PATCHED, f"fit_quality on vectors while {state}", partial(_mixed, world, context))
    yield from _tokens(world)
    yield Case(EDITED, "fit_quality after an edit of the weights", partial(_edited, world))
    for (first, open_first), (second, open_second) in permutations(opened.items(), 2):
        name = f"{first} closed before {second}, which is inside"
        yield Case(ORDER, name, partial(_crossed, world, open_first, open_second), "as before".__eq__)
    for name, context in opened.items():
        yield Case(
            ORDER, f"{name} opened in a thread", partial(_threaded, world, context), "as before".__eq__
        )


def _contexts(world: World) -> dict[str, Open]:
    """Ways in which the model is not the plain one."""
    model, maps, submodules = world.model, world["maps"], world["MapSet"]
    return {
        "patched 0-1": lambda: matlens.patched(model, matlens.jump(maps, 0, 1)),
        "patched 2-3": lambda: matlens.patched(model, matlens.jump(maps, 2, 3)),
        "patched FFN": lambda: matlens.patched(model, matlens.mat_ffn(submodules, 1, 2)),
        "controlled": lambda: ffn.controlled(model, ["L1D2"], 30.0),
        "controlled too": lambda: ffn.controlled(model, ["L1D3"], 30.0),
    }


def _hooks(model: Any) -> dict[str, Open]:
    """Hooks that double what a part of the second block gives."""

    def double(_: Any, __: Any, output: Any) -> Any:
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    @contextlib.contextmanager
    def by_torch() -> Iterator[None]:
        handle = model.original_model.transformer.h[1].register_forward_hook(double)
        try:
            yield
        finally:
            handle.remove()

    hook = ("blocks.1.mlp.hook_out", lambda value, hook: 2 * value)
    return {"hooked": lambda: model.hooks(fwd_hooks=[hook]), "hooked by torch": by_torch}


def _jobs(world: World) -> dict[str, Callable[[Path], Any]]:
    model, examples = world.model, world["Examples"]
    variants = {"one": patching.Variant(2, matlens.jump(world["maps"], 2, 3))}
    return {
        "collect": lambda f: dict(matlens.collect(model, examples, folder=f, progress=False)),
        "Trace.run": lambda f: ffn.Trace.run(model, examples, k=4, folder=f, progress=False).coefficient,
        "run_variants": lambda f: dict(
            patching.run_variants(model, examples, variants, folder=f, progress=False)
        ),
        "Clusters.fit": lambda f: (
            ffn.Clusters.fit(ffn.ValueVectors(model), 20, folder=f, progress=False).labels
        ),
    }


def _in_turn(world: World, context: Open, job: Callable[[Path], Any], first: str) -> str:
    """What was done to the patched model, opened by the plain one; or the other way round."""
    folder, elsewhere = world.fresh("out"), world.fresh("out")
    with context() if first == "state" else contextlib.nullcontext():
        before = meaning(job(folder))
    with context() if first == "plain" else contextlib.nullcontext():
        after, true = meaning(job(folder)), meaning(job(elsewhere))
    if after != true:
        raise Misread("what was done in another state passes as what is done in this one")
    return "the same" if before == after else "made anew"


def _mixed(world: World, context: Open) -> Any:
    with context():
        vectors = world.collect()
    return lens.fit_quality(world["maps"], vectors, progress=False)


def _tokens(world: World) -> Iterator[Case]:
    """Artifacts of another model, or of the same weights with other tokens."""
    jobs: dict[str, Callable[[World], Any]] = {
        "fit_quality(maps, activations of {})": lambda other: lens.fit_quality(
            world["maps"], other["Activations"], progress=False
        ),
        "patched({}, maps)": lambda other: _run(other.model, matlens.jump(world["maps"], 1, 2)),
        "Clusters.holding(values of {})": lambda other: world["Clusters"].holding(
            other["ValueVectors"], ["L0D1"]
        ),
        "collect into a folder of {}": partial(_twice, world, "activations"),
        "Trace.run into a folder of {}": partial(_twice, world, "trace"),
        "lift_scores(trace, {})": lambda other: ffn.lift_scores(world["Trace"], other.model),
        "collect(model, examples of {})": lambda other: matlens.collect(
            world.model, other["Examples"], progress=False
        ),
    }
    # The same weights have the same clusters; and of the same tokens the examples are the same.
    allowed: dict[str, tuple[str, ...]] = {
        "Clusters.holding(values of {})": ("tokens",),
        "collect(model, examples of {})": ("weights", "layers", "wide"),
    }
    for name in ("weights", "tokens", "layers", "wide"):
        for job, do in jobs.items():
            right = (lambda _: True) if name in allowed.get(job, ()) else None
            yield Case(TOKENS, job.format(name), partial(do, world.of(name)), right)


def _run(model: Any, replacements: Any) -> Any:
    with matlens.patched(model, replacements):
        return model(torch.tensor([[5, 6, 7]]))


def _twice(world: World, kind: str, other: World) -> Any:
    folder = world.fresh("out")
    WRITERS[kind](world, folder)
    return WRITERS[kind](other, folder)


def _edited(world: World) -> Any:
    model = matlens.load(str(world.model_folder), device="cpu")
    with torch.no_grad():
        next(model.original_model.parameters()).view(-1)[7] += 1
    vectors = matlens.collect(model, matlens.make_examples(model, world["Corpus"]), progress=False)
    return lens.fit_quality(world["maps"], vectors, progress=False)


def _logits(world: World) -> torch.Tensor:
    with torch.inference_mode():
        return world.model(torch.tensor([[5, 6, 7, 8]]), return_type="logits").clone()


def _crossed(world: World, first: Open, second: Open) -> str:
    """Close two contexts in the wrong order: each is refused, or the model is as before."""
    plain, outer, inner = _logits(world), first(), second()
    refusals = list[matlens.InputError]()
    outer.__enter__()
    try:
        inner.__enter__()
    except matlens.InputError:
        outer.__exit__(None, None, None)
        raise
    for context in (outer, inner):
        try:
            context.__exit__(None, None, None)
        except matlens.InputError as refusal:
            refusals.append(refusal)
    if not torch.equal(plain, _logits(world)):
        raise Misread("the model is another afterwards")
    if refusals:
        raise refusals[0]
    return "as before"


def _threaded(world: World, context: Open) -> str:
    """Open the same context while another thread has it open."""
    plain, errors = _logits(world), list[Exception]()
    opened, done = threading.Event(), threading.Event()

    def work() -> None:
        try:
            with context():
                opened.set()
                done.wait(5)
        except Exception as error:
            errors.append(error)
            opened.set()

    thread = threading.Thread(target=work)
    thread.start()
    opened.wait(5)
    try:
        with context():
            _logits(world)
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]
    if not torch.equal(plain, _logits(world)):
        raise Misread("the model is another afterwards")
    return "as before"
