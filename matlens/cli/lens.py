"""Commands about lenses: fitted, shown, drawn, shared, and turned into files of other projects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matlens.cli.options import (
    CorpusOptions,
    Layers,
    ModelOptions,
    command,
)
from matlens.cli.printing import (
    print_figures,
    print_frame,
    print_line,
    print_members,
    print_table,
)
from matlens.cli.starting import on_main
from matlens.errors import Between, PositiveInt, Seed

if TYPE_CHECKING:
    from matlens.lens.config import LensConfig
    from matlens.lens.lens import Lens

app = typer.Typer(help="What every layer of a model predicts, read through a lens.", no_args_is_help=True)
Val = Annotated[int, Between(2)]
REPORT_TRAIN, REPORT_VAL = 1000, 500


def _ridge(text: str) -> float | Literal["loo"]:
    try:
        return "loo" if text == "loo" else float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected a number or loo.") from None


@dataclass(frozen=True)
class ClosedFormOptions:
    """Options of `LensConfig`, for every closed form that is fitted.

    Attributes
    ----------
    standardise
        Closed forms from standardised to standardised vectors.
    weighted
        Closed forms with samples weighted by the inverse squared norm of the last layer.
    intercept
        Closed forms with an intercept.
    ridge
        Penalty of closed forms in units of mean diag(X'X); or loo, by leave-one-out.
    toward_identity
        Closed forms whose penalty pulls them towards the identity.
    rank
        Rank of closed forms, by default full.
    shared_map
        Closed forms with one map for all layers.
    exclude_sinks
        Closed forms without attention sinks.
    """

    standardise: bool = False
    weighted: bool = False
    intercept: bool = False
    ridge: Annotated[Any, typer.Option(parser=_ridge, metavar="FLOAT|loo")] = None
    toward_identity: bool = False
    rank: int | None = None
    shared_map: bool = False
    exclude_sinks: bool = False

    def methods(self, names: list[str]) -> dict[str, str | LensConfig]:
        """The lenses of some names, with these options, by name."""
        from matlens.lens.config import parse_methods

        given: Any = {
            "standardise": self.standardise, "weighted": self.weighted, "intercept": self.intercept,
            "ridge": self.ridge, "toward": self.toward_identity and "identity", "rank": self.rank,
            "shared_map": self.shared_map, "sinks": self.exclude_sinks and "exclude",
        }  # fmt: skip
        given = {option: value for option, value in given.items() if value not in (None, False)}
        changed = [
            name if config is None else replace(config, **given)
            for name, config in parse_methods(names).items()
        ]
        return {method if isinstance(method, str) else method.name: method for method in changed}


@command(app)
def fit(
    model: ModelOptions,
    corpus: CorpusOptions,
    options: ClosedFormOptions,
    out: Path,
    method: list[str] = ["mat"],  # noqa: B006
    train: PositiveInt | None = None,
    val: Val | None = None,
    seed: Seed = 0,
    positions: Literal["all", "sampled"] = "all",
    layers: Layers = None,
    rows: Path | None = None,
    prompts: Val = 30,
    batch_tokens: PositiveInt | None = None,
) -> None:
    """Fit lenses and save them in OUT, each in a folder of its own where there are several.

    Of the corpus, the validation sentences are left for evaluation: they are those of the other commands.

    Parameters
    ----------
    method
        Closed forms: mat and affine, with the options below; id needs no fit. Trained: scaled, polished,
        tuned, jacobian; tuned takes minutes a layer, jacobian minutes a sentence. Give it once for each lens.
    positions
        Every token of a sentence, or one that is drawn.
    rows
        Where vectors are written that lenses are trained on, which can be removed afterwards; in memory
        without.
    """
    from matlens.study.study import slug

    methods = options.methods(method)  # before the work, not after it
    folders = {name: out if len(methods) == 1 else out / slug(name) for name in methods}
    from matlens.lens.files import check_lens_folder

    for name, folder in folders.items():
        check_lens_folder(folder, name)
    model.check()
    part, _ = corpus.parts(train, val, seed)
    bridge = model.load()
    from matlens.lens.lens import Lens

    lenses = Lens.fit(
        bridge, part, method=list(methods.values()), positions=positions, layers=layers,
        seed=seed, batch_tokens=batch_tokens, n_prompts=prompts, folder=rows,
    )  # fmt: skip
    with on_main("lenses") as is_main:
        for name, lens in lenses.items() if is_main else ():
            folder = folders[name]
            lens.save(folder)
            n = lens.n_samples
            samples = "" if n is None else f", fitted on {n:,} tokens"
            print_line(f"{name}: {lens.n_parameters:,} parameters{samples}, in {folder}")


@command(app)
def report(
    model: ModelOptions,
    corpus: CorpusOptions,
    method: list[str] | None = None,
    layers: Layers = None,
    against: str | None = None,
    prompts: Val = 30,
    longest: PositiveInt = 128,
    evaluations: Path | None = None,
    train: PositiveInt | None = None,
    val: Val | None = None,
    seed: Seed = 0,
    out: Path = Path("out"),
) -> None:
    """Fit lenses on the same tokens, evaluate all on the same others, and print what each cost.

    The published table has --train 4000, --val 1000, --method tuned and --method jacobian: an hour.

    Parameters
    ----------
    method
        A method as in 'matlens lens fit', once for each lens; by default all but tuned and jacobian, which
        take minutes a layer.
    train
        Sentences that maps are fitted on; by default 1000, or fewer of a small corpus.
    val
        Other sentences that the maps are evaluated on; by default 500, or fewer of a small corpus.
    layers
        Layers with a comma between, by default five, evenly spread.
    against
        The lens that others are compared with, by default mat.
    longest
        Tokens that such a sentence is cut to.
    evaluations
        Folder with lens-eval-multihop.json and the like, of data/evaluations of the repository
        anthropics/jacobian-lens.
    """
    model.check()
    from matlens import plots
    from matlens.io.tables import write_results
    from matlens.lens.comparison import compare_lenses
    from matlens.lens.open_sets import read_evaluations

    parts = corpus.parts(train, val, seed, default_train=REPORT_TRAIN, default_val=REPORT_VAL)
    sets = None if evaluations is None else read_evaluations(evaluations)
    bridge = model.load()
    comparison = compare_lenses(
        bridge, parts, out, methods=method, layers=layers, against=against, n_prompts=prompts,
        longest=longest, evaluations=sets, seed=seed,
    )  # fmt: skip
    tables = {
        "lens_report": (comparison.report, plots.plot_report),
        "lens_exits": (comparison.exits, None),
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
def show(prompt: str, /, model: ModelOptions, lens: str = "id", last: PositiveInt = 8) -> None:
    """Show what every layer predicts after each token of a prompt: a line a layer, a column a token.

    Parameters
    ----------
    last
        Show the last so many tokens of the prompt.
    """
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
    prompt: str,
    /,
    model: ModelOptions,
    lens: str = "id",
    token: list[str] | None = None,
    plot: Path | None = None,
    csv: Path | None = None,
    colour: Literal["probability", "kl", "rank", "entropy"] = "probability",
) -> None:
    """Follow the prediction after the prompt through the layers, and draw all tokens and layers.

    Parameters
    ----------
    token
        A word of one token whose rank to show at each layer; give it once for each.
    plot
        Draw a cell for each token and layer: .png, .pdf or .svg.
    csv
        Write a row for each token, layer and --token.
    colour
        What colours the cells.
    """
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
        from matlens.io.files import write_files
        from matlens.io.tables import csv_text

        write_files({csv: csv_text(read.to_dataframe(words))})
        print_line(f"Table in {csv}.")
    if plot is not None:
        read.plot(plot, colour=colour)
        print_line(f"Figure in {plot}.")


@command(app)
def convert(source: Path, target: Path, /, model: ModelOptions) -> None:
    """Turn a lens of TransformerLens or tuned-lens into a folder of matlens, or a folder into their file.

    Parameters
    ----------
    source
        A folder of 'matlens lens fit', a file of TransformerLens' JacobianLens, or a folder of tuned-lens.
    target
        A .pt file for JacobianLens, or a folder of matlens.
    """
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


@command(app)
def push(
    source: Path,
    repository: str,
    /,
    name: str | None = None,
    results: Path | None = None,
    private: bool = False,
) -> None:
    """Put a lens into a repository of the hub, with a card that says what it was fitted on.

    Parameters
    ----------
    source
        A folder of 'matlens lens fit'.
    name
        Its folder there, by default model/method/corpus.
    results
        Table of 'matlens lens report' with r2 and Precision@1 for its card.
    private
        Make a repository that others cannot read.
    """
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
def pull(repository: str, name: str | None = None, /, *, out: Path, revision: str | None = None) -> None:
    """Read a lens of a repository of the hub into OUT, every byte of it checked.

    Parameters
    ----------
    name
        The folder of the lens there; where there is one, none.
    revision
        A commit, a branch or a tag, by default main.
    """
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
