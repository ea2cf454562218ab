"""The command that fits lenses and says which to use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matlens.cli.expected import print_expected
from matlens.cli.groups import CorpusOptions, ModelOptions, grouped, sizes_of
from matlens.cli.options import REPORT_TRAIN, REPORT_VAL, Out, ReportTrain, ReportVal, Seed
from matlens.cli.printing import print_figures, print_line, print_members
from matlens.errors import InputError

if TYPE_CHECKING:
    from matlens.data.corpus import Corpus

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

_READS = 60  # operations per vector, token of the vocabulary and dimension that a lens is judged with
_LESS = "--train, --val; tuned and jacobian add more"


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


def _report_operations(model: Any, parts: tuple[Corpus, Corpus], names: list[str] | None) -> float:
    """About how many floating-point operations a report takes without what is trained for minutes."""
    from matlens.lens.members import default_methods
    from matlens.study.plan import CHARACTERS, Shape

    shape, n_lenses = Shape.from_model(model), len(default_methods(model) if names is None else names)
    n_tokens = sum(len(text) for part in parts for text in part.sentences) / CHARACTERS
    read = n_lenses * len(parts[1]) * shape.d_vocab * shape.d_model
    return 2 * shape.n_parameters * n_tokens + _READS * read


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
    train: ReportTrain = None,
    val: ReportVal = None,
    seed: Seed = 0,
    out: Out = Path("out"),
) -> None:
    """Fit lenses on the same tokens, judge all on the same others, and say what each cost."""
    from matlens.lens.trained import check_method_names

    names = None if methods is None else check_method_names(listed(methods) or [])
    wanted = numbered(layers)
    model.check()
    sentences = corpus.load()
    print(sentences.report())
    from matlens import plots
    from matlens.io.tables import write_results
    from matlens.lens.comparison import compare_lenses
    from matlens.lens.evaluations import read_evaluations
    from matlens.study.sizes import fitting_sizes

    sizes = sizes_of(train, val, default_train=REPORT_TRAIN, default_val=REPORT_VAL)
    n_train, n_validation = fitting_sizes(
        len(sentences), sizes["n_train"], sizes["n_validation"], sizes["adjustable"]
    )
    parts = sentences.split(n_train=n_train, n_validation=n_validation, seed=seed)
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
