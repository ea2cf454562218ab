"""Updates: what FFNs write for a token, as the sub-updates of their value vectors.

The FFN of a layer writes ``sum_i m_i v_i + b``. The sub-update ``m_i v_i`` promotes tokens by its own scores
``E m_i v_i``; where its coefficient is negative, those that ``v_i`` itself demotes. A few sub-updates do
most: the contribution of one is ``|m_i| ||v_i||``, its share that over the sum of all (paper B, A.3). Where a
norm follows the FFN, all of it is as it reaches the stream, see `matlens.ffn.values`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.activations.activations import Activations
from matlens.activations.collecting import collect
from matlens.data.examples import Examples
from matlens.errors import check_int, checked
from matlens.ffn.norms import FFN_OUT
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors
from matlens.models.sites import COEFFICIENTS, Site
from matlens.models.tokens import token_texts, visible

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_DRAWN = 2**22  # random numbers that are ranked together
DOMINANT = 10  # sub-updates of an update that the paper calls dominant


@checked
class Updates:
    """What the FFNs of a model write at collected positions, as sub-updates (paper B, section 3).

    Attributes
    ----------
    values
        The model's value vectors.
    activations
        ``ffn_post`` and ``ffn_out`` of each layer that is asked for, ``n`` rows; and where a norm follows the
        FFN, ``ln2_post_out``.

    Raises
    ------
    InputError
        The activations are of another model.
    """

    def __init__(self, values: ValueVectors, activations: Activations) -> None:
        activations.provenance.check_same(
            values.identity, ours="the coefficients", theirs="the value vectors"
        )
        self.values, self.activations = values, activations

    @classmethod
    def run(
        cls,
        model: TransformerBridge,
        examples: Examples,
        layers: Sequence[int] | None = None,
        *,
        progress: bool = True,
    ) -> Updates:
        """Run a model over examples and collect the coefficients and the outputs of its FFNs.

        Parameters
        ----------
        model
            The model to run.
        examples
            What the model is run on, such as `make_prompts` gives; each example has one position, which
            becomes a row.
        layers
            Layers of the FFNs, negative ones counted from the end; by default all.
        progress
            Whether to show a bar over the examples.

        Raises
        ------
        InputError
            The model has no value vectors, or a layer is out of range.
        """
        values = ValueVectors(model)
        chosen = range(values.n_layers) if layers is None else list(map(values.resolve_layer, layers))
        kinds = dict.fromkeys((COEFFICIENTS, FFN_OUT, values.output_kind))
        sites = [Site(kind, layer) for layer in chosen for kind in kinds]
        return cls(values, collect(model, examples, sites, progress=progress))

    @property
    def layers(self) -> list[int]:
        """Layers whose updates were collected, in ascending order."""
        sites = map(Site.parse, self.activations)
        return sorted({site.layer for site in sites if site.kind == COEFFICIENTS})

    def coefficients(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """``m``, the coefficients of a layer's value vectors; each multiplies one of them."""
        return self._of(COEFFICIENTS, layer)

    def outputs(self, layer: int) -> Float[Tensor, "n d_model"]:
        """What a layer's FFN adds to the stream, as the model computed it, a norm behind the FFN included."""
        return self._of(self.values.output_kind, layer)

    def scales(self, layer: int) -> Float[Tensor, " n"]:
        """By what the norm after the FFN multiplies the sub-updates of each row; 1 where no norm follows."""
        return self.values.scale(layer, self._of(FFN_OUT, layer))

    def sub_updates(self, layer: int, row: int = 0) -> Float[Tensor, "d_mlp d_model"]:
        """``m_i v_i`` of one position as they reach the stream.

        Their sum and ``scales(layer)[row] * values.bias(layer)`` are its row of `outputs`.
        """
        check_int(row, "row", min=0, max=self.activations.n_rows - 1)
        scaled = self.scales(layer)[row] * self.coefficients(layer)[row]
        return scaled[:, None] * self.values.layer(layer)

    def contributions(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """``|m_i| ||v_i||``, the length of each sub-update."""
        return self.scales(layer)[:, None] * self.coefficients(layer).abs() * self.values.norms(layer)

    def shares(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """Contribution of each sub-update relative to the sum of all of them."""
        return relative(self.contributions(layer))

    def dominant(self, layer: int, k: int = DOMINANT) -> Int[Tensor, "n k"]:
        """The ``k`` sub-updates that contribute most, the greatest first."""
        return self.contributions(layer).topk(check_int(k, "k", min=1, max=self.values.d_mlp)).indices

    def _of(self, kind: str, layer: int) -> Tensor:
        site = Site(kind, self.values.resolve_layer(layer))
        return self.activations[site].to(self.values.device)


def relative(contributions: Tensor) -> Tensor:
    """Contributions relative to their sum; 0 where an FFN writes nothing."""
    total = contributions.sum(-1, keepdim=True)
    return contributions / total.where(total > 0, torch.ones_like(total))


def random_sub_updates(values: ValueVectors, n: int, k: int, *, seed: int) -> list[Int[Tensor, "n k"]]:
    """Draw for each layer ``k`` different sub-updates of each of ``n`` examples, from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [len(rows) for rows in torch.arange(n).split(max(_DRAWN // values.d_mlp, 1))]

    def drawn(rows: int) -> Tensor:
        return torch.rand((rows, values.d_mlp), generator=generator).topk(k).indices.to(torch.int32)

    return [torch.cat([drawn(rows) for rows in sizes]) for _ in range(values.n_layers)]


@checked
def dominant_table(
    updates: Updates, projection: Projection, *, row: int = 0, k: int = DOMINANT, n_tokens: int = 10
) -> pd.DataFrame:
    """The dominant sub-updates of one position with the tokens that they promote (appendix A.3).

    One row per sub-update, layer after layer. Columns are ``layer, rank, value, coefficient, contribution,
    share, promoted``; ``promoted`` are the tokens with the largest scores of ``m v``, separated by commas.
    Where the coefficient ``m`` is negative, these are the tokens that the value vector ``v`` itself demotes.

    Parameters
    ----------
    updates, projection
        Updates of the model, and how vectors are read in its vocabulary.
    row
        The position's row among the updates.
    k
        How many sub-updates of each layer.
    n_tokens
        How many tokens of each sub-update.
    """
    projection.check_same(updates.activations.provenance, theirs="the updates")
    rows = []
    for layer in updates.layers:
        dominant = updates.dominant(layer, k)[row]
        tokens = projection.top(updates.sub_updates(layer, row)[dominant], n_tokens).ids
        quantities = (updates.coefficients(layer), updates.contributions(layer), updates.shares(layer))
        numbers = torch.stack([quantity[row, dominant] for quantity in quantities], 1).tolist()
        sub_updates = zip(dominant.tolist(), numbers, tokens, strict=True)
        for rank, (index, of_sub_update, ids) in enumerate(sub_updates, start=1):
            texts = ", ".join(map(visible, token_texts(projection.tokenizer, ids)))
            rows.append((layer, rank, str(updates.values.vector(layer, index)), *of_sub_update, texts))
    columns = ["layer", "rank", "value", "coefficient", "contribution", "share", "promoted"]
    return pd.DataFrame(rows, columns=columns)
