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
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from figures.paper_a import alternation
from jaxtyping import Bool
from paper_a.schemes import r2_schemes, wrr_schemes
from studies import Patched, Report, Study, run_study
from torch import Tensor

from matlens import InputError, MapSet, Readout
from matlens.activations import Activations, find_sinks, sink_rows
from matlens.errors import short
from matlens.lens import evaluate, fit_quality, prediction_quality, prediction_rows
from matlens.patching import Scheme, Variant, run_variants

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

NAME = "paper_a_fig6_alternation"
ALTERNATION = "paper_a_fig6_alternation"  # the experiment
R2, SCORED, WITHOUT_SINKS = "R2", "R2, scored without sinks", "R2 without sinks"  # methods


def main(study: Study, report: Report, patched: Patched = 3000) -> None:
    """Run every scheme on the validation sentences, and plot Precision@1 by blocks run."""
    n_patched = min(patched, study.validation.n_rows)
    table = scheme_quality(
        study.readout, study.model, study.maps, study.validation,
        without_sinks=study.maps_without_sinks, patched=patched, folder=study.folder / f"{NAME}-{n_patched}",
    )  # fmt: skip
    report.write(NAME, table, study.origin, alternation(table))


def best_schemes(
    maps: MapSet, validation: Activations, *, rows: Bool[Tensor, " n"] | None = None
) -> list[Scheme]:
    """For each number of blocks, the scheme with the largest product of r2 of ``mat``."""
    return [
        scheme
        for scheme, _ in r2_schemes(r2_matrix(fit_quality(maps, validation, rows=rows), "mat")).values()
    ]


def r2_matrix(results: pd.DataFrame, method: str) -> Tensor:
    """r2 of a method as ``[layer, target]``, NaN without a map."""
    part = results[(results["metric"] == "r2") & (results["method"] == method)]
    if part.empty:
        raise InputError(f"method must have r2 in the table, got {short(method)}.")
    size = int(results["target"].max()) + 1
    grid = torch.full((size, size), float("nan"))
    grid[torch.tensor(part["layer"].to_numpy()), torch.tensor(part["target"].to_numpy())] = torch.tensor(
        part["value"].to_numpy(), dtype=torch.float32
    )
    return grid


def named_schemes(maps: MapSet, validation: Activations) -> list[tuple[str, Scheme]]:
    """The schemes of Figure 6, each with the name of its method.

    For each number of blocks run ``R2``, the one of `best_schemes`; and all weighted round-robin ones,
    ``WRR, blocks first``, ``WRR, mat first``.
    """
    named = [(R2, scheme) for scheme in best_schemes(maps, validation)]
    n_layers = validation.provenance.identity.n_layers
    return named + [(f"WRR, {scheme.starts_with} first", scheme) for _, _, scheme in wrr_schemes(n_layers)]


def scheme_quality(
    readout: Readout,
    model: TransformerBridge,
    maps: MapSet,
    validation: Activations,
    *,
    without_sinks: MapSet | None = None,
    patched: int | None = None,
    folder: str | Path | None = None,
) -> pd.DataFrame:
    """Precision and surprisal of all schemes, and of the fixed exits of ``mat`` and ``id``.

    A table with one more column, ``scheme``; ``layer`` is how many blocks are run. Where maps are given that
    were fitted without attention sinks, there are two more methods: ``R2, scored without sinks``, the same
    maps with schemes chosen by their r2 on all validation examples but sinks; and ``R2 without sinks``, the
    maps that were fitted without sinks, chosen by their r2 without sinks, with sinks run by all blocks.
    """
    readout.check_same(validation.provenance)
    named, data = named_schemes(maps, validation), validation if patched is None else validation.head(patched)
    if without_sinks is not None:
        others = ~sink_rows(validation)
        named += [(SCORED, scheme) for scheme in best_schemes(maps, validation, rows=others)]
        named += [(WITHOUT_SINKS, scheme) for scheme in best_schemes(without_sinks, validation, rows=others)]
    variants = _variants(model, maps, without_sinks, data, named)
    vectors = run_variants(model, data.examples, variants, folder=folder)
    last = data.provenance.identity.n_layers
    evaluated = evaluate(
        readout, data[last], {name: vectors[name] for name in variants} | {_ORIGINAL: data[last]}
    )
    rows = [
        row | {"scheme": str(scheme)}
        for method, scheme in named
        for row in prediction_rows(
            ALTERNATION, data, method, scheme.n_blocks,
            evaluated[_file_name(method, scheme) if scheme.jumps else _ORIGINAL],
        )
    ]  # fmt: skip
    fixed = prediction_quality(readout, maps, data).assign(experiment=ALTERNATION)
    return pd.concat([pd.DataFrame(rows), fixed], ignore_index=True)


_ORIGINAL = "original"  # all blocks run


def _variants(
    model: TransformerBridge,
    maps: MapSet,
    without_sinks: MapSet | None,
    data: Activations,
    named: Sequence[tuple[str, Scheme]],
) -> dict[str, Variant]:
    """Variants of all schemes; one that several methods choose is run once."""
    variants: dict[str, Variant] = {}
    for of_case, at_all in ((maps, True), (without_sinks, False)):  # at all tokens, or all but sinks
        chosen = [item for item in named if item[1].jumps and (item[0] != WITHOUT_SINKS) == at_all]
        if of_case is None or not chosen:
            continue
        pairs = [pair for _, scheme in chosen for pair in scheme.jumps]
        in_memory = of_case.in_memory(pairs, device=model.cfg.device)
        where: Any = "all" if at_all else ~find_sinks(model, data.examples)
        for method, scheme in chosen:
            replacements = scheme.replacements(model, in_memory, where=where)
            variants[_file_name(method, scheme)] = Variant(_blocks_before(scheme), replacements)
    return variants


def _blocks_before(scheme: Scheme) -> int:
    """Original blocks that a scheme starts with, which are run once for all."""
    return scheme.boundaries[1] if scheme.starts_with == "blocks" else 0


def _file_name(method: str, scheme: Scheme) -> str:
    """Such as ``blocks-0-3-10``: the first segment, the boundaries, and whether sinks are excluded."""
    name = "-".join([scheme.starts_with, *map(str, scheme.boundaries)])
    return f"{name}-without-sinks" if method == WITHOUT_SINKS else name


if __name__ == "__main__":
    run_study(main)
