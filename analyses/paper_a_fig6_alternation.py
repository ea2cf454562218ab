"""Paper A, Figure 6: running some blocks and jumping over the others.

All weighted round-robin schemes (WRR) and, for each number of blocks, the one whose jumps have the greatest
product of r2 (R2), beside the fixed exits of ``mat`` and ``id``. Expect some schemes above ``mat`` with the
same number of blocks, and R2 good in the first half. The paper's figure is ``--model gpt2-medium``.
"""

from __future__ import annotations

import pandas as pd

from matlens import MapSet, plots
from matlens.cli import Patched, Report, run_study
from matlens.lens import (
    as_substitute,
    fit_quality,
    judge_predictions,
    prediction_quality,
    prediction_rows,
    r2_matrix,
)
from matlens.patching import Scheme, Variant, r2_schemes, run_variants, wrr_schemes
from matlens.study import Study

NAME = "paper_a_fig6_alternation"


def main(study: Study, report: Report, patched: Patched = 3000) -> None:
    """Run every scheme over the validation sentences and draw Precision@1 against the blocks run."""
    validation = study.validation.head(patched)
    best = r2_schemes(r2_matrix(fit_quality(study.maps, study.validation), "mat"))
    named = [("R2", scheme) for scheme, _ in best.values()]
    named += [(f"WRR, {scheme.starts_with} first", scheme) for _, _, scheme in wrr_schemes(study.n_layers)]
    pairs = [pair for _, scheme in named for pair in scheme.jumps]
    maps = study.maps.held(pairs, device=study.model.cfg.device)
    variants = {file_name(scheme): variant(study, maps, scheme) for _, scheme in named if scheme.jumps}
    folder = study.folder / f"{NAME}-{validation.n_rows}"
    outputs = run_variants(
        study.model, validation.examples, variants, folder=folder, origin=study.maps.provenance.to_json()
    )
    truth = validation[study.n_layers]
    vectors = {name: outputs[name] for name in variants} | {"whole": truth}
    judged = judge_predictions(study.readout, truth, {name: as_substitute(h) for name, h in vectors.items()})
    rows = [
        row | {"scheme": str(scheme)}
        for method, scheme in named
        for row in prediction_rows(
            NAME, validation, method, scheme.n_blocks,
            judged[file_name(scheme) if scheme.jumps else "whole"],
        )
    ]  # fmt: skip
    fixed = prediction_quality(study.readout, study.maps, validation).assign(experiment=NAME)
    table = pd.concat([pd.DataFrame(rows), fixed], ignore_index=True)
    report.write(NAME, table, study.origin, plots.alternation(table[table["k"] == 1]))


def variant(study: Study, maps: MapSet, scheme: Scheme) -> Variant:
    """Blocks that a scheme starts with are those of the model itself, and are run once for all."""
    first = scheme.boundaries[1] if scheme.starts_with == "blocks" else 0
    return Variant(first, scheme.replacements(study.model, maps))


def file_name(scheme: Scheme) -> str:
    """``blocks-0-3-10``, the boundaries with what they start with."""
    return "-".join([scheme.starts_with, *map(str, scheme.boundaries)])


if __name__ == "__main__":
    run_study(main)
