"""Removed sub-updates: their effect on the logits, and what readings of their value vectors say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from matlens import metrics
from matlens.data.examples import Examples
from matlens.errors import Seed, check_int, checked
from matlens.ffn.norms import FFN_OUT, NormGain, norm_after_ffn
from matlens.ffn.projection import TOP, Projection
from matlens.ffn.updates import Updates, random_sub_updates
from matlens.ffn.values import ValueVectors
from matlens.io.tables import result_row, result_table
from matlens.models.layout import ModelLayout
from matlens.models.readout import Readout
from matlens.models.sites import POST_NORM
from matlens.models.weights import float32_on
from matlens.numerics import in_float64
from sub_updates.overlap import iou
from sub_updates.removal import remove_sub_updates

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

REMOVAL = "removal"  # the experiment's name in tables
AT_LAYER, AT_END = "at the layer", "at the end"  # where the effect of a removal is read out


@checked
def removal_table(
    model: TransformerBridge,
    examples: Examples,
    *,
    k: int = 3,
    layers: Sequence[int] | None = None,
    n_tokens: int = TOP,
    seed: Seed = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Compare what dominant sub-updates do to the logits with what readings of their value vectors say.

    Each of the ``k`` dominant sub-updates is left out at its position, and the logits without it are taken
    from those with it: of the stream behind its block (``at the layer`` in the column ``effect``), and of the
    whole model (``at the end``). A reading is true to the model as far as its scores, times the coefficient,
    agree with that difference.

    The methods are the readings: ``v`` is ``E v`` with the row ``v`` of the output matrix, ``g v`` that with
    the gain of the norm behind the FFN (where there is one: extra-norm and post-norm blocks), ``f v`` and
    ``f g v`` go through the linear parts of the head, see `Projection.through_head`: the final norm's gain,
    in masked-LM models behind the head's dense layer (``f W v``, ``f W g v``). ``ln_f(...)`` is through the
    whole final norm (a layer norm; what an RMS norm gives agrees as its gain does). ``another v`` is a random
    value vector of the layer, read as ``v``. The metrics are ``correlation``, Pearson's over the vocabulary,
    and ``common``, the share of the ``n_tokens`` top tokens that both have. Estimates are means over examples
    of the means of their ``k``; rows without a layer are over all ``layers``.

    Parameters
    ----------
    model, examples
        The model to run, and the examples that it is run on, one position each.
    k
        How many dominant sub-updates of each layer are left out, one at a time.
    layers
        Layers of the FFNs, negative ones counted from the end; by default all.
    n_tokens
        Length of the lists of top tokens.
    seed
        Seed of the random value vectors.
    progress
        Whether to show a bar over the examples.
    """
    updates = Updates.run(model, examples, layers, progress=progress)
    check_int(n_tokens, "n_tokens", min=1, max=model.cfg.d_vocab_out)
    values, readout = updates.values, Readout(model)
    readings = _readings(model, values)
    index = {layer: updates.dominant(layer, k).cpu() for layer in updates.layers}
    drawn = random_sub_updates(values, examples.n_positions, k, seed=seed)
    agreement: dict[tuple[int, str, str, str], list[float]] = {}
    for row, removed in enumerate(remove_sub_updates(model, examples, index, progress=progress)):
        for layer, streams in removed.items():
            m = updates.coefficients(layer)[row, index[layer][row].to(values.device), None]
            rows = values.matrix(layer)
            scores = {name: m * read(rows[index[layer][row]], layer) for name, read in readings.items()}
            scores["another v"] = m * readings["v"](rows[drawn[layer][row]], layer)
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
        for at, numbers in ((None, by_layer.mean(0)), *zip(updates.layers, by_layer, strict=True)):
            table.append(
                result_row(
                    REMOVAL, model=values.identity.name, corpus=examples.provenance.get("corpus", "unnamed"),
                    method=name, layer=at, target=at, metric=metric,
                    k=n_tokens if metric == "common" else None, estimate=metrics.mean(numbers), effect=effect,
                )
            )  # fmt: skip
    return result_table(table, "effect")


def _readings(model: TransformerBridge, values: ValueVectors) -> dict[str, Callable[[Tensor, int], Tensor]]:
    """Scores of all tokens for rows of a layer's output matrix, by the name of the reading."""
    plain, normed, head = (
        make(model) for make in (Projection.from_model, Projection.after_norm, Projection.through_head)
    )
    gains: list[NormGain] = []
    if values.output_kind != FFN_OUT or ModelLayout.from_model(model).wiring is POST_NORM:
        norms = [norm_after_ffn(model, layer) for layer in range(values.n_layers)]
        gains = [NormGain.from_module(float32_on(norm, values.device), values.d_model) for norm in norms]
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
