"""Paper A, Figure 6: running some blocks and jumping over the others.

All weighted round-robin schemes (WRR) and, for each number of blocks, the one whose jumps have the largest
product of r2 (R2), compared with the fixed exits of ``mat`` and ``id``. Expect some schemes above ``mat``
with the same number of blocks, and R2 good in the first half. The paper's figure is ``--model gpt2-medium``.

Attention sinks dominate r2 in many models, so R2 has two variants: schemes chosen by r2 without sinks, and
maps that are also fitted and applied without sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from figures.paper_a import alternation
from jaxtyping import Bool
from paper_a.schemes import r2_schemes, wrr_schemes
from studies import Patched, Report, Study, run_study
from torch import Tensor

from matlens import MapSet
from matlens.activations import Activations, find_sinks, sink_rows
from matlens.lens import evaluate, fit_quality, prediction_quality, prediction_rows
from matlens.patching import Scheme, Variant, run_variants

NAME = "paper_a_fig6_alternation"
R2, SCORED, WITHOUT_SINKS = "R2", "R2, scored without sinks", "R2 without sinks"  # methods


def main(study: Study, report: Report, patched: Patched = 3000) -> None:
    """Run every scheme on the validation sentences, and plot Precision@1 by blocks run."""
    data = study.validation.head(min(patched, study.validation.n_rows))
    table = scheme_quality(study, data, study.folder / f"{NAME}-{data.n_rows}")
    report.write(NAME, table, study.origin, alternation(table))


def scheme_quality(study: Study, data: Activations, folder: Path) -> pd.DataFrame:
    """Precision and surprisal of all schemes, and of the fixed exits of ``mat`` and ``id``.

    A table with one more column, ``scheme``; ``layer`` is how many blocks are run. Methods are those of
    `named_schemes`; ``R2 without sinks`` runs sinks by all blocks.
    """
    named, last = named_schemes(study), study.n_layers
    variants = _variants(study, data, named)
    vectors = run_variants(study.model, data.examples, variants, folder=folder)
    substitutes = {name: vectors[name] for name in variants} | {_ORIGINAL: data[last]}
    evaluated = evaluate(study.readout, data[last], substitutes)
    rows = [
        row | {"scheme": str(scheme)}
        for method, scheme in named
        for row in prediction_rows(
            NAME, data, method, scheme.n_blocks,
            evaluated[_file_name(method, scheme) if scheme.jumps else _ORIGINAL],
        )
    ]  # fmt: skip
    fixed = prediction_quality(study.readout, study.maps, data).assign(experiment=NAME)
    return pd.concat([pd.DataFrame(rows), fixed], ignore_index=True)


def named_schemes(study: Study) -> list[tuple[str, Scheme]]:
    """The schemes of Figure 6, each with the name of its method.

    For each number of blocks run, the one with the largest product of r2 of ``mat``: ``R2``, of all
    validation examples; ``R2, scored without sinks``, of all but sinks; and ``R2 without sinks``, with maps
    that were fitted without sinks, too. And all weighted round-robin ones, ``WRR, blocks first`` and ``WRR,
    mat first``.
    """
    validation = study.validation
    named = [(R2, scheme) for scheme in best_schemes(study.maps, validation)]
    named += [(f"WRR, {scheme.starts_with} first", scheme) for _, _, scheme in wrr_schemes(study.n_layers)]
    others = ~sink_rows(validation)
    named += [(SCORED, scheme) for scheme in best_schemes(study.maps, validation, others)]
    return named + [
        (WITHOUT_SINKS, scheme) for scheme in best_schemes(study.maps_without_sinks, validation, others)
    ]


def best_schemes(
    maps: MapSet, validation: Activations, rows: Bool[Tensor, " n"] | None = None
) -> list[Scheme]:
    """For each number of blocks, the scheme with the largest product of r2 of ``mat``."""
    quality = fit_quality(maps, validation, rows=rows)
    quality = quality[(quality["metric"] == "r2") & (quality["method"] == "mat")]
    size = int(quality["target"].max()) + 1
    r2 = torch.full((size, size), float("nan"))
    at = (quality[column].tolist() for column in ("layer", "target"))
    r2[tuple(map(torch.tensor, at))] = torch.tensor(quality["value"].tolist())
    return [scheme for scheme, _ in r2_schemes(r2).values()]


_ORIGINAL = "original"  # all blocks run


def _variants(study: Study, data: Activations, named: Sequence[tuple[str, Scheme]]) -> dict[str, Variant]:
    """Variants of all schemes; one that several methods choose is run once."""
    variants: dict[str, Variant] = {}
    for maps, at_all in ((study.maps, True), (study.maps_without_sinks, False)):  # or at all tokens but sinks
        chosen = [item for item in named if item[1].jumps and (item[0] != WITHOUT_SINKS) == at_all]
        pairs = [pair for _, scheme in chosen for pair in scheme.jumps]
        in_memory = maps.in_memory(pairs, device=study.model.cfg.device)
        where: Any = "all" if at_all else ~find_sinks(study.model, data.examples)
        for method, scheme in chosen:
            first = scheme.boundaries[1] if scheme.starts_with == "blocks" else 0  # run once for all
            replacements = scheme.replacements(study.model, in_memory, where=where)
            variants[_file_name(method, scheme)] = Variant(first, replacements)
    return variants


def _file_name(method: str, scheme: Scheme) -> str:
    """Such as ``blocks-0-3-10``: the first segment, the boundaries, and whether sinks are excluded."""
    name = "-".join([scheme.starts_with, *map(str, scheme.boundaries)])
    return f"{name}-without-sinks" if method == WITHOUT_SINKS else name


if __name__ == "__main__":
    run_study(main)
