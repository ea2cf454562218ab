"""FFN outputs as sums of sub-updates ``m_i v_i``.

The contribution of a sub-update is ``|m_i| ||v_i||``, its share is that over the sum of all (paper B, A.3).
Where a norm follows the FFN, all of it is as it reaches the residual stream, see `matlens.ffn.values`.
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
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors
from matlens.models.sites import COEFFICIENTS, FFN_OUT, Site
from matlens.models.tokens import token_texts, visible

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

DOMINANT = 10  # sub-updates of an update that the paper calls dominant


@checked
class Updates:
    """FFN outputs at collected positions, as sub-updates (paper B, section 3).

    From ``ffn_post`` and ``ffn_out`` of each layer, and ``ln2_post_out`` where a norm follows the FFN. Raises
    InputError if the sub-updates do not add up to the outputs, as where an FFN was replaced.
    """

    def __init__(self, values: ValueVectors, activations: Activations) -> None:
        activations.provenance.check_same(
            values.identity, ours="the coefficients", theirs="the value vectors"
        )
        self.values, self.activations = values, activations
        for layer in self.layers:
            sites = [str(Site(kind, layer)) for kind in (COEFFICIENTS, FFN_OUT, values.output_kind)]
            if all(site in activations for site in sites):
                for rows in activations.shards(list(dict.fromkeys(sites))):
                    values.check_sums(layer, *(rows.vectors[site] for site in sites))

    @classmethod
    def run(
        cls,
        model: TransformerBridge,
        examples: Examples,
        layers: Sequence[int] | None = None,
        *,
        progress: bool = True,
    ) -> Updates:
        """Collect coefficients and outputs of FFNs at the examples' positions."""
        values = ValueVectors(model)
        chosen = range(values.n_layers) if layers is None else list(map(values.resolve_layer, layers))
        kinds = dict.fromkeys((COEFFICIENTS, FFN_OUT, values.output_kind))
        sites = [Site(kind, layer) for layer in chosen for kind in kinds]
        return cls(values, collect(model, examples, sites, progress=progress))

    def __repr__(self) -> str:
        n, model = self.activations.n_rows, self.values.identity.name
        return f"Updates({n:,} positions, layers {', '.join(map(str, self.layers))}, {model!r})"

    @property
    def layers(self) -> list[int]:
        """Layers whose updates were collected, in ascending order."""
        sites = map(Site.parse, self.activations)
        return sorted({site.layer for site in sites if site.kind == COEFFICIENTS})

    def coefficients(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """``m``, the coefficients of a layer's value vectors."""
        return self._of(COEFFICIENTS, layer)

    def outputs(self, layer: int) -> Float[Tensor, "n d_model"]:
        """The vectors that the FFN adds to the residual stream, after a norm if one follows it."""
        return self._of(self.values.output_kind, layer)

    def scales(self, layer: int) -> Float[Tensor, " n"]:
        """The factor of a norm after the FFN for the sub-updates of each row; 1 without such a norm."""
        return self.values.scale(layer, self._of(FFN_OUT, layer))

    def sub_updates(self, layer: int, row: int = 0) -> Float[Tensor, "d_mlp d_model"]:
        """``m_i v_i`` of one position as they reach the residual stream.

        Their sum plus ``scales(layer)[row] * values.bias(layer)`` is its row of `outputs`.
        """
        check_int(row, "row", min=0, max=self.activations.n_rows - 1)
        scaled = self.scales(layer)[row] * self.coefficients(layer)[row]
        return scaled[:, None] * self.values.layer_view(layer)

    def contributions(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """``|m_i| ||v_i||``, the length of each sub-update."""
        return self.scales(layer)[:, None] * self.coefficients(layer).abs() * self.values.norms(layer)

    def shares(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """Contribution of each sub-update relative to the sum of all of them; 0 if all are."""
        contributions = self.contributions(layer)
        total = contributions.sum(-1, keepdim=True)
        return contributions / total.where(total > 0, torch.ones_like(total))

    def dominant(self, layer: int, k: int = DOMINANT) -> Int[Tensor, "n k"]:
        """The ``k`` sub-updates that contribute most, the greatest first."""
        return self.contributions(layer).topk(check_int(k, "k", min=1, max=self.values.d_mlp)).indices

    def table(
        self, projection: Projection, *, row: int = 0, k: int = DOMINANT, n_tokens: int = 10
    ) -> pd.DataFrame:
        """The ``k`` dominant sub-updates of each layer at one position, with promoted tokens.

        Columns are ``layer, rank, value, coefficient, contribution, share, promoted``; ``promoted`` are the
        tokens with the largest scores of ``m v``: where ``m`` is negative, tokens that ``v`` demotes.
        """
        projection.check_same(self.activations.provenance, theirs="the updates")
        check_int(row, "row", min=0, max=self.activations.n_rows - 1)
        rows = []
        for layer in self.layers:
            dominant = self.dominant(layer, k)[row]
            top = projection.top(self.sub_updates(layer, row)[dominant], n_tokens).ids.tolist()
            quantities = (self.coefficients(layer), self.contributions(layer), self.shares(layer))
            sizes = torch.stack([quantity[row, dominant] for quantity in quantities], 1).tolist()
            for rank, (index, three, ids) in enumerate(
                zip(dominant.tolist(), sizes, top, strict=True), start=1
            ):
                texts = ", ".join(map(visible, token_texts(projection.tokenizer, ids)))
                rows.append((layer, rank, str(self.values.vector(layer, index)), *three, texts))
        columns = ["layer", "rank", "value", "coefficient", "contribution", "share", "promoted"]
        return pd.DataFrame(rows, columns=columns)

    def promoting(
        self, projection: Projection, words: str | Sequence[str], n: int = 10, *, row: int = 0
    ) -> pd.DataFrame:
        """The ``n`` sub-updates at one position that promote a word, or several on average, most.

        Columns are ``value, layer, index, coefficient, share, score, lift``, the largest lift first; see
        `Projection.score_and_lift`. Scores and lifts are those of ``m v``: with a negative coefficient, a
        sub-update promotes what its value vector demotes.

        Examples
        --------
        >>> updates = ffn.Updates.run(model, matlens.make_prompts(model, ["In winter it is"]))
        >>> updates.promoting(ffn.Projection.from_model(model), " cold")
        """
        projection.check_same(self.activations.provenance, theirs="the updates")
        layers, d_mlp, reading = self.layers, self.values.d_mlp, projection.score_and_lift(words)
        n = check_int(n, "n", min=1, max=len(layers) * d_mlp)
        effects = torch.cat([reading.scores(self.sub_updates(layer, row)).cpu() for layer in layers])
        sizes = [torch.stack([self.coefficients(i)[row], self.shares(i)[row]], 1).cpu() for i in layers]
        columns = torch.cat([torch.cat(sizes), effects], 1)
        best = effects[:, 1].topk(n).indices
        names = [layers[i // d_mlp] * d_mlp + i % d_mlp for i in best.tolist()]
        coefficient, share, score, lift = columns[best].T.tolist()
        return self.values.name_columns(names).assign(
            coefficient=coefficient, share=share, score=score, lift=lift
        )

    def _of(self, kind: str, layer: int) -> Tensor:
        site = Site(kind, self.values.resolve_layer(layer))
        return self.activations[site].to(self.values.device)
