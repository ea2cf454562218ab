"""Commands about lenses: fitted, shown, drawn, shared, and turned into files of other projects."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matlens.cli.distributed import on_main
from matlens.cli.expected import print_expected
from matlens.cli.groups import CorpusOptions, ModelOptions, grouped, sizes_of
from matlens.cli.lens_report import Layers, Prompts, numbered, report
from matlens.cli.options import BatchTokens, Out, Seed, Train, Val, folder_of
from matlens.cli.printing import print_line, print_table
from matlens.errors import InputError
from matlens.io.files import check_file_name, check_writable, system_errors
from matlens.io.numbers import number_text

_SUMS = 6  # operations per token, layer and squared width that the sums of a closed form take

if TYPE_CHECKING:
    from matlens.data.corpus import Corpus
    from matlens.lens.lens import Lens

app = typer.Typer(help="What every layer of a model predicts, read through a lens.", no_args_is_help=True)
app.command()(report)


class ColourChoice(StrEnum):
    """What colours the cells of a trajectory."""

    probability = "probability"
    kl = "kl"
    rank = "rank"
    entropy = "entropy"


class LensPositions(StrEnum):
    """Which tokens of a sentence a lens is fitted on."""

    all = "all"
    drawn = "drawn"


Prompt = Annotated[
    str, typer.Argument(help="A text; for masked-LM models with one mask in it.", show_default=False)
]
LensFolder = Annotated[
    str,
    typer.Option("--lens", help="A folder of 'matlens lens fit'; or id, the logit lens, which needs no fit."),
]


def _fit_operations(model: Any, part: Corpus, names: list[str]) -> float:
    """About how many floating-point operations closed forms take; what is trained says it by its bars."""
    from matlens.lens.trained import TRAINED
    from matlens.study.plan import CHARACTERS, Shape

    shape, n_tokens = Shape.from_model(model), sum(map(len, part.sentences)) / CHARACTERS
    closed = len([name for name in names if name not in TRAINED])
    return n_tokens * (2 * shape.n_parameters + _SUMS * closed * shape.n_layers * shape.d_model**2)


@app.command()
@grouped
def fit(
    model: ModelOptions,
    corpus: CorpusOptions,
    out: Out,
    method: Annotated[
        list[str],
        typer.Option(
            help="mat, affine, ridge, ridge(0.01), ridge-identity, weighted, normed, narrow(64), one-jump, "
            "or several with a plus between them; ' without sinks' at the end leaves attention sinks out. "
            "Or trained: scaled, polished, tuned, jacobian; tuned takes minutes a layer, jacobian minutes a "
            "sentence. Give it once for each lens: all come from one pass over the data.",
        ),
    ] = ["mat"],  # noqa: B006
    train: Train = None,
    val: Val = None,
    seed: Seed = 0,
    positions: Annotated[
        LensPositions, typer.Option(help="Every token of a sentence, or one that is drawn.")
    ] = LensPositions.all,
    layers: Layers = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            "--rows",
            metavar="FOLDER",
            help="Where vectors are written that lenses are trained on, which can be removed afterwards; "
            "in memory without.",
        ),
    ] = None,
    prompts: Prompts = 30,
    batch_tokens: BatchTokens = None,
) -> None:
    """Fit lenses and keep them in OUT, each in a folder of its own where there are several.

    Of the corpus, the validation sentences are left for judging: they are those of the other commands.
    """
    from matlens.lens.trained import check_method_names, check_rows_folder
    from matlens.study.sizes import fitting_sizes
    from matlens.study.study import slug

    names = check_method_names(method)  # before the work, not after it
    check_rows_folder(names, rows)
    wanted_layers = numbered(layers)
    folders = {name: out if len(names) == 1 else out / slug(name) for name in names}
    from matlens.lens.files import check_lens_folder

    for name, folder in folders.items():
        check_lens_folder(folder, name)
    model.check()
    sentences = corpus.load()
    wanted = sizes_of(train, val)
    n_train, n_validation = fitting_sizes(
        len(sentences), wanted["n_train"], wanted["n_validation"], wanted["adjustable"]
    )
    part, _ = sentences.split(n_train=n_train, n_validation=n_validation, seed=seed)
    bridge = model.load()
    print_expected(bridge, _fit_operations(bridge, part, names), "--train, --positions drawn")
    from matlens.lens.lens import Lens

    lenses = Lens.fit(
        bridge, part, method=names, positions=positions.value, layers=wanted_layers, seed=seed,
        batch_tokens=batch_tokens, n_prompts=prompts, folder=rows,
    )  # fmt: skip
    with on_main("lenses") as is_main:
        for name, lens in lenses.items() if is_main else ():
            folder = folders[name]
            lens.save(folder)
            n = lens.n_samples
            samples = "" if n is None else f", fitted on {n:,} tokens"
            print_line(f"{name}: {lens.n_numbers:,} numbers{samples}, in {folder}")


@app.command()
@grouped
def show(
    prompt: Prompt,
    model: ModelOptions,
    lens: LensFolder = "id",
    last: Annotated[int, typer.Option(min=1, help="Show the last so many tokens of the prompt.")] = 8,
) -> None:
    """Show what every layer predicts after each token of a prompt: a line a layer, a column a token."""
    from matlens.models.vocabulary import visible

    trajectory = _lens(model, lens).trajectory(prompt, k=1)
    best = trajectory.top_tokens()
    first = max(0, len(trajectory.tokens) - last)
    rows = [
        (layer, *(visible(best[layer][place][0]) for place in range(first, len(trajectory.tokens))))
        for layer in trajectory.layers
    ]
    print_table(prompt, ("layer", *map(visible, trajectory.tokens[first:])), rows)


@app.command()
@grouped
def trajectory(
    prompt: Prompt,
    model: ModelOptions,
    lens: LensFolder = "id",
    token: Annotated[
        list[str] | None,
        typer.Option(help="A word of one token whose rank to show at each layer; give it once for each."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a cell for each token and layer: .png or .pdf.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row for each token, layer and --token.")] = None,
    colour: Annotated[ColourChoice, typer.Option(help="What colours the cells.")] = ColourChoice.probability,
) -> None:
    """Follow the prediction after the prompt through the layers, and draw all tokens and layers."""
    from matlens.models.vocabulary import visible

    for path in filter(None, (csv, plot)):  # before the work, not after it
        check_file_name(path)
    if plot is not None:
        from matlens.plots.style import check_figure_name

        check_figure_name(plot)
    read = _lens(model, lens).trajectory(prompt)
    words = list(token or ())
    table = read.to_dataframe(words)
    place = read.place
    ranks = [read.rank(word)[:, place].tolist() for word in words]
    here = read.to_dataframe().query("position == @place")
    numbers = ("probability", "entropy", "kl")
    rows = [
        (
            row["layer"], visible(row["predicted"]), *(number_text(row[name]) for name in numbers),
            row["rank"], *(of_word[i] for of_word in ranks),
        )
        for i, row in enumerate(here.to_dict("records"))
    ]  # fmt: skip
    answers = (f"rank of {word.strip()}" for word in words)
    heads = ("layer", "predicted", "probability", "entropy", "KL", "rank of the last", *answers)
    print_table(f"{prompt}\nAt token {place}, '{visible(read.tokens[place])}'", heads, rows)
    if csv is not None:
        from matlens.io.files import write_text
        from matlens.io.tables import csv_text

        with system_errors(csv):
            csv.parent.mkdir(parents=True, exist_ok=True)
            write_text(csv, csv_text(table))
        print_line(f"Table in {csv}.")
    if plot is not None:
        read.plot(plot, colour=colour.value)
        print_line(f"Figure in {plot}.")


@app.command()
@grouped
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder of 'matlens lens fit', a file of TransformerLens' JacobianLens, or a folder of "
            "tuned-lens.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            help="A .pt file for JacobianLens, or a folder of matlens.",
            show_default=False,
            parser=folder_of,
            metavar="TARGET",
        ),
    ],
    model: ModelOptions,
) -> None:
    """Turn a lens of TransformerLens or tuned-lens into a folder of matlens, or a folder into their file."""
    with system_errors(source):
        if not source.exists():
            raise InputError(f"There is no {source}. Expected a folder of a lens, or a .pt file.")
    if target.suffix == ".pt":
        check_file_name(target)
    else:
        check_writable(target)
    bridge = model.load()
    from matlens.lens.lens import Lens

    if source.is_file():
        lens = Lens.from_jacobian_lens(source, bridge)
    elif (source / "params.pt").exists():
        lens = Lens.from_tuned_lens(source, bridge)
    else:
        lens = Lens.load(source, bridge)
    if target.suffix == ".pt":
        lens.to_jacobian_lens(target)
    else:
        lens.save(target)
    print_line(f"A lens of {len(lens.layers)} layers ({lens.method}) in {target}.")


Repository = Annotated[
    str, typer.Argument(help="A repository of the hub, such as someone/lenses.", show_default=False)
]


@app.command()
@grouped
def push(
    source: Annotated[Path, typer.Argument(help="A folder of 'matlens lens fit'.", show_default=False)],
    repository: Repository,
    name: Annotated[
        str | None, typer.Option(help="Its folder there.", show_default="model/method/corpus")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="CSV",
            help="Table of 'matlens lens report' with r2 and Precision@1 for its card.",
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make a repository that others cannot read.")
    ] = False,
) -> None:
    """Put a lens into a repository of the hub, with a card that says what it was fitted on."""
    from matlens.io.tables import read_table
    from matlens.lens.lens import Lens

    table = None
    if results is not None:
        table = read_table(
            results, ["method", "metric"], what="a table of results", keep_default_na=True,
            made_by="'matlens lens report' writes lens_report.csv.",
        )  # fmt: skip
    lens = Lens.load(source)
    commit = lens.push_to_hub(repository, name=name, quality=table, private=private)
    print_line(f"{lens.method}, {len(lens.layers)} layers, in {repository} at {commit}")


@app.command()
@grouped
def pull(
    repository: Repository,
    out: Out,
    name: Annotated[
        str | None, typer.Argument(help="The folder of the lens there; where there is one, none.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="A commit, a branch or a tag.", show_default="main")
    ] = None,
) -> None:
    """Read a lens of a repository of the hub into OUT, every byte of it checked."""
    from matlens.lens.lens import Lens

    lens = Lens.from_pretrained(repository, name, revision=revision)
    lens.save(out)
    of_hub = lens.provenance.details["hub"]
    print_line(f"{of_hub['name']} of {repository} at {of_hub['commit']}: {lens.method}, in {out}")


def _lens(model: ModelOptions, folder: str) -> Lens:
    """The lens that is asked for, on its model."""
    if folder != "id" and not Path(folder).is_dir():
        raise InputError(f"There is no folder {folder}. Expected one of 'matlens lens fit', or id.")
    bridge: Any = model.load()
    from matlens.lens.lens import Lens

    return Lens.identity(bridge) if folder == "id" else Lens.load(folder, bridge)
