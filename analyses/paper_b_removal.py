"""Removal against projection: which reading of value vectors matches the model.

The dominant sub-updates at one sampled position of each sentence are removed, one at a time. The change of
the logits is compared with the scores of their value vectors: plain (``E v``, the paper's), with the gains of
the norms before the logits, and through the final norm, and with those of a random value vector. Logits are
read right after the block, and at the end of the model. Expect the readings with gains to agree better than
``E v``, and all of them to agree less with the final logits in earlier layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from figures.paper_b import removal_figure
from jaxtyping import Float, Int
from paper_b_fig4_overlap import iou
from studies import Model, Report, Study, run_study
from torch import Tensor

from matlens import InputError, Readout, metrics
from matlens.data import Examples
from matlens.errors import PositiveInt
from matlens.ffn import Projection, Updates, ValueVectors
from matlens.io import result_row, result_table
from matlens.models import ModelLayout, NormGain
from matlens.numerics import in_float64
from matlens.parallel import Bar

NAME = "paper_b_removal"
REMOVAL = "removal"  # the experiment's name in tables
AT_LAYER, AT_END = "at the layer", "at the end"  # where the effect of a removal is read out


def main(
    study: Study, report: Report, dominant: PositiveInt = 3, every: PositiveInt = 5, top: PositiveInt = 30
) -> None:
    """Remove dominant sub-updates, and compare the effect with readings of value vectors.

    Parameters
    ----------
    dominant
        Number of sub-updates to remove in each layer.
    every
        Use every n-th layer, including the last.
    top
        Tokens of each list.
    """
    examples = study.validation_examples
    layers = range(study.values.n_layers)[::-1][::every]
    table = removal_table(study.model, examples, k=dominant, layers=layers, n_tokens=top, seed=study.seed)
    origin = study.origin_of_weights | {"data": examples.provenance, "dominant": dominant}
    report.write(NAME, table, origin, removal_figure(table))


class Removed(NamedTuple):
    """The residual stream at an example's position, with and without each sub-update.

    Attributes
    ----------
    after, final
        After the block of the layer, and after the last: in row 0 nothing is removed, in row ``1 + i``
        the sub-update ``i``.
    """

    after: Float[Tensor, "1+k d_model"]
    final: Float[Tensor, "1+k d_model"]


def remove_sub_updates(
    model: Model, examples: Examples, index: Mapping[int, Int[Tensor, "n k"]]
) -> Iterator[dict[int, Removed]]:
    """Run a model without single sub-updates at the position of each example.

    A sub-update is removed by a coefficient of 0 at that position only; everything later in the model,
    and a norm after the FFN, runs without it.
    """
    layout = ModelLayout.from_model(model)
    read = examples if model.cfg.attention_dir == "bidirectional" else examples.up_to_positions()
    for row in Bar(range(len(read)), desc="leaving out", unit="sentence"):
        position, of_row = int(read.positions[row]), {layer: rows[row] for layer, rows in index.items()}
        copies = read.batch(np.full(1 + sum(map(len, of_row.values())), row))
        yield _remove(model, layout, copies, position, of_row)


class _EndOfPass(Exception):
    """Stops a forward pass after the last layer that is needed."""


@torch.inference_mode()
def _remove(
    model: Model, layout: ModelLayout, copies: Any, position: int, index: Mapping[int, Tensor]
) -> dict[int, Removed]:
    """One pass of a copy of the sentence for each sub-update, behind one that is whole."""
    starts, n_rows = dict[int, int](), 1
    for layer, of_layer in index.items():
        starts[layer] = n_rows
        n_rows += len(of_layer)
    seen: dict[str, Tensor] = {}
    last = layout.hook(layout.stream[-1])

    def without(layer: int) -> Any:
        rows = starts[layer] + torch.arange(len(index[layer]))

        def hook(value: Tensor, hook: Any) -> Tensor:
            changed = value.clone()
            changed[rows, position, index[layer].to(value.device)] = 0
            return changed

        return hook

    def keep(value: Tensor, hook: Any) -> None:
        seen[hook.name] = value[:, position].float()
        if not bool(seen[hook.name].isfinite().all()):
            raise InputError(f"The vectors at {hook.name} must be finite. Load the model in float32.")
        if hook.name == last:
            raise _EndOfPass  # before the unembedding, which is not asked for

    behind = {layer: layout.hook(layout.stream[layer + 1]) for layer in index}
    hooks = [(layout.hook(f"ffn_post.{layer}"), without(layer)) for layer in index]
    hooks += [(name, keep) for name in dict.fromkeys([*behind.values(), last])]
    first, others = copies.inputs(model)
    with suppress(_EndOfPass), model.hooks(fwd_hooks=hooks):
        model(first, **others, return_type=None)
    rows_of = {layer: [0, *range(start, start + len(index[layer]))] for layer, start in starts.items()}
    return {layer: Removed(seen[behind[layer]][rows], seen[last][rows]) for layer, rows in rows_of.items()}


def removal_table(
    model: Model,
    examples: Examples,
    *,
    k: int = 3,
    layers: Sequence[int] | None = None,
    n_tokens: int = 30,
    seed: int = 0,
) -> pd.DataFrame:
    """Compare effects of dominant sub-updates on logits with readings of value vectors.

    Each of the ``k`` dominant sub-updates is removed at its position, and the logits without it subtracted
    from those with it: right after its block (``at the layer`` in the column ``effect``), and of the
    whole model (``at the end``). A reading is true to the model as far as its scores, times the coefficient,
    agree with that difference.

    The methods are the readings: ``v`` is ``E v`` with the row ``v`` of the output matrix, ``g v`` that with
    the gain of the norm after the FFN (where there is one: extra-norm and post-norm blocks), ``f v`` and
    ``f g v`` go through the linear parts of the head, see `Projection.through_head`: the final norm's gain,
    in masked-LM models after the head's dense layer (``f W v``, ``f W g v``). ``ln_f(...)`` is through the
    whole final norm (a layer norm; what an RMS norm gives agrees as its gain does). ``another v`` is a random
    value vector of the layer, read as ``v``. The metrics are ``correlation``, Pearson's over the vocabulary,
    and ``common``, the share of the ``n_tokens`` top tokens that both have. Estimates are means over examples
    of the means of their ``k``; rows without a layer are over all ``layers``.
    """
    updates = Updates.run(model, examples, layers)
    values, readout = updates.values, Readout(model)
    readings = _readings(model, values)
    index = {layer: updates.dominant(layer, k).cpu() for layer in updates.layers}
    random = values.random_sub_updates(examples.n_positions, k, seed=seed)
    agreement: dict[tuple[int, str, str, str], list[float]] = {}
    for row, removed in enumerate(remove_sub_updates(model, examples, index)):
        for layer, streams in removed.items():
            m = updates.coefficients(layer)[row, index[layer][row].to(values.device), None]
            rows = values.matrix(layer)
            scores = {name: m * read(rows[index[layer][row]], layer) for name, read in readings.items()}
            scores["another v"] = m * readings["v"](rows[random[layer][row]], layer)
            for effect, stream_vectors in ((AT_LAYER, streams.after), (AT_END, streams.final)):
                logits = readout.logits(stream_vectors)
                lost = logits[:1] - logits[1:]
                for name, of_reading in scores.items():
                    for metric, agreeing in _agreement(of_reading, lost, n_tokens).items():
                        agreement.setdefault((layer, name, effect, metric), []).append(agreeing)
    cells = {key[1:] for key in agreement}
    table = []
    for name, effect, metric in sorted(
        cells, key=lambda cell: (cell[1:], [*readings, "another v"].index(cell[0]))
    ):
        by_layer = torch.tensor([agreement[layer, name, effect, metric] for layer in updates.layers])
        for at, samples in ((None, by_layer.mean(0)), *zip(updates.layers, by_layer, strict=True)):
            table.append(
                result_row(
                    REMOVAL, model=values.identity.name, corpus=examples.provenance.get("corpus", "unnamed"),
                    method=name, layer=at, target=at, metric=metric,
                    k=n_tokens if metric == "common" else None, estimate=metrics.mean(samples), effect=effect,
                )
            )  # fmt: skip
    return result_table(table, "effect")


def _readings(model: Model, values: ValueVectors) -> dict[str, Callable[[Tensor, int], Tensor]]:
    """Scores of all tokens for rows of a layer's output matrix, by the name of the reading."""
    plain, normed, head = (
        make(model) for make in (Projection.from_model, Projection.after_norm, Projection.through_head)
    )
    gains: list[NormGain] = []
    own = values.output_kind != "ffn_out"  # else in post-norm blocks that of the stream
    if own or ModelLayout.from_model(model).wiring.name == "post-norm":
        norms = [(block.ln2_post if own else block.ln2).original_component for block in model.blocks]
        gains = [NormGain.from_module(norm, values.d_model) for norm in norms]
    through, is_rms = "f W" if hasattr(model, "mlm_head") else "f", not head.norm.gain.centred  # type: ignore[union-attr]

    def reading(projection: Projection, *, gained: bool = False) -> Callable[[Tensor, int], Tensor]:
        return lambda rows, layer: projection.scores(gains[layer](rows) if gained else rows)

    readings = {"v": reading(plain)}
    if gains:
        readings["g v"] = reading(plain, gained=True)
    readings[f"{through} v"] = reading(head)
    if gains:
        readings[f"{through} g v"] = reading(head, gained=True)
    if not is_rms:  # through an RMS norm the order and the correlation are those of its gain
        readings["ln_f(g v)" if gains else "ln_f(v)"] = reading(normed, gained=bool(gains))
    return readings


def _agreement(scores: Tensor, lost: Tensor, n_tokens: int) -> dict[str, float]:
    """Correlation over the vocabulary and top tokens in common, means over the sub-updates of an example."""
    pair = [logits - logits.mean(1, keepdim=True) for logits in map(in_float64, (scores, lost))]
    first, second = (logits / logits.norm(dim=1, keepdim=True).clamp_min(1e-300) for logits in pair)
    overlap = iou(scores.topk(n_tokens).indices, lost.topk(n_tokens).indices)
    return {
        "correlation": float((first * second).sum(1).mean()),
        "common": float((2 * overlap / (1 + overlap)).mean()),
    }


if __name__ == "__main__":
    run_study(main, sentences=60)
