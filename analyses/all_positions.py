"""One sampled position per sentence against all positions.

The paper samples one position of each sentence. All other positions give some thirty times as many samples,
which are streamed. Expect these maps to generalize better, most of all from early layers.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from studies import Report, Study, run_study, show

from matlens.lens import fit_quality, prediction_quality
from matlens.study import origin_of

NAME = "all_positions"


def main(study: Study, report: Report) -> None:
    """Fit maps to the last layer on both, and compare them."""
    folder, tables = study.out / NAME, []
    for positions in ("sampled", "all"):
        fitted = replace(study, out=folder / positions, positions=positions, pairs="last")
        maps, validation = fitted.maps, fitted.validation
        quality = [fit_quality(maps, validation), prediction_quality(study.readout, maps, validation)]
        of_maps = pd.concat(quality).query("method == 'mat'")
        tables.append(of_maps.assign(method=f"mat, {positions}"))
    table = pd.concat(tables, ignore_index=True)
    report.write(NAME, table, origin_of(maps, validation))
    chosen = table[(table["metric"] == "r2") | (table["k"] == 1)]
    show("r2 and Precision@1", chosen.pivot(index="layer", columns=["metric", "method"], values="value"))


if __name__ == "__main__":
    run_study(main, train=4000, val=1000)
