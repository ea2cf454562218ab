"""The command line: thin commands over `matlens.study.workflow`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from matlens import __version__
from matlens.cli import updates, values
from matlens.cli.options import (
    BatchTokens,
    CorpusName,
    Device,
    Dtype,
    DtypeChoice,
    Field,
    Folder,
    Intercept,
    Limit,
    Model,
    Out,
    PairsOption,
    PositionChoice,
    PositionsOption,
    Revision,
    Ridge,
    Seed,
    Special,
    Split,
    Train,
    Trust,
    Val,
)
from matlens.errors import InputError
from matlens.storage.folders import system_errors

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(
    help="What is linear inside a transformer, and what its feed-forward layers write.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(values.app, name="values")
_BAD_INPUT, _INTERRUPTED = 2, 130


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    model: Model,
    corpus: CorpusName,
    out: Out,
    train: Train = 9000,
    val: Val = 3000,
    seed: Seed = 0,
    positions: PositionsOption = PositionChoice.drawn,
    pairs: PairsOption = "all",
    intercept: Intercept = False,
    ridge: Ridge = 0.0,
    draw_special: Special = True,
    field: Field = "text",
    split: Split = "train",
    limit: Limit = None,
    batch_tokens: BatchTokens = None,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Do the main job: collect, fit, evaluate and plot. A run that was killed goes on where it was."""
    from matlens.study import workflow

    wanted = _pairs(pairs)
    loaded = _collect(
        model, corpus, out, train, val, seed, positions, draw_special, field, split, limit, batch_tokens,
        device, dtype, revision, trust_remote_code, wanted,
    )  # fmt: skip
    workflow.fit_maps(out, pairs=wanted, intercept=intercept, ridge=ridge)
    _show(workflow.evaluate_maps(loaded, out))
    _say_paths(workflow.plot_results(out))


@app.command()
def collect(
    model: Model,
    corpus: CorpusName,
    out: Out,
    train: Train = 9000,
    val: Val = 3000,
    seed: Seed = 0,
    positions: PositionsOption = PositionChoice.drawn,
    draw_special: Special = True,
    field: Field = "text",
    split: Split = "train",
    limit: Limit = None,
    batch_tokens: BatchTokens = None,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Run sentences through a model once and keep the stream of every layer.

    It is written to OUT/train and OUT/validation.
    """
    _collect(
        model, corpus, out, train, val, seed, positions, draw_special, field, split, limit, batch_tokens,
        device, dtype, revision, trust_remote_code,
    )  # fmt: skip
    print(f"Activations in {out}. Next: matlens fit {out}")


def _collect(
    model: str,
    corpus: str,
    out: Path,
    train: int,
    val: int,
    seed: int,
    positions: PositionChoice,
    draw_special: bool,
    field: str,
    split: str,
    limit: int | None,
    batch_tokens: int | None,
    device: str | None,
    dtype: DtypeChoice,
    revision: str | None,
    trust_remote_code: bool,
    pairs: Any = None,
) -> Any:
    from matlens.corpora.corpus import load_corpus

    # The corpus first: it is read in seconds, and a model in minutes.
    sentences = load_corpus(corpus, field=field, split=split, limit=limit)
    print(sentences.report())
    sentences.split(n_train=train, n_validation=val, seed=seed)

    import torch

    from matlens.models.loading import load
    from matlens.models.readout import Readout
    from matlens.study import workflow

    loaded = load(
        model,
        device=device,
        dtype=getattr(torch, dtype),
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    if pairs is not None:  # before the work, not after it
        workflow.number_pairs(pairs, loaded.cfg.n_layers)
        Readout(loaded)
    workflow.collect_parts(
        loaded,
        sentences,
        out,
        n_train=train,
        n_validation=val,
        seed=seed,
        positions=positions.value,
        draw_special=draw_special,
        batch_tokens=batch_tokens,
    )
    return loaded


@app.command()
def fit(folder: Folder, pairs: PairsOption = "all", intercept: Intercept = False, ridge: Ridge = 0.0) -> None:
    """Fit linear maps between layers on what 'collect' has written, in FOLDER/maps."""
    from matlens.study import workflow

    maps = workflow.fit_maps(folder, pairs=_pairs(pairs), intercept=intercept, ridge=ridge)
    print(f"{len(maps)} maps in {folder / workflow.MAPS}. Next: matlens evaluate {folder}")


@app.command()
def evaluate(
    folder: Folder,
    model: Annotated[
        str | None, typer.Option(help="Where the model is now, if not where it was collected from.")
    ] = None,
    device: Device = None,
    trust_remote_code: Trust = False,
) -> None:
    """Evaluate maps layer by layer: r2, Precision@k and surprisal, in FOLDER/results.csv."""
    import torch

    from matlens.linear.mapsets import MapSet
    from matlens.models.loading import load
    from matlens.study import workflow

    fitted_on = MapSet.load(folder / workflow.MAPS).provenance.identity
    name, revision = fitted_on.name, fitted_on.revision
    loaded = load(
        model or name,
        device=device,
        dtype=getattr(torch, fitted_on.dtype),
        revision=None if model else revision,
        trust_remote_code=trust_remote_code,
    )
    _show(workflow.evaluate_maps(loaded, folder))
    print(f"Table in {folder / workflow.RESULTS}.csv. Next: matlens plot {folder}")


@app.command()
def plot(folder: Folder) -> None:
    """Draw the figures of FOLDER/results.csv, as PNG and PDF."""
    from matlens.study import workflow

    _say_paths(workflow.plot_results(folder))


app.command()(updates.update)


def main() -> None:
    """Run the command line."""
    speaking(app)


def speaking(work: Callable[[], Any]) -> None:
    """Do some work, and say in a line what the user can mend, and exit with code 2."""
    try:
        with system_errors("the output folder"):
            work()
        return
    except InputError as error:
        wrong = _plain(error)
    except SystemExit as stop:
        if stop.code == _INTERRUPTED:  # what typer makes of Ctrl-C
            Console(stderr=True).print("Interrupted. Run the same command again, and it goes on from here.")
        raise
    # Said only here: while the exception lives, a bar that it came through is open, on an unfinished line.
    Console(stderr=True).print(f"[bold red]error:[/] {wrong}", highlight=False, soft_wrap=True)
    sys.exit(_BAD_INPUT)


def _pairs(text: str) -> Any:
    if text in ("all", "last"):
        return text
    try:
        numbers = [[int(layer) for layer in pair.split(":")] for pair in text.split(",")]
        return [(source, target) for source, target in numbers]
    except ValueError:
        raise InputError(
            f"--pairs {text or repr(text)}: expected all, last, or a list such as 0:12,6:12."
        ) from None


def _show(results: pd.DataFrame) -> None:
    from matlens.lens.quality import layer_table

    wide = layer_table(results)
    table = Table(
        "layer", *wide.columns, title=f"Onto layer {results['target'].max()}, on the validation sentences"
    )
    for layer, row in wide.iterrows():
        table.add_row(str(layer), *("–" if value != value else f"{value:.3f}" for value in row))
    Console().print(table)


def _say_paths(paths: list[Path]) -> None:
    print("Figures: " + ", ".join(str(path) for path in paths))


def _plain(error: InputError) -> str:
    from rich.markup import escape

    return escape(str(error))


if __name__ == "__main__":
    main()
