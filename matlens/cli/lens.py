"""Commands about lenses: fitted, shown, drawn, shared, and turned into files of other projects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matlens.cli.distributed import on_main
from matlens.cli.options import (
    REPORT_TRAIN,
    REPORT_VAL,
    BatchTokens,
    CorpusOptions,
    ModelOptions,
    Out,
    Prompt,
    ReportTrain,
    ReportVal,
    Seed,
    Train,
    Val,
    command,
    folder_of,
    listed,
    numbered,
)
from matlens.cli.printing import (
    print_expected,
    print_figures,
    print_frame,
    print_line,
    print_members,
    print_table,
)
from matlens.errors import InputError
from matlens.io.files import system_errors

_SUMS = 6  # operations per token, layer and squared width that the sums of a closed form take
_READS = 60  # operations per vector, token of the vocabulary and dimension that a lens is judged with

if TYPE_CHECKING:
    from matlens.data.corpus import Corpus
    from matlens.lens.config import LensConfig
    from matlens.lens.lens import Lens

app = typer.Typer(help="What every layer of a model predicts, read through a lens.", no_args_is_help=True)
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers", help="Layers with a comma between.", show_default="five, evenly spread; of lens fit, all"
    ),
]
Prompts = Annotated[
    int, typer.Option("--prompts", min=2, help="Sentences that Jacobians are taken on, the longest.")
]
LensFolder = Annotated[
    str,
    typer.Option("--lens", help="A folder of 'matlens lens fit'; or id, the logit lens, which needs no fit."),
]


@dataclass(frozen=True)
class ClosedFormOptions:
    """Options of `LensConfig`, for every closed form that is fitted."""

    intercept: Annotated[bool, typer.Option("--intercept", help="Closed forms with an intercept.")] = False
    ridge: Annotated[
        str | None,
        typer.Option(help="Penalty of closed forms in units of mean diag(X'X); or loo, by leave-one-out."),
    ] = None
    rank: Annotated[int | None, typer.Option(help="Rank of closed forms.", show_default="full")] = None
    exclude_sinks: Annotated[
        bool, typer.Option("--exclude-sinks", help="Closed forms without attention sinks.")
    ] = False

    def methods(self, names: list[str]) -> dict[str, str | LensConfig]:
        """The lenses of some names, with these options, by name."""
        from matlens.lens.config import parse_methods

        given: dict[str, Any] = {"intercept": True} if self.intercept else {}
        if self.ridge is not None:
            try:
                given["ridge"] = self.ridge if self.ridge == "loo" else float(self.ridge)
            except ValueError:
                raise InputError(f"--ridge must be a number or loo, got {self.ridge!r}.") from None
        if self.rank is not None:
            given["rank"] = self.rank
        if self.exclude_sinks:
            given["sinks"] = "exclude"
        changed = [
            name if config is None else replace(config, **given)
            for name, config in parse_methods(names).items()
        ]
        return {method if isinstance(method, str) else method.name: method for method in changed}


def _fit_operations(model: Any, part: Corpus, n_closed: int) -> float:
    """About how many floating-point operations closed forms take; what is trained says it by its bars."""
    from matlens.study.plan import CHARACTERS, Shape

    shape, n_tokens = Shape.from_model(model), sum(map(len, part.sentences)) / CHARACTERS
    return n_tokens * (2 * shape.n_parameters + _SUMS * n_closed * shape.n_layers * shape.d_model**2)


@command(app)
def fit(
    model: ModelOptions,
    corpus: CorpusOptions,
    out: Out,
    method: Annotated[
        list[str],
        typer.Option(
            help="Closed forms: id, mat, affine, ridge, ridge-identity, weighted, normed, normed+affine, "
            "narrow(64), one-jump. Trained: scaled, polished, tuned, jacobian; tuned takes minutes a layer, "
            "jacobian minutes a sentence. Give it once for each lens: all come from one pass over the data.",
        ),
    ] = ["mat"],  # noqa: B006
    options: ClosedFormOptions = ClosedFormOptions(),
    train: Train = None,
    val: Val = None,
    seed: Seed = 0,
    positions: Annotated[
        Literal["all", "drawn"], typer.Option(help="Every token of a sentence, or one that is drawn.")
    ] = "all",
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
    from matlens.study.study import slug

    methods = options.methods(method)  # before the work, not after it
    wanted_layers = numbered(layers)
    folders = {name: out if len(methods) == 1 else out / slug(name) for name in methods}
    from matlens.lens.files import check_lens_folder

    for name, folder in folders.items():
        check_lens_folder(folder, name)
    model.check()
    part, _ = corpus.parts(train, val, seed)
    bridge = model.load()
    print_expected(bridge, _fit_operations(bridge, part, len(methods)), "--train, --positions drawn")
    from matlens.lens.lens import Lens

    lenses = Lens.fit(
        bridge, part, method=list(methods.values()), positions=positions, layers=wanted_layers,
        seed=seed, batch_tokens=batch_tokens, n_prompts=prompts, folder=rows,
    )  # fmt: skip
    with on_main("lenses") as is_main:
        for name, lens in lenses.items() if is_main else ():
            folder = folders[name]
            lens.save(folder)
            n = lens.n_samples
            samples = "" if n is None else f", fitted on {n:,} tokens"
            print_line(f"{name}: {lens.n_parameters:,} numbers{samples}, in {folder}")


def _report_operations(model: Any, parts: tuple[Corpus, Corpus], names: list[str] | None) -> float:
    """About how many floating-point operations a report takes without what is trained for minutes."""
    from matlens.lens.comparison import default_methods
    from matlens.study.plan import CHARACTERS, Shape

    shape, n_lenses = Shape.from_model(model), len(default_methods(model) if names is None else names)
    n_tokens = sum(len(text) for part in parts for text in part.sentences) / CHARACTERS
    read = n_lenses * len(parts[1]) * shape.d_vocab * shape.d_model
    return 2 * shape.n_parameters * n_tokens + _READS * read


@command(app)
def report(
    model: ModelOptions,
    corpus: CorpusOptions,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="Lenses with a comma between: closed forms such as mat, affine, ridge-identity, weighted or "
            "normed+affine, and id, scaled, polished, tuned and jacobian. The last two take minutes a layer.",
            show_default="all but tuned and jacobian",
        ),
    ] = None,
    layers: Layers = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="The lens that others are compared with.", show_default="mat"),
    ] = None,
    prompts: Prompts = 30,
    longest: Annotated[
        int, typer.Option("--longest", min=1, help="Tokens that such a sentence is cut to.")
    ] = 128,
    evaluations: Annotated[
        Path | None,
        typer.Option(
            "--evaluations",
            help="Folder with lens-eval-multihop.json and the like, of data/evaluations of the repository "
            "anthropics/jacobian-lens.",
        ),
    ] = None,
    train: ReportTrain = None,
    val: ReportVal = None,
    seed: Seed = 0,
    out: Out = Path("out"),
) -> None:
    """Fit lenses on the same tokens, judge all on the same others, and say what each cost."""
    names, wanted = listed(methods), numbered(layers)
    model.check()
    from matlens import plots
    from matlens.io.tables import write_results
    from matlens.lens.comparison import compare_lenses
    from matlens.lens.open_sets import read_evaluations

    parts = corpus.parts(train, val, seed, default_train=REPORT_TRAIN, default_val=REPORT_VAL)
    sets = None if evaluations is None else read_evaluations(evaluations)
    bridge = model.load()
    print_expected(
        bridge, _report_operations(bridge, parts, names), "--train, --val; tuned and jacobian add more"
    )
    comparison = compare_lenses(
        bridge, parts, out, methods=names, layers=wanted, against=against, n_prompts=prompts,
        longest=longest, evaluations=sets, seed=seed,
    )  # fmt: skip
    tables = {
        "lens_report": (comparison.report, plots.plot_report),
        "lens_exits": (comparison.exits, None),
        "lens_cosines": (comparison.cosines, plots.plot_cosines),
        "lens_evaluations": (comparison.evaluations, None),
    }
    for name, (table, draw) in tables.items():
        if table is not None:
            write_results(out, name, table, comparison.origin)
            print_line(out / f"{name}.csv")
            if draw is not None:
                print_figures(plots.save(draw(table), out / name))
    print_members(comparison.report, comparison.exits)


@command(app)
def show(
    prompt: Prompt,
    model: ModelOptions,
    lens: LensFolder = "id",
    last: Annotated[int, typer.Option(min=1, help="Show the last so many tokens of the prompt.")] = 8,
) -> None:
    """Show what every layer predicts after each token of a prompt: a line a layer, a column a token."""
    from matlens.models.tokens import visible

    trajectory = _lens(model, lens).trajectory(prompt, k=1)
    best = trajectory.top_tokens()
    first = max(0, len(trajectory.tokens) - last)
    rows = [
        (layer, *(visible(best[layer][place][0]) for place in range(first, len(trajectory.tokens))))
        for layer in trajectory.layers
    ]
    print_table(prompt, ("layer", *map(visible, trajectory.tokens[first:])), rows)


@command(app)
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
    colour: Annotated[
        Literal["probability", "kl", "rank", "entropy"], typer.Option(help="What colours the cells.")
    ] = "probability",
) -> None:
    """Follow the prediction after the prompt through the layers, and draw all tokens and layers."""
    from matlens.models.tokens import visible

    read = _lens(model, lens).trajectory(prompt)
    words = list(token or ())
    place = read.place
    last = read.to_dataframe().query("position == @place")
    ranks = {word: read.rank(word)[:, place].tolist() for word in words}
    print_frame(
        f"{prompt}\nAt token {place}, '{visible(read.tokens[place])}'",
        last.assign(predicted=last["predicted"].map(visible), **ranks),
        {
            "layer": "layer", "predicted": "predicted", "probability": "probability", "entropy": "entropy",
            "kl": "KL", "rank": "rank of the last", **{word: f"rank of {word.strip()}" for word in words},
        },
    )  # fmt: skip
    if csv is not None:
        from matlens.io.files import write_text
        from matlens.io.tables import csv_text

        with system_errors(csv):
            csv.parent.mkdir(parents=True, exist_ok=True)
            write_text(csv, csv_text(read.to_dataframe(words)))
        print_line(f"Table in {csv}.")
    if plot is not None:
        read.plot(plot, colour=colour)
        print_line(f"Figure in {plot}.")


@command(app)
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


@command(app)
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


@command(app)
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
    bridge = model.load()
    from matlens.lens.lens import Lens

    return Lens.identity(bridge) if folder == "id" else Lens.load(folder, bridge)
