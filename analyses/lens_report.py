"""Which lens to use: quality against cost, all evaluated on the same tokens.

Lenses are fitted at every token of the training sentences and evaluated at one sampled token of each
validation sentence. Expect standardized least squares to beat plain least squares, a few steps on KL to
beat both within seconds per layer, and the tuned lens, which starts from the identity, to need minutes to
get close. ``--jacobian`` adds a figure of the similarity of least squares and mean Jacobians. Ten minutes
with 1,000 sentences, most of them for the tuned lens; Jacobians take a minute per prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from figures.beyond import plot_cosines
from lenses import cosine_table, fit_halves, fit_jacobians, flops_rows
from studies import Report, Study, run_study

from matlens import LensConfig, plots
from matlens.cli import print_members
from matlens.errors import NonNegativeInt
from matlens.lens import compare_lenses, default_methods, read_evaluations

NAME = "lens_report"
LONGEST = 48  # tokens that a prompt is cut to for Jacobians


def main(
    study: Study,
    report: Report,
    layer: list[int] | None = None,
    tuned: Annotated[bool, typer.Option("--tuned/--no-tuned")] = True,
    jacobian: NonNegativeInt = 0,
    evaluations: Path | None = None,
) -> None:
    """Fit, evaluate, and draw quality against seconds.

    Parameters
    ----------
    layer
        A layer; give it once for each.
    tuned
        Train the tuned lens, which takes most of the time.
    jacobian
        Prompts that Jacobians are taken on, two or more; 0 for none.
    evaluations
        Folder of open evaluation sets.
    """
    model, parts = study.model, study.parts
    *closed, scaled, polished = default_methods(model)
    methods = [*closed, LensConfig(rank=64), LensConfig(shared_map=True), scaled, polished]
    sixth = study.n_layers / 6
    layers = layer or [round(sixth), round(2 * sixth), round(4 * sixth)]
    fitted = {}
    if jacobian:
        jacobians, mean, seconds = fit_jacobians(model, parts[0], layers, jacobian, LONGEST)
        fitted["jacobian"] = mean, seconds
    comparison = compare_lenses(
        model, parts, study.folder, methods=[*methods, *(["tuned"] if tuned else [])], fitted=fitted,
        layers=layers, against="tuned" if tuned else "mat", seed=study.seed,
        evaluations=None if evaluations is None else read_evaluations(evaluations),
    )  # fmt: skip
    print_members(comparison.report, comparison.exits)
    flops = flops_rows(comparison.report, comparison.origin["n_rows"], comparison.lenses)
    table = pd.concat([comparison.report, flops], ignore_index=True)
    report.write(NAME, table, comparison.origin, plots.plot_report(table))
    report.write(f"{NAME}_exits", comparison.exits, comparison.origin)
    if jacobian:
        halves = fit_halves(model, parts[0], ["mat", "affine"], layers, study.seed)
        plain = {name: comparison.lenses[name] for name in (*halves, "jacobian")}
        cosines = cosine_table(plain, {"jacobian": jacobians, **halves})
        report.write(f"{NAME}_cosines", cosines, comparison.origin, plot_cosines(cosines))
    if comparison.evaluations is not None:
        report.write(f"{NAME}_evaluations", comparison.evaluations, comparison.origin)


if __name__ == "__main__":
    run_study(main, train=2000, val=1000)
