"""Which lens to use: quality against cost, all judged on the same tokens.

Lenses are fitted at every token of the training sentences and judged at one drawn token of each validation
sentence. Expect standardised least squares to beat plain, a few steps down the divergence to beat both for
some seconds a layer, and the tuned lens, which starts from the identity, to take minutes to come near. With
``--jacobian`` there is a second figure: how alike least squares and mean Jacobians are. Ten minutes with
1,000 sentences, most of them for the tuned lens; Jacobians take a minute for each prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from studies import Report, Study, run_study

from matlens import plots
from matlens.cli import print_members
from matlens.lens import compare_lenses, default_methods, read_evaluations

NAME = "lens_report"
CLOSED = (
    "id",
    "mat",
    "affine",
    "ridge-identity",
    "weighted",
    "normed",
    "normed+affine",
    "narrow(64)",
    "one-jump",
)
TRAINED = ("scaled", "polished", "tuned")


def main(
    study: Study,
    report: Report,
    layer: Annotated[list[int] | None, typer.Option(help="A layer; give it once for each.")] = None,
    tuned: Annotated[bool, typer.Option(help="Train the tuned lens, which takes most of the time.")] = True,
    jacobian: Annotated[
        int, typer.Option(min=0, help="Prompts that Jacobians are taken on; 0 for none.")
    ] = 0,
    longest: Annotated[int, typer.Option(min=1, help="Tokens that such a prompt is cut to.")] = 48,
    evaluations: Annotated[Path | None, typer.Option(help="Folder of open evaluation sets.")] = None,
) -> None:
    """Fit, judge, and draw quality against seconds."""
    model = study.model
    names = [*CLOSED, *TRAINED] if tuned else [*CLOSED, *TRAINED[:-1]]
    if "normed" not in default_methods(model):  # the head does not begin with a norm
        names = [name for name in names if not name.startswith("normed")]
    sixth = study.n_layers / 6
    comparison = compare_lenses(
        model, study.parts, study.folder, methods=[*names, *(["jacobian"] if jacobian else [])],
        layers=layer or [round(sixth), round(2 * sixth), round(4 * sixth)],
        against="tuned" if tuned else "mat",
        n_prompts=max(jacobian, 2), longest=longest, seed=study.seed,
        evaluations=None if evaluations is None else read_evaluations(evaluations),
    )  # fmt: skip
    print_members(comparison.report, comparison.exits)
    report.write(NAME, comparison.report, comparison.origin, plots.plot_report(comparison.report))
    report.write(f"{NAME}_exits", comparison.exits, comparison.origin)
    if comparison.cosines is not None:
        figure = plots.plot_cosines(comparison.cosines)
        report.write(f"{NAME}_cosines", comparison.cosines, comparison.origin, figure)
    if comparison.evaluations is not None:
        report.write(f"{NAME}_evaluations", comparison.evaluations, comparison.origin)


if __name__ == "__main__":
    run_study(main, train=2000, val=1000)
