"""Removal against projection: which reading of value vectors matches the model.

The dominant sub-updates at one sampled position of each sentence are removed, one at a time. The change of
the logits is compared with the scores of their value vectors: plain (``E v``, the paper's), with the gains of
the norms before the logits, and through the final norm, and with those of a random value vector. Logits are
read right after the block, and at the end of the model. Expect the readings with gains to agree better than
``E v``, and all of them to agree less with the final logits in earlier layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from figures.paper_b import removal_figure
from jaxtyping import Float, Int
from paper_b_fig4_overlap import iou
from studies import LayerRow, Model, Report, Study, layer_table, run_study
from torch import Tensor

from matlens import InputError, Readout, metrics
from matlens.data import Examples
from matlens.errors import PositiveInt
from matlens.ffn import Projection, Updates, ValueVectors
from matlens.models import ModelLayout, NormGain
from matlens.numerics import in_float64
from matlens.parallel import Bar

NAME = "paper_b_removal"
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


class _EndOfPass(Exception):
    """Stops a forward pass after the last layer that is needed."""


@torch.inference_mode()
def remove_sub_updates(
    model: Model, examples: Examples, row: int, index: Mapping[int, Int[Tensor, " k"]]
) -> dict[int, list[Float[Tensor, "1+k d_model"]]]:
    """The residual stream at an example's position without single sub-updates, by their layer.

    After the block of the layer, and after the last: in row 0 nothing is removed, in row ``1 + i`` the
    sub-update ``i``, by a coefficient of 0 at that position only. Everything later in the model, and a norm
    after the FFN, runs without it.
    """
    layout, position = ModelLayout.from_model(model), int(examples.positions[row])
    rows, n_rows = dict[int, list[int]](), 1  # of copies of the sentence, the first of which is whole
    for layer, of_layer in index.items():
        rows[layer] = list(range(n_rows, n_rows + len(of_layer)))
        n_rows += len(of_layer)
    last, seen = layout.hook(layout.stream[-1]), dict[str, Tensor]()
    after = {layer: layout.hook(layout.stream[layer + 1]) for layer in index}

    def remove(layer: int, value: Tensor, hook: Any) -> Tensor:
        changed = value.clone()
        changed[rows[layer], position, index[layer].to(value.device)] = 0
        return changed

    def keep(value: Tensor, hook: Any) -> None:
        seen[hook.name] = value[:, position].float()
        if not bool(seen[hook.name].isfinite().all()):
            raise InputError(f"The vectors at {hook.name} must be finite. Load the model in float32.")
        if hook.name == last:
            raise _EndOfPass  # before the unembedding, which is not asked for

    hooks: list[Any] = [(layout.hook(f"ffn_post.{layer}"), partial(remove, layer)) for layer in index]
    hooks += [(name, keep) for name in dict.fromkeys([*after.values(), last])]
    first, others = examples.batch(np.full(n_rows, row)).inputs(model)
    with suppress(_EndOfPass), model.hooks(fwd_hooks=hooks):
        model(first, **others, return_type=None)
    return {layer: [seen[name][[0, *rows[layer]]] for name in (after[layer], last)] for layer in index}


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
    read = examples if model.cfg.attention_dir == "bidirectional" else examples.up_to_positions()
    for row in Bar(range(len(read)), desc="leaving out", unit="sentence"):
        of_row = {layer: rows[row] for layer, rows in index.items()}
        for layer, streams in remove_sub_updates(model, read, row, of_row).items():
            m = updates.coefficients(layer)[row, index[layer][row].to(values.device), None]
            rows = values.matrix(layer)
            scores = {name: m * read(rows[index[layer][row]], layer) for name, read in readings.items()}
            scores["another v"] = m * readings["v"](rows[random[layer][row]], layer)
            for effect, vectors in zip((AT_LAYER, AT_END), streams, strict=True):
                logits = readout.logits(vectors)
                lost = logits[:1] - logits[1:]
                for name, of_reading in scores.items():
                    for metric, agreeing in _agreement(of_reading, lost, n_tokens).items():
                        agreement.setdefault((layer, name, effect, metric), []).append(agreeing)
    table, effects = list[LayerRow](), list[str]()
    for effect, metric, name in itertools.product(
        (AT_END, AT_LAYER), ("common", "correlation"), [*readings, "another v"]
    ):
        by_layer = torch.tensor([agreement[layer, name, effect, metric] for layer in updates.layers])
        length = n_tokens if metric == "common" else None
        for at, samples in ((None, by_layer.mean(0)), *zip(updates.layers, by_layer, strict=True)):
            n_entries = n_tokens * k * len(samples) * (1 if at is not None else len(by_layer))
            share = metric == "common"
            estimate = metrics.share(samples, n_entries=n_entries) if share else metrics.mean(samples)
            table.append((name, at, metric, length, estimate))
            effects.append(effect)
    corpus = examples.provenance.get("corpus", "unnamed")
    return layer_table("removal", values.identity.name, corpus, table).assign(effect=effects)


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
