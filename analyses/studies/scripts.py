"""Run analyses as scripts: their common command-line options, and where tables are written."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pandas as pd
import typer
from matplotlib.figure import Figure

from matlens import plots
from matlens.cli import options, printing, starting
from matlens.data import Corpus, Examples, make_windows
from matlens.errors import Between, NonNegative, PositiveInt, Seed, printable
from matlens.io import csv_text, write_files, write_results
from studies.study import Model, Study, absent

SECONDS = "processor_seconds"
"""Key of an analysis' CPU seconds in the JSON next to its table."""

Patched = Annotated[
    int, typer.Option("--patched", min=2, help="Validation sentences that the patched model is run on.")
]
TwoOrMore = Annotated[int, Between(2)]
_GIVEN = ("study", "studies", "report")  # parameters of an analysis that are not options


@dataclass(frozen=True)
class Clustering:
    """How value vectors are clustered.

    Attributes
    ----------
    linkage
        Linkage of exact clusters; paper B has complete.
    memory
        Maximum GiB for exact clusters; beyond it, nearest neighbors.
    """

    linkage: options.LinkageChoice = "average"
    memory: NonNegative = 4.0


@dataclass(frozen=True)
class AtlasText:
    """Text that maps of parts are fitted on, and that losses are of.

    Attributes
    ----------
    window
        Tokens of a window, or most of a sentence.
    windows
        Windows or sentences that maps are fitted on.
    eval_windows
        Windows or sentences that losses are of.
    """

    window: TwoOrMore = 64
    windows: TwoOrMore = 160
    eval_windows: TwoOrMore = 8

    def examples(self, model: Model, study: Study) -> tuple[Examples, Examples]:
        """The text to fit on and the text to evaluate on."""
        fitted_on, evaluated_on = (
            make_windows(model, part, size=self.window, max_windows=n, targets=True, seed=study.seed)
            for part, n in zip(study.parts, (self.windows, self.eval_windows), strict=True)
        )
        return fitted_on, evaluated_on

    def folder(self, study: Study) -> Path:
        """The folder of the atlas."""
        return study.folder / f"linearity-{self.window}-{self.windows}-{self.eval_windows}"


@dataclass(frozen=True)
class Report:
    """Where an analysis writes its tables and its figures.

    Attributes
    ----------
    out
        The output folder.
    suffix
        Appended to the names of all tables and figures, so that one folder can have those of several models.
    """

    out: Path
    suffix: str = ""

    def write(
        self, name: str, table: pd.DataFrame, origin: Mapping[str, Any], figure: Figure | None = None
    ) -> None:
        """Write a table with its provenance and figure as ``name``; print their paths.

        Adds the CPU seconds of this run so far to the origin, unless it has them.
        """
        taken = {SECONDS: round(sum(os.times()[:4]), 1)}  # this process's and its children's
        write_results(self.out, name + self.suffix, table, {**taken, **origin})
        printing.print_line(self.path(name))
        if figure is not None:
            self.write_figure(name, figure)

    def path(self, name: str) -> Path:
        """Path of a table."""
        return self.out / f"{name}{self.suffix}.csv"

    def write_figure(self, name: str, figure: Figure) -> None:
        """Write a figure; print its path."""
        for path in plots.save(figure, self.out / (name + self.suffix)):
            printing.print_line(path)

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        """Write a table without provenance; print its path."""
        write_files({self.path(name): csv_text(table)})
        printing.print_line(self.path(name))


def show(title: str, table: pd.DataFrame, **formats: str) -> None:
    """Print a table, values to three digits unless ``formats`` has a format for a column."""
    formatters = {name: text.format for name, text in formats.items()}
    named = table.index.name is not None
    text = table.to_string(index=named, formatters=formatters, float_format="{:.3f}".format, na_rep="")
    print(printable(f"{title}\n{text}", keep="\n"))


def run_study(
    work: Callable[..., None],
    *,
    model: str | list[str] | None = "smollm2-135m",
    corpus: str | list[str] | None = "wikipedia-sample",
    train: int | None = 9000,
    val: int = 3000,
    sentences: int | None = None,
) -> None:
    """Run an analysis of one or several studies as a script.

    ``work`` is called with the `Study`, the `Report` to write its tables with, and its own options; the
    options of a study are added to the command line. An analysis of several models or corpora takes
    ``studies`` instead, one for each.

    Parameters
    ----------
    work
        ``work(study, report, ...)`` or ``work(studies, report, ...)``; its docstring is the script's help,
        and describes its options. Fields of a dataclass are options, too.
    model, corpus
        Defaults; a list if the option is repeatable, None for no such option. If one of several corpora is
        smaller, it is split in the same proportion.
    train, val
        Sentences to fit and to evaluate maps on; None if the analysis takes the whole corpus.
    sentences
        Instead, for analyses without maps: the number of sentences to run.
    """
    shared: dict[str, Any] = {"seed": 0, "out": Path("out")}  # options with their defaults
    if model is not None:
        shared |= {"model": model, "device": None, "suffix": ""}
    if corpus is not None:
        shared["corpus"] = corpus
    if sentences is not None:
        shared["sentences"] = None
    elif train is not None and corpus is not None:
        shared |= {"train": None, "val": None}
    added = []
    for option in options.options_of(_of_study):
        if option.name in shared:
            default, (kind, info) = shared[option.name], get_args(option.annotation)
            info.help = info.help.format(train=train, val=val, sentences=sentences)
            if isinstance(default, list):
                kind, info.help = list[str], f"{info.help.rstrip('.')} (repeatable)."
            added.append(option.replace(default=default, annotation=Annotated[kind, info]))
    hints = {name: hint for name, hint in get_type_hints(work).items() if name not in _GIVEN}
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    def command(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in shared}
        sizes: tuple[int | None, int | None] | None = None
        defaults = train or 1, val
        if sentences is not None:
            sizes, defaults = (1, chosen["sentences"]), (1, sentences)
        elif "train" in chosen:
            sizes = chosen["train"], chosen["val"]
            if not isinstance(corpus, str):  # of several, one may be smaller
                sizes, defaults = (None, None), (sizes[0] or defaults[0], sizes[1] or val)
        studies = _studies(chosen, sizes, defaults)
        report = Report(chosen["out"], chosen.get("suffix", ""))
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        several = "studies" in inspect.signature(work).parameters
        work(studies if several else next(studies), report, **given)

    own = options.options_of(work, but=_GIVEN)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=options.documented(work)[0])(options.with_signature(command, [*own, *added]))
    starting.start(app)


def _of_study(
    model: str, corpus: str, sentences: TwoOrMore | None, train: PositiveInt | None, val: TwoOrMore | None,
    seed: Seed, device: str | None, suffix: str, out: Path,
) -> None:  # fmt: skip
    """Options of studies, which `run_study` adds to those of an analysis.

    Parameters
    ----------
    model
        Hub name, folder, file, or smollm2-135m.
    corpus
        A sample, a file or a dataset, as in 'matlens run'.
    sentences
        Number of sentences to run; by default {sentences}, or fewer if the corpus is small.
    train
        Training sentences of the maps; by default {train}, or fewer if the corpus is small.
    val
        Validation sentences of the maps; by default {val}, or fewer if the corpus is small.
    seed
        Random seed of the split and of the positions.
    device
        cpu, cuda or mps; by default the best available.
    suffix
        Appended to the names of tables and figures, such as _bert.
    out
        Output folder.
    """


def _studies(
    chosen: Mapping[str, Any], sizes: tuple[int | None, int | None] | None, defaults: tuple[int, int]
) -> Iterator[Study]:
    """Studies by model and corpus, created lazily; studies of one model share it."""
    models: list[str | None] = [*_listed(chosen.get("model"))] or [None]
    corpora: list[str | None] = [*_listed(chosen.get("corpus"))] or [None]
    for model in models:
        load_model = absent if model is None else cache(options.ModelOptions(model, chosen["device"]).load)
        for corpus in corpora:
            load_corpus = absent if corpus is None else cache(options.CorpusOptions(corpus).load)
            load_parts = absent
            if sizes is not None:
                load_parts = partial(_split, load_corpus, sizes, defaults, chosen["seed"])
            yield Study(
                load_model=load_model, load_corpus=load_corpus, load_parts=load_parts, out=chosen["out"],
                seed=chosen["seed"],
            )  # fmt: skip


def _split(load_corpus: Callable[[], Corpus], *sizes: Any) -> tuple[Corpus, Corpus]:
    return options.split_parts(load_corpus(), *sizes)


def _listed(names: str | Sequence[str] | None) -> list[str]:
    """Names of one or several, each once."""
    return list(dict.fromkeys([names] if isinstance(names, str) else names or ()))
