"""Cases of states: models that are patched, hooked or edited, and contexts that are closed out of order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import matlens
from attack.cases import Case, Misread
from attack.world import N_CLUSTERS, World
from matlens import ffn, lens, patching

PATCHED, TOKENS, ORDER, EDITED = (
    "patched is not plain",
    "other tokens, other weights",
    "contexts out of order",
    "weights edited in place",
)


def state_cases(world: World, only: str = "") -> Iterator[Case]:
    """All cases of this file."""
    for case in (*_patched(world), *_tokens(world), *_order(world)):
        if only in case.name:
            yield case


def _states(world: World) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Ways in which the model is not the plain one."""
    model = world.model
    double = [("blocks.1.mlp.hook_out", lambda value, hook: 2 * value)]
    return {
        "patched": lambda: matlens.patched(model, matlens.jump(world.stream_maps, 1, 2)),
        "patched FFN": lambda: matlens.patched(model, matlens.mat_ffn(world.maps, 1, 2)),
        "controlled": lambda: ffn.controlled(model, ["L1D2"], 30.0),
        "hooked": lambda: model.hooks(fwd_hooks=double),
        "hooked by torch": lambda: _hooked(model.original_model.transformer.h[1]),
    }


@contextlib.contextmanager
def _hooked(module: Any) -> Iterator[None]:
    def double(_: Any, __: Any, output: Any) -> Any:
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    handle = module.register_forward_hook(double)
    try:
        yield
    finally:
        handle.remove()


def _jobs(world: World) -> dict[str, Callable[[Path], Any]]:
    model, examples = world.model, world.examples
    pairs = {"one": patching.Variant(2, matlens.jump(world.stream_maps, 2, 3))}
    return {
        "collect": lambda f: dict(matlens.collect(model, examples, folder=f, progress=False)),
        "Trace.run": lambda f: ffn.Trace.run(model, examples, k=4, folder=f, progress=False).coefficient,
        "run_variants": lambda f: dict(
            patching.run_variants(model, examples, pairs, folder=f, progress=False)
        ),
        "Clusters.fit": lambda f: (
            ffn.Clusters.fit(ffn.ValueVectors(model), N_CLUSTERS, folder=f, progress=False).labels
        ),
    }


def _patched(world: World) -> Iterator[Case]:
    """What was done to the patched model, opened by the plain one; and the other way round."""
    for state, context in _states(world).items():
        for name, job in _jobs(world).items():
            for first in ("state", "plain"):
                yield Case(
                    PATCHED,
                    f"{name} while {state}, then the other, {first} first",
                    _in_turn(world, context, job, first),
                    # Value vectors are the weights' own, whatever is hooked.
                    (lambda r: r == "the same") if name == "Clusters.fit" else (lambda r: r == "made anew"),
                )
        yield Case(
            PATCHED,
            f"fit_quality of plain maps on vectors while {state}",
            _mixed(world, context),
        )


def _in_turn(
    world: World, context: Callable[[], Any], job: Callable[[Path], Any], first: str
) -> Callable[[], str]:
    from attack.meaning import meaning

    def run() -> str:
        folder, elsewhere = world.fresh("out"), world.fresh("out")
        with context() if first == "state" else contextlib.nullcontext():
            before = meaning(job(folder))
        with context() if first == "plain" else contextlib.nullcontext():
            after, true = meaning(job(folder)), meaning(job(elsewhere))
        if after != true:
            raise Misread("what was done in another state passes as what is done in this one")
        return "the same" if before == after else "made anew"

    return run


def _mixed(world: World, context: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with context():
            vectors = matlens.collect(world.model, world.examples, progress=False)
        return lens.fit_quality(world.stream_maps, vectors, progress=False)

    return run


def _tokens(world: World) -> Iterator[Case]:
    """Artifacts of another model, or of the same weights with other tokens."""
    for other in ("weights", "tokens", "layers", "wide"):
        jobs: dict[str, Callable[[World, str], Any]] = {
            "fit_quality(maps, activations of {})": _fit_quality,
            "patched({}, maps)": _run,
            "Clusters.holding(values of {})": _holding,
            "collect into a folder of {}": _reopened,
            "Trace.run into a folder of {}": _retraced,
            "lift_scores(trace, {})": _lifted,
            "collect(model, examples of {})": _with_examples,
        }
        # The same weights have the same clusters; and of the same tokens the examples are the same.
        allowed = {
            "Clusters.holding(values of {})": other == "tokens",
            "collect(model, examples of {})": other != "tokens",
        }
        for name, job in jobs.items():
            right = (lambda _: True) if allowed.get(name) else None
            yield Case(TOKENS, name.format(other), partial(job, world, other), right)
    yield Case(EDITED, "fit_quality after an edit of the weights", partial(_edited, world))


def _fit_quality(world: World, other: str) -> Any:
    return lens.fit_quality(world.stream_maps, world.collected(other), progress=False)


def _holding(world: World, other: str) -> Any:
    return world.clusters.holding(ffn.ValueVectors(world.load(other)), ["L0D1"])


def _lifted(world: World, other: str) -> Any:
    return ffn.lift_scores(world.trace, world.load(other))


def _run(world: World, other: str) -> Any:
    model = world.load(other)
    with matlens.patched(model, matlens.jump(world.stream_maps, 1, 2)):
        return model(torch.tensor([[5, 6, 7]]))


def _reopened(world: World, other: str) -> Any:
    folder = world.fresh("out")
    matlens.collect(world.model, world.examples, folder=folder, progress=False)
    model = world.load(other)
    return matlens.collect(model, matlens.make_examples(model, world.corpus), folder=folder, progress=False)


def _retraced(world: World, other: str) -> Any:
    folder = world.fresh("out")
    ffn.Trace.run(world.model, world.examples, k=4, folder=folder, progress=False)
    model = world.load(other)
    return ffn.Trace.run(
        model, matlens.make_examples(model, world.corpus), k=4, folder=folder, progress=False
    )


def _with_examples(world: World, other: str) -> Any:
    examples = matlens.make_examples(world.load(other), world.corpus)
    return matlens.collect(world.model, examples, progress=False)


def _edited(world: World) -> Any:
    model = matlens.load(str(world.model_folder("gpt2")), device="cpu")
    maps = world.stream_maps
    with torch.no_grad():
        next(model.original_model.parameters()).view(-1)[7] += 1
    vectors = matlens.collect(model, matlens.make_examples(model, world.corpus), progress=False)
    return lens.fit_quality(maps, vectors, progress=False)


def _order(world: World) -> Iterator[Case]:
    """Contexts that are not closed in the order in which they were opened, and those of other threads."""
    maps = world.stream_maps
    openers: dict[str, Callable[[], Any]] = {
        "patched 0-1": lambda: matlens.patched(world.model, matlens.jump(maps, 0, 1)),
        "patched 2-3": lambda: matlens.patched(world.model, matlens.jump(maps, 2, 3)),
        "patched FFN": lambda: matlens.patched(world.model, matlens.mat_ffn(world.maps, 1, 2)),
        "controlled": lambda: ffn.controlled(world.model, ["L1D2"], 30.0),
        "controlled too": lambda: ffn.controlled(world.model, ["L1D3"], 30.0),
    }
    for first, open_first in openers.items():
        for second, open_second in openers.items():
            if first != second:
                yield Case(
                    ORDER,
                    f"{first} closed before {second}, which is inside",
                    _crossed(world, open_first, open_second),
                    lambda r: r == "as before",
                )
        yield Case(
            ORDER, f"{first} opened in a thread", _threaded(world, open_first), lambda r: r == "as before"
        )


def _logits(world: World) -> torch.Tensor:
    with torch.inference_mode():
        return world.model(torch.tensor([[5, 6, 7, 8]]), return_type="logits").clone()


def _crossed(world: World, first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], str]:
    def run() -> str:
        plain = _logits(world)
        outer, inner = first(), second()
        outer.__enter__()
        error: Exception | None = None
        try:
            inner.__enter__()
        except matlens.InputError:
            outer.__exit__(None, None, None)
            raise
        for context in (outer, inner):
            try:
                context.__exit__(None, None, None)
            except matlens.InputError as refusal:
                error = refusal
        if not torch.equal(plain, _logits(world)):
            raise Misread("the model is another afterwards")
        if error is not None:
            raise error
        return "as before"

    return run


def _threaded(world: World, opener: Callable[[], Any]) -> Callable[[], str]:
    def run() -> str:
        plain, errors = _logits(world), []
        opened, done = threading.Event(), threading.Event()

        def work() -> None:
            try:
                with opener():
                    opened.set()
                    done.wait(5)
            except Exception as error:
                errors.append(error)
                opened.set()

        thread = threading.Thread(target=work)
        thread.start()
        opened.wait(5)
        try:
            with opener():
                _logits(world)
        finally:
            done.set()
            thread.join()
        if errors:
            raise errors[0]
        if not torch.equal(plain, _logits(world)):
            raise Misread("the model is another afterwards")
        return "as before"

    return run
