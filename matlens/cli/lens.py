"""Commands for lenses: fit, show, plot, share and convert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from matlens.cli.options import CorpusOptions, Layers, LensOptions, ModelOptions, as_prompt, command
from matlens.cli.printing import print_figures, print_frame, print_line, print_members, print_table
from matlens.cli.starting import on_main
from matlens.errors import Between, PositiveInt, Seed
from matlens.lens.config import LensConfig, parse_methods

app = typer.Typer(help="What every layer of a model predicts, read through a lens.", no_args_is_help=True)
Val = Annotated[int, Between(2)]
_REPORT_SIZES = 1000, 500


def _methods(names: list[str], options: LensConfig) -> list[str | LensConfig]:
    """The lenses of some names, closed forms with the options that differ from their defaults."""
    defaults = vars(LensConfig())
    changes = {name: value for name, value in vars(options).items() if value != defaults[name]}
    return [
        name if config is None else replace(config, **changes)
        for name, config in parse_methods(names).items()
    ]


@command(app)
def fit(
    model: ModelOptions,
    corpus: CorpusOptions,
    options: LensConfig,
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
    """Fit lenses and save them in OUT, or in one folder each if there are several.

    Parameters
    ----------
    val
        Validation sentences, which are excluded: the --val of the command that evaluates the lens.
    method
        Closed forms: mat and affine, with the options below; id needs no fit. Trained: scaled, polished,
        tuned (minutes per layer), jacobian (minutes per sentence). Repeatable.
    positions
        All tokens of each sentence, or one sampled token.
    rows
        Folder for the vectors that lenses are trained on (delete it afterwards); by default in memory.
    """
    from matlens.study.study import slug

    methods = _methods(method, options)  # before the work, not after it
    names = list(parse_methods(methods))
    folders = {name: out if len(names) == 1 else out / slug(name) for name in names}
    from matlens.lens.files import check_lens_folder

    for name, folder in folders.items():
        check_lens_folder(folder, name)
    part, _ = corpus.parts((train, val), seed)
    bridge = model.load()
    from matlens.lens.lens import Lens

    lenses = Lens.fit(
        bridge, part, method=methods, positions=positions, layers=layers, seed=seed,
        batch_tokens=batch_tokens, n_prompts=prompts, folder=rows,
    )  # fmt: skip
    with on_main("lenses") as is_main:
        for name, lens in lenses.items() if is_main else ():
            lens.save(folders[name])
            n = lens.n_samples
            samples = "" if n is None else f", fitted on {n:,} tokens"
            print_line(f"{name}: {lens.n_parameters:,} parameters{samples}, in {folders[name]}")


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
    """Compare the quality and cost of lenses, fitted and evaluated on the same tokens.

    The published table: --train 4000 --val 1000 --method tuned --method jacobian, about an hour.

    Parameters
    ----------
    method
        A method as in 'matlens lens fit' (repeatable); by default all but tuned and jacobian, which take
        minutes per layer.
    train
        Training sentences; by default 1000, or fewer of a small corpus.
    val
        Validation sentences; by default 500, or fewer of a small corpus.
    layers
        Comma-separated layers; by default five, evenly spaced.
    against
        Reference lens of paired differences, by default mat.
    longest
        Maximum tokens of such a sentence.
    evaluations
        Folder with lens-eval-multihop.json and others, from data/evaluations of anthropics/jacobian-lens.
    """
    from matlens import plots
    from matlens.io.tables import write_results
    from matlens.lens.comparison import compare_lenses
    from matlens.lens.open_sets import read_evaluations

    parts = corpus.parts((train, val), seed, _REPORT_SIZES)
    sets = None if evaluations is None else read_evaluations(evaluations)
    bridge = model.load()
    comparison = compare_lenses(
        bridge, parts, out, methods=method, layers=layers, against=against, n_prompts=prompts,
        longest=longest, evaluations=sets, seed=seed,
    )  # fmt: skip
    tables = {
        "lens_report": comparison.report,
        "lens_exits": comparison.exits,
        "lens_evaluations": comparison.evaluations,
    }
    for name, table in tables.items():
        if table is not None:
            write_results(out, name, table, comparison.origin)
            print_line(out / f"{name}.csv")
    print_figures(plots.save(plots.plot_report(comparison.report), out / "lens_report"))
    print_members(comparison.report, comparison.exits)


@command(app)
def show(
    prompt: str,
    /,
    model: ModelOptions,
    lens: LensOptions,
    last: PositiveInt | None = None,
    chat: bool = False,
) -> None:
    """Show what every layer predicts after each token of a prompt.

    Parameters
    ----------
    last
        Number of tokens to show, from the end of the prompt.
    """
    from matlens.models.tokens import visible

    trajectory = lens.load(model).trajectory(as_prompt(prompt, chat=chat), k=1)
    best = trajectory.top_tokens()
    first = 0 if last is None else max(0, len(trajectory.tokens) - last)
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
    lens: LensOptions,
    token: list[str] | None = None,
    plot: Path | None = None,
    csv: Path | None = None,
    color: Literal["probability", "kl", "rank", "entropy"] = "probability",
    chat: bool = False,
) -> None:
    """Print the prediction after the prompt at each layer, and plot all tokens and layers.

    Parameters
    ----------
    token
        Show the rank of this one-token word at each layer (repeatable).
    plot
        Plot one cell per token and layer: .png, .pdf or .svg.
    csv
        Write one row per token, layer and --token.
    color
        Color of the cells.
    """
    from matlens.models.tokens import visible

    read = lens.load(model).trajectory(as_prompt(prompt, chat=chat))
    words = list(token or ())
    place = read.place
    last = read.to_dataframe().query("position == @place").drop(columns=["position", "token", "predicted_id"])
    ranks = {
        f"rank of {word.strip()}": [int(rank[place]) for rank in read.rank(word).values()] for word in words
    }
    print_frame(
        f"{prompt}\nAt token {place}, '{visible(read.tokens[place])}'",
        last.assign(predicted=last["predicted"].map(visible), **ranks),
    )
    if csv is not None:
        from matlens.io.files import write_files
        from matlens.io.tables import csv_text

        write_files({csv: csv_text(read.to_dataframe(words))})
        print_line(f"Table in {csv}.")
    if plot is not None:
        read.plot(plot, color=color)
        print_line(f"Figure in {plot}.")


@command(app)
def convert(source: Path, target: Path, /, model: ModelOptions, strict: bool = True) -> None:
    """Convert lenses between folders of matlens and files of TransformerLens or tuned-lens.

    Parameters
    ----------
    source
        A folder of 'matlens lens fit', a file of TransformerLens' JacobianLens, or a folder of tuned-lens.
    target
        A .pt file for JacobianLens, or a folder of matlens.
    strict
        Require the model of the lens; else another of its shape is accepted.
    """
    bridge = model.load()
    from matlens.lens.lens import Lens

    if source.is_file():
        lens = Lens.from_jacobian_lens(source, bridge, strict=strict)
    elif (source / "params.pt").exists():
        lens = Lens.from_tuned_lens(source, bridge)
    else:
        lens = Lens.load(source, bridge, strict=strict)
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
    """Push a lens to a hub repository, with a model card.

    Parameters
    ----------
    source
        A folder of 'matlens lens fit'.
    name
        Folder of the lens in the repository, by default model/method/corpus.
    results
        Table of 'matlens lens report' with r2 and Precision@1 for its card.
    private
        Create a private repository.
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
    """Download a lens from a hub repository into OUT and verify its checksums.

    Parameters
    ----------
    name
        Folder of the lens in the repository; optional if there is only one.
    revision
        A commit, a branch or a tag, by default main.
    """
    from matlens.lens.lens import Lens

    lens = Lens.from_pretrained(repository, name, revision=revision)
    lens.save(out)
    of_hub = lens.provenance.details["hub"]
    print_line(f"{of_hub['name']} of {repository} at {of_hub['commit']}: {lens.method}, in {out}")
