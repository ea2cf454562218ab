"""The command line: what is run on one folder, step by step or at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matlens import __version__
from matlens.cli import cache, explore, lens, parts, shards, updates, values
from matlens.cli import plan as planning
from matlens.cli.distributed import ask_main, on_main, start
from matlens.cli.expected import print_expected
from matlens.cli.groups import CorpusOptions, FitOptions, ModelOptions, SampleOptions, grouped
from matlens.cli.options import Device, DtypeChoice, Folder, StackOption, Title, Trust
from matlens.cli.printing import print_figures, print_line, print_results
from matlens.errors import InputError, check_choice

app = typer.Typer(
    help="What is linear inside a transformer, and what its feed-forward layers write.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(values.app, name="values")
app.add_typer(cache.app, name="cache")
app.add_typer(lens.app, name="lens")


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
@grouped
def run(
    model: ModelOptions, corpus: CorpusOptions, samples: SampleOptions, fit: FitOptions, title: Title = None
) -> None:
    """Do the main job: collect, fit, evaluate and plot. A run that was killed goes on where it was."""
    fit_arguments = fit.fit_arguments()  # before the work, not after it
    from matlens.study.finished import RunNote
    from matlens.study.output import FIGURES

    samples.check(model, fit)
    asked = {"model": model.asked, "corpus": corpus.asked, "samples": samples.asked, "fit": fit.asked}
    note = RunNote(samples.out, {**asked, "figures": {"title": title}})
    if ask_main(note.answers, "whether the run is finished"):
        print_line(f"This run is finished in {samples.out}, with the same options, model and corpus.")
        print_results(samples.out)
        print_figures([samples.out / figure for figure in FIGURES if (samples.out / figure).exists()])
        return
    from matlens.study.results import plot_results

    study = samples.study(model, corpus, **fit_arguments)
    print_expected(study.model, study.operations, "--train, --val")
    _ = study.maps
    with on_main("results") as is_main:
        if is_main:
            study.evaluate()
            print_results(study.folder)
            figures = plot_results(study.folder, title=title)
            note.write()
            print_figures(figures)


@app.command()
@grouped
def collect(model: ModelOptions, corpus: CorpusOptions, samples: SampleOptions) -> None:
    """Run sentences through a model once and keep the stream of every layer.

    It is written to OUT/train and OUT/validation.
    """
    samples.check(model)
    study = samples.study(model, corpus)
    _ = study.stream
    print_line(f"Activations in {study.folder}. Next: matlens fit {study.folder}")


@app.command()
@grouped
def fit(folder: Folder, how: FitOptions, shard: shards.Elsewhere = None) -> None:
    """Fit linear maps between layers on what 'collect' has written, in FOLDER/maps.

    Parts of a job, such as 3/8, are run by 'matlens shard', and 'matlens merge' joins them and fits the maps.
    """
    fit_arguments = how.fit_arguments()
    from matlens.study.fits import fit_maps
    from matlens.study.output import MAPS

    maps = fit_maps(folder, **fit_arguments)
    print_line(f"{len(maps)} maps in {folder / MAPS}. Next: matlens evaluate {folder}")


@app.command()
def evaluate(
    folder: Folder,
    model: Annotated[
        str | None, typer.Option(help="Where the model is now, if not where it was collected from.")
    ] = None,
    device: Device = None,
    dtype: Annotated[
        DtypeChoice | None,
        typer.Option(help="Precision of the model.", show_default="that of the maps' model"),
    ] = None,
    same_precision: Annotated[
        bool,
        typer.Option(
            "--same-precision/--other-precision",
            help="Must the model run in the precision that the maps were fitted in?",
        ),
    ] = True,
    trust_remote_code: Trust = False,
    stack: StackOption = None,
) -> None:
    """Evaluate maps layer by layer: r2, Precision@k and surprisal, in FOLDER/results.csv."""
    from matlens.linear.mapsets import MapSet
    from matlens.study.output import MAPS, RESULTS
    from matlens.study.results import evaluate_maps

    fitted_on = MapSet.load(folder / MAPS).provenance.identity
    name, revision = (model, None) if model else (fitted_on.name, fitted_on.revision)
    there = DtypeChoice(check_choice(fitted_on.dtype, DtypeChoice, "The precision of the maps' model"))
    if same_precision and dtype not in (None, there):
        raise InputError(
            f"The maps in {folder / MAPS} were fitted in {there.value}, not in {dtype.value}. Where the same "
            "weights are meant in another precision, say so with --other-precision."
        )
    options = ModelOptions(name, device, dtype or there, revision, trust_remote_code, stack)
    evaluate_maps(options.load(), folder, same_precision=same_precision)
    print_results(folder)
    print_line(f"Table in {folder / RESULTS}.csv. Next: matlens plot {folder}")


@app.command()
def plot(folder: Folder, title: Title = None) -> None:
    """Draw the figures of FOLDER/results.csv, as PNG and PDF."""
    from matlens.study.results import plot_results

    print_figures(plot_results(folder, title=title))


@app.command()
def verify(
    folder: Annotated[
        Path, typer.Argument(help="A folder that matlens has written into.", show_default=False)
    ],
) -> None:
    """Check all bytes of what matlens has written in FOLDER and below it; exit with code 2 on damage."""
    from matlens.io.verification import verify as verify_folder

    verdicts = 0
    damaged = 0
    for verdict in verify_folder(folder):
        verdicts += 1
        damaged += verdict.damage is not None
        state = "ok" if verdict.damage is None else f"DAMAGED: {verdict.damage}"
        print_line(f"{verdict.path}  {verdict.what}  {state}")
    if not verdicts:
        raise InputError(f"There is nothing in {folder} that matlens has written and could verify.")
    if damaged:
        raise typer.Exit(2)


app.command()(updates.update)
app.command()(planning.plan)
app.command()(shards.shard)
app.command()(shards.merge)
app.command()(explore.explore)
app.command()(explore.serve)
app.command()(parts.linearity)
app.command()(parts.prune)


def main() -> None:
    """Run the command line, as one of several processes where the environment says so."""
    start(app, dividing=("run", "collect", "fit", "shard", "lens fit", "linearity"))


if __name__ == "__main__":
    main()
