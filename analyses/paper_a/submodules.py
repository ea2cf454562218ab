"""One kind of sub-module replaced by linear maps (paper A, Figure 10).

``mat_ffn`` and ``mat_ln1_ln2`` keep attention, so the model is run. In a model with attention sinks the
result depends on the tokens that their replacements are fitted on, and on those where they are applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from studies import Model, Study
from torch import Tensor

from matlens import InputError, MapSet, mat_attn, mat_ffn, mat_ln1_ln2, patched
from matlens.activations import Activations, find_sinks
from matlens.lens import evaluate, prediction_quality, prediction_rows
from matlens.models import ModelLayout, Site
from matlens.patching import Replacement, Variant, run_variants

Place = Literal["all", "not-first", "not-sink", "predicted"]
_ROWS = 256  # vectors per batch
PLACES: tuple[Place, ...] = ("all", "not-first", "not-sink", "predicted")
CONTEXTUAL = {"mat_ffn": mat_ffn, "mat_ln1_ln2": mat_ln1_ln2}  # replacements that keep attention


class SubmoduleCase(NamedTuple):
    """One way of replacing a kind of sub-module from a layer on.

    Attributes
    ----------
    replaced
        ``mat_ffn`` or ``mat_ln1_ln2``.
    fitted
        Tokens that the replacements were fitted on: ``all``, ``not-first`` or ``not-sink``.
    place
        Tokens where they are applied: one of `PLACES`.
    layer, target
        First and last layer of the replacements; by default to the last.
    """

    replaced: str
    fitted: str
    place: str
    layer: int
    target: int | None = None

    def __str__(self) -> str:
        span = f"{self.layer}" if self.target is None else f"{self.layer}-{self.target}"
        return f"{self.replaced} fit {self.fitted} at {self.place}.{span}"


def rows_of_cases(
    study: Study,
    fits: Mapping[str, MapSet],
    data: Activations,
    cases: Mapping[SubmoduleCase, str],
    experiment: str,
    folder: Path,
) -> list[dict[str, Any]]:
    """Rows of a table: prediction quality for each case.

    ``fits`` are maps of all sub-modules by the tokens that they were fitted on; ``cases`` maps each case to
    its method name.
    """
    where: dict[str, Any] = {
        "all": "all", "not-first": "not-first", "not-sink": ~find_sinks(study.model, data.examples),
        "predicted": torch.from_numpy(data.examples.positions),
    }  # fmt: skip
    variants = {}
    for case in cases:
        replace, target = CONTEXTUAL[case.replaced], case.target or study.n_layers
        replacements = replace(fits[case.fitted], case.layer, target, where=where[case.place])
        variants[str(case)] = Variant(case.layer, replacements)
    vectors = run_variants(study.model, data.examples, variants, folder=folder)
    evaluated = evaluate(study.readout, data[study.n_layers], {case: vectors[str(case)] for case in cases})
    return [
        row
        for case, method in cases.items()
        for row in prediction_rows(experiment, data, method, case.layer, evaluated[case])
    ]


def with_mat(
    study: Study, data: Activations, rows: list[dict[str, Any]], experiment: str, layers: list[int]
) -> pd.DataFrame:
    """Rows of ``mat`` from some layers, followed by ``rows``."""
    blocks = prediction_quality(study.readout, study.maps, data, methods=["mat"])
    blocks = blocks[blocks["layer"].isin(layers)].assign(experiment=experiment)
    return pd.concat([blocks, pd.DataFrame(rows)], ignore_index=True)


@torch.inference_mode()
def attend_nowhere(
    model: Model, maps: MapSet, h: Float[Tensor, "n d_model"], first: int, last: int
) -> Float[Tensor, "n d_model"]:
    """``mat_attn`` from layer ``first`` to ``last`` for single vectors.

    The map of attention does not read other tokens, so each vector is run as a sentence of one token. The
    blocks before ``first`` are skipped.
    """
    layout = ModelLayout.from_model(model)
    if layout.wiring.name == "cross-attention":
        raise InputError(
            "model must have blocks without cross-attention, got a decoder that reads an encoder. Use "
            "matlens.patched with mat_attn."
        )
    parts, outputs = iter(h.split(_ROWS)), list[Tensor]()
    vectors = Replacement(lambda _: next(parts)[:, None], Site("h", 0), Site("h", first))

    def store(value: Tensor, hook: Any) -> None:
        outputs.append(value[:, 0].float().cpu())

    with (
        patched(model, [vectors, *mat_attn(maps, first, last)]),
        model.hooks(fwd_hooks=[(layout.hook(layout.stream[last]), store)]),
    ):
        for part in h.split(_ROWS):
            tokens = torch.ones(len(part), 1, dtype=torch.int64, device=model.cfg.device)
            model(tokens, return_type=None, use_cache=False)
    return torch.cat(outputs)
