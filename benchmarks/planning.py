"""Peak memory of each step of a study against the estimate of `matlens plan`.

Every step runs on SmolLM2 in a separate process. Fits on collected vectors take at least 0.7 of the
estimate; steps that run the model may take less, and at most a tenth more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from ratios import Measured, Out
from watched import MIB, TAKEN, Work, in_a_process

import matlens
from matlens.linear import stream_least_squares
from matlens.models import SMOLLM2
from matlens.study import Shape, Study, fit_maps, plan_study

Pairs = Literal["last", "all"]


class _Step(NamedTuple):
    """A step as the plan calls it, what goes before it, and how it is done in a folder."""

    planned: str
    options: dict[str, Any]
    before: str | None
    work: Callable[[Any, Any, Path, Pairs], object]
    exact: bool = False


def _fit(model: Any, parts: Any, folder: Path, pairs: Pairs) -> None:
    fit_maps(folder, pairs=pairs, progress=False)


def _collect(
    positions: Literal["sampled", "all"], model: Any, parts: Any, folder: Path, pairs: Pairs
) -> None:
    _ = Study(load_model=lambda: model, load_parts=lambda: parts, out=folder, positions=positions).stream


_ALL = {"positions": "all"}


def _stream(model: Any, parts: Any, folder: Path, pairs: Pairs) -> None:
    examples = matlens.make_examples(model, parts[0])
    stream_least_squares(model, examples, folder / "statistics", pairs=pairs, progress=False)


_SAMPLED, _STORED = "collecting, sampled positions", "collecting, all positions, vectors stored"
_SUMS = "collecting, all positions, sums stored"
_KEEP = _ALL | {"keep_rows": True}
_STEPS = {
    _SAMPLED: _Step("collect", {}, None, partial(_collect, "sampled")),
    _STORED: _Step("collect", _KEEP, None, partial(_collect, "all")),
    _SUMS: _Step("collect", _ALL, None, _stream),
    "fitting on collected vectors, sampled positions": _Step(
        "fit from collected vectors", {}, _SAMPLED, _fit, exact=True
    ),
    "fitting on collected vectors, all positions": _Step(
        "fit from collected vectors", _KEEP, _STORED, _fit, exact=True
    ),
    "fitting on sums": _Step("fit from sufficient statistics", _ALL, _SUMS, _fit),
}


def main(
    sentences: Annotated[int, typer.Option(help="Sentences that maps are fitted on.")] = 300,
    val: Annotated[int, typer.Option(help="Validation sentences.")] = 100,
    pairs: Annotated[Pairs, typer.Option(help="Maps onto the last layer, or between all.")] = "last",
    model: Annotated[str, typer.Option(help="What matlens.load reads.")] = SMOLLM2,
    out: Out = None,
) -> None:
    """Measure memory and disk of each step as ratios to what is planned."""
    torch.set_num_threads(1)  # threads do not survive a fork
    loaded = matlens.load(model, device="cpu")
    parts = matlens.load_corpus("wikipedia-sample").split(n_train=sentences, n_validation=val)
    tokens = len(matlens.make_examples(loaded, parts[0]).tokens)
    shape = Shape.from_model(loaded)
    measured = Measured(
        "planning", out, model=model, corpus="wikipedia-sample", sentences=sentences, validation=val,
        pairs=pairs, tokens=tokens,
    )  # fmt: skip
    for name, step in _STEPS.items():
        options = {"pairs": pairs, "train_tokens": tokens, **step.options}
        plan = plan_study(shape, sentences, val, **options)
        planned = plan[step.planned].memory
        if step.planned == "collect":  # the model is loaded before
            planned -= plan["load the model"].memory

        def prepare(folder: Path, step: _Step = step) -> Work:
            if step.before is not None:
                _STEPS[step.before].work(loaded, parts, folder, pairs)
            return lambda: step.work(loaded, parts, folder, pairs)

        taken = in_a_process(prepare)[TAKEN]
        measured.add(f"{name}: planned", planned / MIB, unit="MiB")
        least = 0.7 if step.exact else None
        measured.add(f"{name}: in use / planned", taken * MIB / planned, min=least, max=1.1)
    measured.write()


if __name__ == "__main__":
    typer.run(main)
