"""Commands of the main job, at once or step by step in one folder, in parts, planned or verified."""

from __future__ import annotations

import re
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
    asked,
    command,
)
from matlens.cli.printing import print_expected, print_figures, print_line, print_results, print_table
from matlens.cli.starting import ask_main, on_main
from matlens.errors import InputError, NonNegativeInt, PositiveInt, check_choice

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

app = typer.Typer()


@command(app)
def run(
    model: ModelOptions,
    corpus: CorpusOptions,
    samples: SampleOptions,
    fit: FitOptions,
    title: str | None = None,
) -> None:
    """Do the main job: collect, fit, evaluate and plot. A run that was killed resumes.

    Parameters
    ----------
    title
        Title of the figures, instead of their own.
    """
    from matlens.study.output import FIGURES, MAPS, TRAIN, VALIDATION, RunNote, check_output

    check_output(samples.out, {TRAIN: {}, VALIDATION: {}, MAPS: {}})
    groups = asked(model=model, corpus=corpus, samples=samples, fit=fit)
    note = RunNote(samples.out, {**groups, "figures": {"title": title}})
    if ask_main(note.answers, "whether the run is finished"):
        print_line(f"This run is finished in {samples.out}, with the same options, model and corpus.")
        print_results(samples.out)
        print_figures([samples.out / figure for figure in FIGURES if (samples.out / figure).exists()])
        return
    from matlens.study.steps import plot_results

    study = samples.study(model, corpus, **asdict(fit))
    print_expected(study.model, 0, study.operations, "--train, --val")
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
    """Run sentences through a model once and store the stream of every layer.

    It is written to OUT/train and OUT/validation.
    """
    from matlens.io.files import check_writable

    check_writable(samples.out)
    study = samples.study(model, corpus)
    _ = study.stream
    print_line(f"Activations in {study.folder}. Next: matlens fit {study.folder}")


@command(app)
def fit(folder: Path, /, how: FitOptions) -> None:
    """Fit linear maps between layers on what 'collect' has written, in FOLDER/maps.

    Parts of a job, such as 3/8, are run by 'matlens part', and 'matlens merge' joins them and fits the maps.

    Parameters
    ----------
    folder
        The --out folder of 'matlens collect' or 'matlens run'.
    """
    from matlens.study.output import MAPS
    from matlens.study.steps import fit_maps

    maps = fit_maps(folder, **asdict(how))
    print_line(f"{len(maps)} maps in {folder / MAPS}. Next: matlens evaluate {folder}")


def _part_of(text: str) -> tuple[int, int]:
    read = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if read is None or not 1 <= int(read[1]) <= int(read[2]):
        raise typer.BadParameter(f"{text[:40]}: expected a part such as 3/8, from 1/8 to 8/8.")
    return int(read[1]), int(read[2])


@command(app, "part")
def run_part(
    part: Annotated[Any, typer.Option("--part", parser=_part_of, metavar="K/N")],
    model: ModelOptions,
    corpus: CorpusOptions,
    samples: SampleOptions,
    pairs: PairsOption = "all",
) -> None:
    """Run one part of the training sentences and store what fits need of it: moments, and no vectors.

    All parts are given the same options but for --part and --out. 'matlens merge' joins them.

    Parameters
    ----------
    part
        Which part of the training sentences, such as 3/8.
    pairs
        all, last, or a list such as 0:12,6:12 (negative: from the end).
    """
    from matlens.io.files import check_writable

    check_writable(samples.out)
    study = samples.study(model, corpus, pairs=pairs)
    number, of = part
    moments = study.part_moments(number, of)
    print_line(
        f"Part {number}/{of}: moments of {moments.n_samples:,} samples in {samples.out}. When all are there: "
        "matlens merge FOLDER... --out FOLDER"
    )


@command(app)
def merge(parts: list[Path], /, out: Path, how: FitOptions) -> None:
    """Join the moments of all parts of a job, in OUT/moments, and fit maps on them, in OUT/maps.

    Parameters
    ----------
    parts
        Folders that 'matlens part' has written.
    out
        Folder for everything that is written.
    """
    from matlens.linear.pairs import resolve_pairs
    from matlens.linear.streaming import StoredLeastSquares
    from matlens.linear.sums import check_kept
    from matlens.study.output import MAPS, MOMENTS
    from matlens.study.plan import check_merge
    from matlens.study.steps import fit_moments

    moments, arguments = StoredLeastSquares(*parts), asdict(how)
    if how.pairs == "all":  # all that the parts have stored
        arguments["pairs"] = None
    else:
        check_kept(moments, resolve_pairs(arguments["pairs"], moments.provenance))  # before it is written
    check_merge(moments, out / MOMENTS)
    maps = fit_moments(moments.merge(out / MOMENTS), out / MAPS, **arguments)
    print_line(
        f"{len(maps)} maps of {moments.n_samples:,} samples in {out / MAPS}. 'matlens run' with the options "
        f"of the parts and --out {out} evaluates them."
    )


@command(app)
def evaluate(
    folder: Path,
    /,
    model: str | None = None,
    device: str | None = None,
    dtype: Dtype | None = None,
    same_precision: Annotated[bool, typer.Option("--same-precision/--other-precision")] = True,
    trust_remote_code: bool = False,
    stack: Literal["encoder", "decoder"] | None = None,
) -> None:
    """Evaluate maps layer by layer: r2, Precision@k and surprisal, in FOLDER/results.csv.

    Parameters
    ----------
    folder
        The --out folder of 'matlens collect' or 'matlens run'.
    model
        Where the model is now, if not where it was collected from.
    device
        cpu, cuda or mps; by default the best there is.
    dtype
        Precision of the model, by default that of the maps' model.
    same_precision
        Must the model run in the precision that the maps were fitted in?
    trust_remote_code
        Run code that the model brings.
    stack
        Of an encoder-decoder such as T5, the stack whose stream is read.
    """
    from matlens.linear.mapsets import MapSet
    from matlens.study.output import MAPS, RESULTS
    from matlens.study.steps import evaluate_maps

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
def plot(folder: Path, /, title: str | None = None) -> None:
    """Draw the figures of FOLDER/results.csv, as PNG and PDF.

    Parameters
    ----------
    folder
        The --out folder of 'matlens collect' or 'matlens run'.
    title
        Title of the figures, instead of their own.
    """
    from matlens.study.steps import plot_results

    print_figures(plot_results(folder, title=title))


@command(app)
def plan(
    model: str | None = None,
    layers: PositiveInt | None = None,
    width: PositiveInt | None = None,
    mlp: PositiveInt | None = None,
    vocab: PositiveInt | None = None,
    sentences: PositiveInt = TRAIN,
    val: NonNegativeInt = VAL,
    tokens: PositiveInt = 30,
    positions: PositionChoice = "drawn",
    keep_rows: KeepRows = False,
    pairs: Literal["last", "all"] = "all",
    intercept: bool = False,
    dtype: Dtype = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Say what memory, disk and operations each step takes, and which maps fit, before anything runs.

    Parameters
    ----------
    model
        Like --model elsewhere; only its configuration is read.
    layers
        L, where there is no --model.
    width
        Width of the stream, with --layers.
    mlp
        Coefficients of an FFN, by default 4 x width.
    vocab
        Tokens of the vocabulary, with --layers; by default 50000.
    sentences
        Sentences that maps are fitted on.
    val
        Sentences that they are evaluated on.
    tokens
        Tokens of a sentence.
    positions
        drawn, all or auto, as in 'matlens run'.
    keep_rows
        Store vectors of all positions on disk, or only what fits need of them.
    pairs
        all or last, as in 'matlens run'.
    intercept
        Fit a bias too.
    dtype
        Precision of the model.
    revision
        Branch, tag or commit of a model on the hub.
    trust_remote_code
        Run code that the model brings.
    """
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


@command(app)
def verify(folder: Path, /) -> None:
    """Check all bytes of what matlens has written in FOLDER and below it; exit with code 2 on damage.

    Parameters
    ----------
    folder
        A folder that matlens has written into.
    """
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
