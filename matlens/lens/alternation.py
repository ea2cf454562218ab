"""What is left of the prediction when some blocks are run and others jumped over (paper A, Figure 6)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from matlens.activations.activations import Activations
from matlens.lens.quality import (
    as_substitute,
    fit_quality,
    judge_predictions,
    prediction_quality,
    prediction_rows,
    r2_matrix,
)
from matlens.linear.mapsets import MapSet
from matlens.models.readout import Readout
from matlens.patching.schemes import Scheme, r2_schemes, wrr_schemes
from matlens.patching.variants import Variant, run_variants
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

ALTERNATION = "paper_a_fig6_alternation"  # the experiment


@checked
def named_schemes(maps: MapSet, validation: Activations) -> list[tuple[str, Scheme]]:
    """The schemes of Figure 6, each with the name of its method.

    For each number of blocks run ``R2``, the one whose jumps have the greatest product of r2 of ``mat`` on
    the validation examples; and all weighted round-robin ones, ``WRR, blocks first``, ``WRR, mat first``.
    """
    best = r2_schemes(r2_matrix(fit_quality(maps, validation), "mat"))
    named = [("R2", scheme) for scheme, _ in best.values()]
    n_layers = validation.provenance.identity.n_layers
    return named + [(f"WRR, {scheme.starts_with} first", scheme) for _, _, scheme in wrr_schemes(n_layers)]


@checked
def scheme_quality(
    readout: Readout,
    model: TransformerBridge,
    maps: MapSet,
    validation: Activations,
    *,
    patched: int | None = None,
    folder: str | Path | None = None,
) -> pd.DataFrame:
    """Precision and surprisal of all schemes, and of the fixed exits of ``mat`` and ``id`` beside them.

    A table with one more column, ``scheme``; ``layer`` is how many blocks are run.

    Parameters
    ----------
    readout, model
        A model and its read-out.
    maps
        ``mat`` for every pair of layers.
    validation
        The stream at the positions of the validation examples, by whose r2 schemes are chosen.
    patched
        How many examples the schemes are run on; by default all.
    folder
        Where vectors are kept, as in `matlens.patching.run_variants`.

    Raises
    ------
    InputError
        There is not a map for every pair of layers.
    """
    readout.require_same(validation.provenance)
    named, data = named_schemes(maps, validation), validation if patched is None else validation.head(patched)
    last = data.provenance.identity.n_layers
    pairs = [pair for _, scheme in named for pair in scheme.jumps]
    held = maps.held(pairs, device=model.cfg.device)
    variants = {
        _file_name(scheme): Variant(_blocks_before(scheme), scheme.replacements(model, held))
        for _, scheme in named
        if scheme.jumps
    }
    vectors = run_variants(model, data.examples, variants, folder=folder, origin=maps.provenance.to_json())
    substitutes = {name: as_substitute(vectors[name]) for name in variants}
    judged = judge_predictions(readout, data[last], substitutes | {_WHOLE: as_substitute(data[last])})
    rows = [
        row | {"scheme": str(scheme)}
        for method, scheme in named
        for row in prediction_rows(
            ALTERNATION, data, method, scheme.n_blocks, judged[_file_name(scheme) if scheme.jumps else _WHOLE]
        )
    ]
    fixed = prediction_quality(readout, maps, data).assign(experiment=ALTERNATION)
    return pd.concat([pd.DataFrame(rows), fixed], ignore_index=True)


_WHOLE = "whole"  # nothing is jumped over


def _blocks_before(scheme: Scheme) -> int:
    """Blocks that a scheme starts with are those of the model itself, and are run once for all."""
    return scheme.boundaries[1] if scheme.starts_with == "blocks" else 0


def _file_name(scheme: Scheme) -> str:
    """``blocks-0-3-10``, the boundaries with what they start with."""
    return "-".join([scheme.starts_with, *map(str, scheme.boundaries)])
