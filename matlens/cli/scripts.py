"""Analyses as scripts: what all of them take on the command line is written here once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pandas as pd
import typer
from matplotlib.figure import Figure

from matlens import plots
from matlens.cli import options
from matlens.cli.app import speaking
from matlens.storage.tables import write_results
from matlens.study.study import Study


def run_script(function: Callable[..., None]) -> None:
    """Run a function as a script of its own, with its options and the errors of the command line."""
    speaking(lambda: typer.run(function))


def run_study(work: Callable[..., None], *, model: str = "smollm2-135m") -> None:
    """Run an analysis of one study as a script.

    ``work`` is given the `Study` and the output folder, and options of its own by name; those that a study
    is made from are added to its command line.

    Parameters
    ----------
    work
        ``work(study, out, ...)``; its docstring is the script's help.
    model
        Which model is studied unless another is named.
    """

    def common(
        model: options.Model = model,
        corpus: options.CorpusName = "wikipedia-sample",
        train: options.Train = 9000,
        val: options.Val = 3000,
        seed: options.Seed = 0,
        device: options.Device = None,
        out: options.Out = Path("out"),
    ) -> tuple[Study, Path]:
        return (
            Study.load(model, corpus, out, n_train=train, n_validation=val, seed=seed, device=device),
            out,
        )

    shared, own = inspect.signature(common).parameters, inspect.signature(work).parameters
    added = [parameter for name, parameter in own.items() if name not in ("study", "out")]

    def command(**given: Any) -> None:
        study, out = common(**{name: given.pop(name) for name in shared})
        work(study, out, **given)

    hints = get_type_hints(work, include_extras=True) | get_type_hints(common, include_extras=True)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in (*added, *shared.values())
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = work.__doc__
    run_script(command)


def report(
    out: Path, name: str, table: pd.DataFrame, origin: Mapping[str, Any], figure: Figure | None = None
) -> None:
    """Write an analysis' table with its origin beside it, and its figure, as ``name``; say where they are."""
    write_results(out, name, table, origin)
    for path in [out / f"{name}.csv", *(plots.save(figure, out, name) if figure else ())]:
        print(path)
