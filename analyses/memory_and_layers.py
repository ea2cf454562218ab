"""Cost of maps in bytes and multiplications, compared with the layers they save.

Fixed exit at every layer: one map in place of all later blocks. Early exit at a Precision@1 of 80% to 99%: a
map for every layer is stored in addition to all blocks, and each layer that is run costs a map and a readout
of the whole vocabulary, which paper A does not count. ``id`` needs only the readouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from figures.paper_a import costs_figure
from studies import Model, Report, Study, run_study
from torch import nn

from matlens import InputError, MapSet, Readout
from matlens.activations import Activations
from matlens.io import result_table
from matlens.lens import (
    ExitConfidence,
    Lens,
    evaluate,
    evaluation,
    exit_layers,
    exit_sweep,
    prediction_quality,
    savings,
    thresholds,
)
from matlens.metrics import Estimate
from matlens.pruning import plain_copy

NAME = "memory_and_layers"
PRECISIONS = (0.8, 0.85, 0.9, 0.95, 0.99)
PAPER_SWEEP = (-1.112, *(i / 10 for i in range(11)), 1.112)  # of lam; for id the paper has more
ID_SWEEP = (*PAPER_SWEEP[:-1], *np.linspace(1, 1.112, 12)[1:-1].round(6).tolist(), 1.112)


def main(study: Study, report: Report) -> None:
    """Count the costs and savings of fixed and early exit, and plot both."""
    table = exit_costs(study.readout, study.model, study.maps, study.validation)
    report.write(NAME, table, study.origin, costs_figure(table))


@dataclass(frozen=True)
class Costs:
    """Matrix elements of a model's parts, each one multiplication per token.

    ``attention`` is the multiplications of a block for each token that one attends to, ``readout`` those of
    reading out one vector, ``n_bytes`` the size of an element.
    """

    blocks: tuple[int, ...]
    attention: int
    readout: int
    d_model: int
    n_bytes: int

    @classmethod
    def from_model(cls, model: Model, readout: Readout) -> Costs:
        """Count the matrices of a model's blocks and of its readout."""
        lists = (part for part in plain_copy(model).modules() if isinstance(part, nn.ModuleList))
        plain = next(part for part in lists if len(part) == model.cfg.n_layers)  # a bridge has some twice
        weights = [[*block.parameters()] for block in plain]
        if any(weight.ndim > 2 for of_block in weights for weight in of_block):
            raise InputError(
                f"model must be dense, with matrices only in its blocks, got {model.cfg.model_name}."
            )
        blocks = tuple(sum(w.numel() for w in of_block if w.ndim == 2) for of_block in weights)
        attention, n_bytes = 2 * model.cfg.n_heads * model.cfg.d_head, next(model.parameters()).element_size()
        return cls(blocks, attention, readout.multiplications, readout.d_model, n_bytes)

    @property
    def map(self) -> int:
        """Parameters of a map between two layers, its multiplications per token."""
        return self.d_model**2

    def run(self, first: int, last: int, n_tokens: float) -> float:
        """Multiplications per token of the blocks between two layers, with ``n_tokens`` of context."""
        return float(sum(weights + n_tokens * self.attention for weights in self.blocks[first:last]))


def exit_costs(readout: Readout, model: Model, maps: MapSet, validation: Activations) -> pd.DataFrame:
    """Bytes, multiplications and savings of fixed and early exit by ``mat`` and ``id``.

    Fixed exit (rows with a layer): the model runs up to the layer, and one map replaces the blocks after it.
    Early exit (rows with ``k``, the required Precision@1): all blocks and a map for every layer are stored; a
    token costs a map and a readout at every layer that is run, but no map at the last, and saves the blocks
    after its exit. Metrics, per token except the first two lines:

    - ``precision``; ``layers saved``
    - ``bytes of maps`` and ``bytes saved``
    - ``map multiplications``, ``readout multiplications`` (except the model's own) and ``multiplications
      saved``, of the blocks that are not run.

    Two more columns, ``share of bytes`` and ``share of multiplications``, are relative to all blocks.

    The context of attention is the mean number of tokens up to the validation positions.
    """
    costs, last = Costs.from_model(model, readout), validation.provenance.identity.n_layers
    n_tokens = float(validation.places.mean()) + 1
    all_blocks = costs.run(0, last, n_tokens)
    rows = []

    def add(method: str, layer: int | None, k: float | None, values: dict[str, float]) -> None:
        for metric, value in values.items():
            estimate = Estimate.without_interval(value, validation.n_rows)
            row = evaluation.validation_row(NAME, validation, method, layer, last, metric, None, estimate)
            of_bytes = value / (sum(costs.blocks) * costs.n_bytes) if "bytes" in metric else None
            of_all = value / all_blocks if "multiplications" in metric else None
            shares = {"share of bytes": of_bytes, "share of multiplications": of_all}
            rows.append(row | {"k": k} | shares)

    quality = prediction_quality(readout, maps, validation)
    quality = quality[(quality["metric"] == "precision") & (quality["k"] == 1) & (quality["layer"] < last)]
    for row in quality.to_dict("records"):
        n_maps, layer = int(row["method"] == "mat"), int(row["layer"])
        values = {
            "precision": row["value"], "layers saved": last - layer,
            "bytes of maps": n_maps * costs.map * costs.n_bytes,
            "bytes saved": sum(costs.blocks[layer:]) * costs.n_bytes,
            "map multiplications": n_maps * costs.map,
            "multiplications saved": costs.run(layer, last, n_tokens),
        }  # fmt: skip
        add(row["method"], layer, None, values)
    lenses = {"mat": Lens.from_maps(maps, model=model), "id": Lens.identity(model)}
    lams = {"mat": PAPER_SWEEP, "id": ID_SWEEP}
    exits = exit_sweep(lenses, validation, layers=range(1, last), lams=lams)
    saved_at = {p: savings(exits, p).set_index("method")["saved"] for p in PRECISIONS}
    positions = torch.from_numpy(validation.places).long()
    for method, lens in lenses.items():
        n_maps = int(method == "mat")
        mapped = {at: lens(validation[at], at) for at in range(1, last + 1)}
        evaluated = evaluate(readout, validation[last], mapped, confidence=True)
        confidence = ExitConfidence.from_evaluations(evaluated.values())
        left = [exit_layers(confidence.difference, thresholds(positions, lam)) for lam in lams[method]]
        n_layers = [float(layers.double().mean()) for layers in left]
        shares_of_all = [float((layers == last).double().mean()) for layers in left]
        for precision in PRECISIONS:
            saved = float(saved_at[precision][method])
            n_run = last - saved
            n_mapped = n_run - float(np.interp(n_run, n_layers, shares_of_all))
            values = {
                "layers saved": saved,
                "bytes of maps": n_maps * (last - 1) * costs.map * costs.n_bytes,
                "bytes saved": 0,
                "map multiplications": n_maps * n_mapped * costs.map,
                "readout multiplications": (n_run - 1) * costs.readout,
                "multiplications saved": saved * all_blocks / last,
            }
            add(method, None, precision, values)
    return result_table(rows, "share of bytes", "share of multiplications")


if __name__ == "__main__":
    run_study(main)
