"""Commands of the main job, at once or step by step in one folder, in parts, planned or verified."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from matlens.cli import options
from matlens.cli.distributed import ask_main, on_main
from matlens.cli.options import (
    CorpusOptions,
    Device,
    Dtype,
    FitOptions,
    Folder,
    ModelOptions,
    Out,
    SampleOptions,
    Title,
    command,
)
from matlens.cli.printing import print_expected, print_figures, print_line, print_results, print_table
from matlens.errors import InputError, check_choice, printable

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

app = typer.Typer()


@command(app)
def run(
    model: ModelOptions, corpus: CorpusOptions, samples: SampleOptions, fit: FitOptions, title: Title = None
) -> None:
    """Do the main job: collect, fit, evaluate and plot. A run that was killed goes on where it was."""
    fit_arguments = fit.arguments()  # before the work, not after it
    from matlens.study.finished import PARTS, RunNote
    from matlens.study.output import FIGURES, check_output

    check_output(samples.out, {part: {} for part in PARTS})
    groups = options.asked(model=model, corpus=corpus, samples=samples, fit=fit)
    note = RunNote(samples.out, {**groups, "figures": {"title": title}})
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


@command(app)
def collect(model: ModelOptions, corpus: CorpusOptions, samples: SampleOptions) -> None:
    """Run sentences through a model once and keep the stream of every layer.

    It is written to OUT/train and OUT/validation.
    """
    from matlens.io.files import check_writable

    check_writable(samples.out)
    study = samples.study(model, corpus)
    _ = study.stream
    print_line(f"Activations in {study.folder}. Next: matlens fit {study.folder}")


def _name_the_command(part: str | None) -> None:
    if part is not None:
        raise InputError(
            "'matlens fit' fits what 'collect' has written, all at once. A part of a job is run by "
            f"'matlens shard --shard {printable(part, most=12)} --model ... --corpus ... --out FOLDER', and "
            "'matlens merge FOLDER... --out FOLDER' joins the parts and fits the maps."
        )


@command(app)
def fit(
    folder: Folder,
    how: FitOptions,
    shard: Annotated[
        str | None, typer.Option("--shard", hidden=True, is_eager=True, callback=_name_the_command)
    ] = None,
) -> None:
    """Fit linear maps between layers on what 'collect' has written, in FOLDER/maps.

    Parts of a job, such as 3/8, are run by 'matlens shard', and 'matlens merge' joins them and fits the maps.
    """
    fit_arguments = how.arguments()
    from matlens.study.fits import fit_maps
    from matlens.study.output import MAPS

    maps = fit_maps(folder, **fit_arguments)
    print_line(f"{len(maps)} maps in {folder / MAPS}. Next: matlens evaluate {folder}")


@command(app)
def shard(
    shard: Annotated[
        str,
        typer.Option("--shard", metavar="K/N", help="Which part of the training sentences, such as 3/8."),
    ],
    model: ModelOptions,
    corpus: CorpusOptions,
    samples: SampleOptions,
    pairs: options.PairsOption = "all",
) -> None:
    """Run one part of the training sentences and keep what fits need of it: moments, and no vectors.

    All parts are given the same options but for --shard and --out. 'matlens merge' joins them.
    """
    read = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", shard)
    if read is None or not 1 <= int(read[1]) <= int(read[2]):
        raise InputError(f"--shard {shard[:40]}: expected a part such as 3/8, from 1/8 to 8/8.")
    wanted = FitOptions(pairs).arguments()["pairs"]
    from matlens.io.files import check_writable

    check_writable(samples.out)
    study = samples.study(model, corpus, pairs=wanted)
    moments = study.shard_moments(int(read[1]), int(read[2]))
    print_line(
        f"Shard {shard}: moments of {moments.n_samples:,} samples in {samples.out}. When all are there: "
        "matlens merge FOLDER... --out FOLDER"
    )


@command(app)
def merge(
    shards: Annotated[
        list[Path], typer.Argument(help="Folders that 'matlens shard' has written.", show_default=False)
    ],
    out: Out,
    how: FitOptions,
) -> None:
    """Join the moments of all shards of a job, in OUT/moments, and fit maps on them, in OUT/maps."""
    arguments = how.arguments()
    from matlens.activations.stored_moments import StoredMoments, merge_moments
    from matlens.linear.pairs import resolve_pairs
    from matlens.linear.sums import check_kept
    from matlens.study.fits import fit_moments
    from matlens.study.output import MAPS, MOMENTS
    from matlens.study.plan import check_merge

    moments = StoredMoments(*shards)
    if how.pairs == "all":  # all that the shards have kept
        arguments["pairs"] = None
    else:
        check_kept(moments, resolve_pairs(arguments["pairs"], moments.provenance))  # before it is written
    check_merge(moments, out / MOMENTS)
    maps = fit_moments(merge_moments(moments, out / MOMENTS), out / MAPS, **arguments)
    print_line(
        f"{len(maps)} maps of {moments.n_samples:,} samples in {out / MAPS}. 'matlens run' with the options "
        f"of the shards and --out {out} evaluates them."
    )


@command(app)
def evaluate(
    folder: Folder,
    model: Annotated[
        str | None, typer.Option(help="Where the model is now, if not where it was collected from.")
    ] = None,
    device: Device = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Precision of the model.", show_default="that of the maps' model"),
    ] = None,
    same_precision: Annotated[
        bool,
        typer.Option(
            "--same-precision/--other-precision",
            help="Must the model run in the precision that the maps were fitted in?",
        ),
    ] = True,
    trust_remote_code: options.Trust = False,
    stack: options.Stack = None,
) -> None:
    """Evaluate maps layer by layer: r2, Precision@k and surprisal, in FOLDER/results.csv."""
    from matlens.linear.mapsets import MapSet
    from matlens.study.output import MAPS, RESULTS
    from matlens.study.results import evaluate_maps

    fitted_on = MapSet.load(folder / MAPS).provenance.identity
    name, revision = (model, None) if model else (fitted_on.name, fitted_on.revision)
    fitted_in: Any = check_choice(fitted_on.dtype, get_args(Dtype), "The precision of the maps' model")
    if same_precision and dtype not in (None, fitted_in):
        raise InputError(
            f"The maps in {folder / MAPS} were fitted in {fitted_in}, not in {dtype}. Where the same "
            "weights are meant in another precision, say so with --other-precision."
        )
    loaded = ModelOptions(name, device, dtype or fitted_in, revision, trust_remote_code, stack).load()
    evaluate_maps(loaded, folder, same_precision=same_precision)
    print_results(folder)
    print_line(f"Table in {folder / RESULTS}.csv. Next: matlens plot {folder}")


@command(app)
def plot(folder: Folder, title: Title = None) -> None:
    """Draw the figures of FOLDER/results.csv, as PNG and PDF."""
    from matlens.study.results import plot_results

    print_figures(plot_results(folder, title=title))


@command(app)
def plan(
    model: Annotated[
        str | None, typer.Option(help="Like --model elsewhere; only its configuration is read.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="L, where there is no --model.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width of the stream, with --layers.")] = None,
    mlp: Annotated[
        int | None, typer.Option(min=1, help="Coefficients of an FFN.", show_default="4 x width")
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the vocabulary, with --layers.", show_default="50000"),
    ] = None,
    sentences: Annotated[int, typer.Option(min=1, help="Sentences that maps are fitted on.")] = options.TRAIN,
    val: Annotated[int, typer.Option(min=0, help="Sentences that they are evaluated on.")] = options.VAL,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sentence.")] = 30,
    positions: Annotated[
        options.PositionChoice, typer.Option(help="drawn, all or auto, as in 'matlens run'.")
    ] = "drawn",
    keep_rows: options.KeepRows = False,
    pairs: Annotated[Literal["last", "all"], typer.Option(help="all or last, as in 'matlens run'.")] = "all",
    intercept: Annotated[bool, typer.Option("--intercept", help="Fit a bias too.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Precision of the model.")] = "float32",
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
) -> None:
    """Say what memory, disk and operations each step takes, and which maps fit, before anything runs."""
    from matlens.linear.samples import are_few
    from matlens.study.plan import Plan, Shape, format_bytes, free_disk, free_memory, plan_study

    given = [number is not None for number in (layers, width, mlp, vocab)]
    if any(given) if model is not None else not all(given[:2]):
        raise InputError(
            "Which model? Expected either --model, or its shape: --layers and --width, and --mlp and "
            "--vocab where they are known."
        )
    if model is not None:
        shape = Shape.from_name(
            model, revision=revision, parameter_bytes=_BYTES[dtype], trust_remote_code=trust_remote_code
        )
    else:
        shape = Shape(
            n_layers=layers or 0, d_model=width or 0, d_mlp=mlp or 0, d_vocab=vocab or 50_000,
            parameter_bytes=_BYTES[dtype],
        )  # fmt: skip
    few = are_few(sentences, shape.d_model)
    everywhere = positions == "all" or (positions == "auto" and few)

    def of(which: Literal["last", "all"]) -> Plan:
        return plan_study(
            shape, sentences, val, positions="all" if everywhere else "drawn", pairs=which,
            train_tokens=tokens * sentences, intercept=intercept, keep_rows=keep_rows,
        )  # fmt: skip

    free, disk, chosen = free_memory(), free_disk(Path()), of(pairs)

    def fits(memory: int, written: int) -> str:
        return "no" if written > disk else "unknown" if free is None else "yes" if memory <= free else "no"

    rows = []
    for step, need in chosen.needs.items():
        memory = chosen.memory(step)
        cells = format_bytes(memory), format_bytes(need.disk) if need.disk else "–", f"{need.operations:.1e}"
        rows.append((step, *cells, fits(memory, need.disk)))
    how = "drawn positions"
    if everywhere:
        how = f"all positions{', which are kept' if keep_rows else ''}"
    print_table(
        f"{shape.n_layers} layers of {shape.d_model:,}, {shape.n_parameters:,} parameters; "
        f"{sentences:,}+{val:,} sentences, {how}, pairs {pairs}",
        ("step", "memory", "disk", "operations", "fits"), rows,
    )  # fmt: skip
    for which, each in (("last", of("last")), ("all", of("all"))):
        memory, written = each.job
        verdict = {"yes": ", which fits", "no": ", which does not fit"}.get(fits(memory, written), "")
        print_line(
            f"--pairs {which}: moments of {format_bytes(each.moments)} in float64 while vectors pass by; "
            f"collecting and fitting take {format_bytes(memory)} of memory and {format_bytes(written)} "
            f"of disk{verdict}."
        )
    if everywhere and not keep_rows:
        print_line(
            "Collecting keeps moments, and on disk the state that a killed run goes on from; --keep-rows "
            "keeps the vectors instead."
        )
    if not everywhere and few:
        print_line(
            f"{sentences:,} sentences are few for {shape.d_model:,} dimensions: unless it is told "
            "--positions drawn, 'matlens run' takes all of their tokens where the model predicts the next "
            "one. --positions auto plans that."
        )
    memory_and = "" if free is None else f"{format_bytes(free)} of memory and "
    print_line(f"{memory_and}{format_bytes(disk)} of disk are free here.")


@app.command()
def verify(
    folder: Annotated[
        Path, typer.Argument(help="A folder that matlens has written into.", show_default=False)
    ],
) -> None:
    """Check all bytes of what matlens has written in FOLDER and below it; exit with code 2 on damage."""
    from matlens.io.verification import verify as verify_folder

    damages = []
    for verdict in verify_folder(folder):
        state = "ok" if verdict.damage is None else f"DAMAGED: {verdict.damage}"
        print_line(f"{verdict.path}  {verdict.what}  {state}")
        damages.append(verdict.damage)
    if not damages:
        raise InputError(f"There is nothing in {folder} that matlens has written and could verify.")
    if any(damages):
        raise typer.Exit(2)
