"""The stream with single coefficients of FFNs set to 0: what the model makes of a token without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.data.examples import Batch, Examples
from matlens.data.readers import reads_whole
from matlens.errors import InputError, checked, short
from matlens.models.hooks import EndOfPass, hanging, intervening
from matlens.models.layout import ModelLayout
from matlens.models.sites import COEFFICIENTS, STREAM, Site, check_finite
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


class Removed(NamedTuple):
    """The stream at an example's position, whole and without each of ``k`` sub-updates of a layer.

    Attributes
    ----------
    after, final
        Behind the block of the layer, and behind the last: in row 0 nothing is left out, in row ``1 + i``
        the sub-update ``i``.
    """

    after: Float[Tensor, "1+k d_model"]
    final: Float[Tensor, "1+k d_model"]


@checked
def remove_sub_updates(
    model: TransformerBridge,
    examples: Examples,
    index: Mapping[int, Int[Tensor, "n k"]],
    *,
    progress: bool = True,
) -> Iterator[dict[int, Removed]]:
    """Run a model without single sub-updates at the position of each example, one example after another.

    A sub-update is left out by a coefficient of 0 at that position alone; all that reads the stream later,
    and a norm behind the FFN, runs on without it.
    """
    layout = ModelLayout.from_model(model)
    if examples.n_positions != len(examples):
        raise InputError(
            f"examples must have a position in each sentence, got {examples.n_positions} in {len(examples)}."
        )
    for layer, of_layer in index.items():
        layout.resolve(Site(COEFFICIENTS, layer))
        if len(of_layer) != len(examples) or int(of_layer.min()) < 0:  # a negative index is another one
            raise InputError(
                f"index[{layer}] must have indices from 0 for each of the {len(examples)} examples, got "
                f"{short(of_layer)}."
            )
    read = examples if reads_whole(model) else examples.up_to_positions()
    for row in Bar(range(len(read)), desc="leaving out", unit="sentence", disable=not progress):
        position, of_row = int(read.positions[row]), {layer: rows[row] for layer, rows in index.items()}
        copies = read.copies(row, 1 + sum(map(len, of_row.values())))
        yield _remove(model, layout, copies, position, of_row)


@torch.inference_mode()
def _remove(
    model: TransformerBridge, layout: ModelLayout, copies: Batch, position: int, index: Mapping[int, Tensor]
) -> dict[int, Removed]:
    """One pass of a copy of the sentence for each sub-update, behind one that is whole."""
    starts, n_rows = dict[int, int](), 1
    for layer, of_layer in index.items():
        starts[layer] = n_rows
        n_rows += len(of_layer)
    seen: dict[str, Tensor] = {}
    last = layout.hook(Site(STREAM, layout.n_layers))

    def without(layer: int) -> Any:
        rows = starts[layer] + torch.arange(len(index[layer]))

        def hook(value: Tensor, hook: Any) -> Tensor:
            changed = value.clone()
            changed[rows, position, index[layer].to(value.device)] = 0
            return changed

        return hook

    def keep(value: Tensor, hook: Any) -> None:
        seen[hook.name] = value[:, position].float()
        check_finite(seen[hook.name], hook.name)
        if hook.name == last:
            raise EndOfPass  # before the unembedding, which is not asked for

    behind = {layer: layout.hook(Site(STREAM, layer + 1)) for layer in index}
    hooks = [(layout.hook(Site(COEFFICIENTS, layer)), without(layer)) for layer in index]
    hooks += [(name, keep) for name in dict.fromkeys([*behind.values(), last])]
    with ExitStack() as stack:
        described = [f"sub-updates of layer {layer} left out" for layer in index]
        stack.enter_context(intervening(model, lambda: described, [function for _, function in hooks]))
        stack.enter_context(hanging(model, hooks))
        first, others = copies.inputs(model)
        model(first, **others, return_type=None)
    rows_of = {layer: [0, *range(start, start + len(index[layer]))] for layer, start in starts.items()}
    return {layer: Removed(seen[behind[layer]][rows], seen[last][rows]) for layer, rows in rows_of.items()}
