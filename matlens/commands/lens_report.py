"""The command that fits lenses and says which to use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matlens.cli.groups import CorpusOptions, ModelOptions, grouped, sizes_of
from matlens.cli.options import Out, Seed, Train, Val
from matlens.cli.printing import print_figures, print_line, print_members
from matlens.errors import InputError

Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        help="Lenses with a comma between: closed forms such as mat, affine, ridge-identity, weighted or "
        "normed+affine, and id, scaled, polished, tuned and jacobian. The last two take minutes a layer.",
        show_default="all but tuned and jacobian",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers", help="Layers with a comma between.", show_default="five, evenly spread; of lens fit, all"
    ),
]
Against = Annotated[
    str | None, typer.Option("--against", help="The lens that others are compared with.", show_default="mat")
]
Prompts = Annotated[
    int, typer.Option("--prompts", min=2, help="Sentences that Jacobians are taken on, the longest.")
]
Longest = Annotated[int, typer.Option("--longest", min=1, help="Tokens that such a sentence is cut to.")]
Evaluations = Annotated[
    Path | None,
    typer.Option(
        "--evaluations",
        help="Folder with lens-eval-multihop.json and the like, of data/evaluations of the repository "
        "anthropics/jacobian-lens.",
    ),
]


def listed(text: str | None) -> list[str] | None:
    """Names with a comma between."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def numbered(text: str | None) -> list[int] | None:
    """Layers with a comma between.

    Raises
    ------
    InputError
        One is no number.
    """
    try:
        return None if text is None else [int(name) for name in listed(text) or []]
    except ValueError:
        raise InputError(f"The layers are {text!r}. Expected numbers with a comma between.") from None


@grouped
def report(
    model: ModelOptions,
    corpus: CorpusOptions,
    methods: Methods = None,
    layers: Layers = None,
    against: Against = None,
    prompts: Prompts = 30,
    longest: Longest = 128,
    evaluations: Evaluations = None,
    train: Train = None,
    val: Val = None,
    seed: Seed = 0,
    out: Out = Path("out"),
) -> None:
    """Fit lenses on the same tokens, judge all on the same others, and say what each cost."""
    from matlens.estimators.trained import require_method_names

    names = None if methods is None else require_method_names(listed(methods) or [])
    wanted = numbered(layers)
    model.check()
    sentences = corpus.load()
    print(sentences.report())
    from matlens import plots
    from matlens.judging.comparison import compare_lenses
    from matlens.judging.evaluations import read_evaluations
    from matlens.storage.tables import write_results
    from matlens.study.sizes import fitting_sizes

    sizes = sizes_of(train, val, default_train=2000, default_val=1000)
    n_train, n_validation = fitting_sizes(
        len(sentences), sizes["n_train"], sizes["n_validation"], sizes["adjustable"]
    )
    parts = sentences.split(n_train=n_train, n_validation=n_validation, seed=seed)
    sets = None if evaluations is None else read_evaluations(evaluations)
    comparison = compare_lenses(
        model.load(), parts, out, methods=names, layers=wanted, against=against, n_prompts=prompts,
        longest=longest, evaluations=sets, seed=seed,
    )  # fmt: skip
    tables = {
        "lens_report": (comparison.report, plots.lens_measures),
        "lens_exits": (comparison.exits, None),
        "lens_cosines": (comparison.cosines, plots.lens_cosines),
        "lens_evaluations": (comparison.evaluations, None),
    }
    for name, (table, draw) in tables.items():
        if table is not None:
            write_results(out, name, table, comparison.origin)
            print_line(out / f"{name}.csv")
            if draw is not None:
                print_figures(plots.save(draw(table), out, name))
    print_members(comparison.report, comparison.exits)
