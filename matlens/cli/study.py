"""Commands of the main job: all steps at once, single steps, parts, plans and checks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from matlens.cli.options import (
    TRAIN,
    VAL,
    CorpusOptions,
    Dtype,
    FitOptions,
    KeepRows,
    ModelOptions,
    PairsOption,
    PositionChoice,
    SampleOptions,
    command,
    parsed,
)
from matlens.cli.printing import print_figures, print_line, print_results, print_table
from matlens.cli.starting import on_main
from matlens.errors import InputError, NonNegativeInt, PositiveInt

PairsChoice = Literal["last", "all"]
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

app = typer.Typer()


@command(app)
def run(model: ModelOptions, corpus: CorpusOptions, samples: SampleOptions, fit: FitOptions) -> None:
    """Do the main job: collect, fit, evaluate and plot. A run that was killed resumes."""
    study = samples.study(model, corpus, **asdict(fit))
    _ = study.maps
    with on_main("results") as is_main:
        if is_main:
            from matlens.study.steps import plot_results

            print_results(study.evaluate(), study.folder)
            print_figures(plot_results(study.folder))


@command(app)
def collect(model: ModelOptions, corpus: CorpusOptions, samples: SampleOptions) -> None:
    """Run sentences through a model once and store the residual stream of every layer.

    It is written to OUT/train and OUT/validation.
    """
    study = samples.study(model, corpus)
    _ = study.stream
    print_line(f"Activations in {study.folder}. Next: matlens fit {study.folder}")


@command(app)
def fit(folder: Path, /, how: FitOptions) -> None:
    """Fit linear maps between layers on collected vectors, in FOLDER/maps.

    Parts of a job, such as 3/8, are run by 'matlens part', and 'matlens merge' joins them and fits the maps.
    """
    from matlens.study.steps import MAPS, fit_maps

    maps = fit_maps(folder, **asdict(how))
    print_line(f"{len(maps)} maps in {folder / MAPS}. Next: matlens evaluate {folder}")


def _read_part(text: str) -> tuple[int, int]:
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError
    return number, of


Part = Annotated[Any, parsed(_read_part, "K/N", "a part such as 3/8")]


@command(app, "part")
def run_part(
    part: Part,
    model: ModelOptions,
    corpus: CorpusOptions,
    samples: SampleOptions,
    pairs: PairsOption = "all",
) -> None:
    """Collect sufficient statistics of one part of the training sentences.

    Give all parts the same options except --part and --out. 'matlens merge' joins them.

    Parameters
    ----------
    part
        Part of the training sentences, such as 3/8.
    """
    study = samples.study(model, corpus, pairs=pairs)
    number, of = part
    stored = study.part_statistics(number, of)
    print_line(
        f"Part {number}/{of}: sufficient statistics of {stored.n_samples:,} samples in {samples.out}. When "
        "all are there: matlens merge FOLDER... --out FOLDER"
    )


@command(app)
def merge(parts: list[Path], /, out: Path, how: FitOptions) -> None:
    """Merge all parts of a job, in OUT/statistics, and fit maps on them, in OUT/maps.

    Parameters
    ----------
    parts
        Folders written by 'matlens part'.
    """
    from matlens.linear.pairs import resolve_pairs
    from matlens.linear.streaming import StoredLeastSquares
    from matlens.study.plan import check_merge
    from matlens.study.steps import MAPS, STATISTICS, TRAIN, fit_maps

    if (out / TRAIN).exists():
        raise InputError(
            f"out must be a folder without collected vectors, got one with {TRAIN}, on which maps would be "
            "fitted. Choose another folder."
        )
    stored = StoredLeastSquares(*parts)
    if how.pairs != "all":  # all that the parts have stored
        stored.check_pairs(resolve_pairs(how.pairs, stored.provenance))  # before it is written
    check_merge(stored, out / STATISTICS)
    stored.merge(out / STATISTICS)
    maps = fit_maps(out, **asdict(how))
    print_line(
        f"{len(maps)} maps of {stored.n_samples:,} samples in {out / MAPS}. 'matlens run' with the options "
        f"of the parts and --out {out} evaluates them."
    )


@command(app)
def evaluate(
    folder: Path,
    /,
    model: str | None = None,
    device: str | None = None,
    dtype: Dtype | None = None,
    strict: bool = True,
    trust_remote_code: bool = False,
    stack: Literal["encoder", "decoder"] | None = None,
) -> None:
    """Evaluate maps layer by layer: r2, Precision@k and surprisal, in FOLDER/results.csv.

    Parameters
    ----------
    model
        Path of the model, if it has moved since it was collected.
    strict
        Require the model that the maps were fitted on; else another of its shape is accepted.
    """
    from matlens.linear.mapsets import MapSet
    from matlens.study.steps import MAPS, RESULTS, evaluate_maps

    fitted_on = MapSet.load(folder / MAPS).provenance.identity
    name, revision = (model, None) if model else (fitted_on.name, fitted_on.revision)
    precision: Any = dtype or fitted_on.dtype
    loaded = ModelOptions(name, device, precision, revision, trust_remote_code, stack).load()
    print_results(evaluate_maps(loaded, folder, strict=strict), folder)
    print_line(f"Table in {folder / RESULTS}.csv. Next: matlens plot {folder}")


@command(app)
def plot(folder: Path, /) -> None:
    """Draw the figures of FOLDER/results.csv, as PNG and PDF."""
    from matlens.study.steps import plot_results

    print_figures(plot_results(folder))


@command(app)
def plan(
    model: str | None = None,
    layers: PositiveInt | None = None,
    width: PositiveInt | None = None,
    mlp: PositiveInt | None = None,
    vocab: PositiveInt = 50_000,
    sentences: PositiveInt = TRAIN,
    val: NonNegativeInt = VAL,
    tokens: PositiveInt = 30,
    positions: PositionChoice = "auto",
    keep_rows: KeepRows = False,
    pairs: PairsChoice = "all",
    dtype: Dtype = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Print memory, disk and operations of each step, without running anything.

    Parameters
    ----------
    model
        Like --model elsewhere; only its configuration is read.
    layers
        Number of layers, without --model.
    width
        Width of the residual stream, with --layers.
    mlp
        Coefficients of an FFN, by default 4 x width.
    vocab
        Tokens of the vocabulary, with --layers.
    sentences
        Training sentences.
    val
        Validation sentences.
    tokens
        Tokens per sentence.
    pairs
        all or last, as in 'matlens run'.
    dtype
        Precision of the model.
    """
    from matlens.linear.least_squares import are_few
    from matlens.study.plan import Shape, format_bytes, free_disk, free_memory, plan_study

    parameter_bytes = _BYTES[dtype]
    if model is not None and layers is None and width is None:
        shape = Shape.from_name(
            model, revision=revision, parameter_bytes=parameter_bytes, trust_remote_code=trust_remote_code
        )
    elif model is None and layers is not None and width is not None:
        shape = Shape(
            n_layers=layers, d_model=width, d_mlp=mlp or 0, d_vocab=vocab, parameter_bytes=parameter_bytes
        )
    else:
        raise InputError("Give either --model, or a shape with --layers and --width.")
    everywhere = positions == "all" or (positions == "auto" and are_few(sentences, shape.d_model))
    plans = {
        each: plan_study(
            shape, sentences, val, positions="all" if everywhere else "sampled", pairs=each,
            train_tokens=tokens * sentences, keep_rows=keep_rows,
        )
        for each in get_args(PairsChoice)
    }  # fmt: skip
    free, disk = free_memory(), free_disk(Path())

    def fits(memory: int, written: int) -> str:
        return "no" if written > disk else "unknown" if free is None else "yes" if memory <= free else "no"

    rows = [
        (
            step, format_bytes(need.memory), format_bytes(need.disk) if need.disk else "–",
            f"{need.operations:.1e}", fits(need.memory, need.disk),
        )
        for step, need in plans[pairs].needs.items()
    ]  # fmt: skip
    print_table(
        f"{shape.n_layers} layers of {shape.d_model:,}, {shape.n_parameters:,} parameters; "
        f"{sentences:,}+{val:,} sentences, {'all' if everywhere else 'sampled'} positions, pairs {pairs}",
        ("step", "memory", "disk", "operations", "fits"), rows,
    )  # fmt: skip
    for choice, each in plans.items():
        memory, on_disk = each.job
        print_line(
            f"--pairs {choice}: sufficient statistics of {format_bytes(each.statistics)} while streaming; "
            f"collecting and fitting take {format_bytes(memory)} of memory and {format_bytes(on_disk)} of "
            f"disk. Fits: {fits(memory, on_disk)}."
        )
    memory_and = "" if free is None else f"{format_bytes(free)} of memory and "
    print_line(f"{memory_and}{format_bytes(disk)} of disk are free here.")


@command(app)
def verify(folder: Path, /) -> None:
    """Verify the checksums of all artifacts in FOLDER; exit with code 2 on damage."""
    from matlens.io.verification import verify as verify_folder

    damages = []
    for verdict in verify_folder(folder):
        state = "ok" if verdict.damage is None else f"DAMAGED: {verdict.damage}"
        print_line(f"{verdict.path}  {verdict.what}  {state}")
        damages.append(verdict.damage)
    if not damages:
        raise InputError(f"{folder} must contain artifacts of matlens, got none.")
    if any(damages):
        raise typer.Exit(2)
