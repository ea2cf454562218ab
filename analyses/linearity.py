"""The atlas: which parts of a model are linear, and what it costs to put maps in their place.

Every norm, attention, FFN, block and jump over 2, 4 and 8 blocks gets its best affine map, once of all tokens
and once of all but attention sinks. Beside scores of how linear the part is stands what the model loses when
the map takes its place, and when the part is left out; rank correlations say which score tells so before.
The three parts of each group that cost least alone are replaced together.
"""

from __future__ import annotations

from typing import Annotated

import typer
from atlas import atlas_summary
from studies import Report, Study, run_study

from matlens import plots
from matlens.cli import print_atlas
from matlens.data import make_windows
from matlens.linearity import atlas_seconds, linearity_atlas, rank_correlations

NAME = "linearity"


def main(
    study: Study,
    report: Report,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window, or most of a sentence.")] = 64,
    windows: Annotated[int, typer.Option(min=2, help="Windows or sentences that maps are fitted on.")] = 160,
    judged: Annotated[int, typer.Option(min=2, help="Windows or sentences that losses are of.")] = 8,
) -> None:
    """Fit, score, replace and leave out every part; draw the atlas, and print the correlations."""
    train, validation = study.parts
    fitted_on, judged_on = (
        make_windows(study.model, corpus, size=window, max_windows=most, targets=True, seed=study.seed)
        for corpus, most in ((train, windows), (validation, judged))
    )
    folder = study.folder / f"{NAME}-{window}-{windows}-{judged}"
    table = linearity_atlas(study.model, fitted_on, judged_on, folder=folder)
    correlations = rank_correlations(table, seed=study.seed)
    origin = study.origin_of_weights | {
        "window": window, "windows": windows, "judged": judged,
        "n_fitted": len(fitted_on.tokens), "n_judged": len(judged_on.targets),
        "atlas_seconds": atlas_seconds(folder),
    }  # fmt: skip
    report.write(NAME, table, origin, plots.plot_atlas(table, correlations))
    few = table[table["metric"].isin(["rise", "agreement"])]
    few = few[few["kind"].str.startswith("together") | (few["metric"] == "rise")]
    report.write("linearity_costs", few, origin)
    report.write("linearity_kinds", atlas_summary(table), origin)
    report.write("linearity_correlations", correlations, origin)
    print_atlas(table, correlations)


if __name__ == "__main__":
    run_study(main, train=4000, val=1000)
