"""Updates: what FFNs write for a token, as the sub-updates of their value vectors.

The FFN of a layer writes ``sum_i m_i v_i + b``. The sub-update ``m_i v_i`` promotes tokens by its own scores
``E m_i v_i``; where its coefficient is negative, those that ``v_i`` itself demotes. A few sub-updates do
most: the contribution of one is ``|m_i| ||v_i||``, its share that over the sum of all (paper B, A.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens import metrics
from matlens.activations.activations import Activations
from matlens.activations.collecting import collect, stream
from matlens.corpora.examples import Examples
from matlens.errors import InputError
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVector, ValueVectors
from matlens.models.sites import COEFFICIENTS, Site
from matlens.models.vocabulary import token_texts, visible
from matlens.storage.tables import result_row, result_table

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

DOMINANT = 10
EXPERIMENT = "dominance"
_WRITTEN = "ffn_out"


class Updates:
    """What the FFNs of a model write at collected positions, taken apart.

    Attributes
    ----------
    values
        The model's value vectors.
    activations
        ``ffn_post`` and ``ffn_out`` of each layer that is asked for, ``n`` rows.

    Raises
    ------
    InputError
        The activations are of another model.
    """

    def __init__(self, values: ValueVectors, activations: Activations) -> None:
        if activations.provenance["model"]["fingerprint"] != values.fingerprint:
            raise InputError(
                f"The value vectors are of {values.model_name}, and the coefficients were collected on "
                "another model. Collect them on this one."
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
        """Run a model over examples, such as `make_prompts` gives, and take apart what it writes there.

        Parameters
        ----------
        model, examples
            What is run on what; one row for the position of each example.
        layers
            Negative from the end; by default all.

        Raises
        ------
        InputError
            The model has no value vectors, or a layer is out of range.
        """
        values = ValueVectors(model)
        chosen = range(values.n_layers) if layers is None else list(map(values.resolve_layer, layers))
        if not chosen:
            raise InputError("No layers are chosen. Expected at least one.")
        sites = [Site(kind, layer) for layer in chosen for kind in (COEFFICIENTS, _WRITTEN)]
        return cls(values, collect(model, examples, sites, progress=progress))

    @property
    def layers(self) -> list[int]:
        """Layers that there are updates of."""
        sites = map(Site.parse, self.activations)
        return sorted({site.layer for site in sites if site.kind == COEFFICIENTS})

    def coefficients(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """``m``, what each value vector of a layer is multiplied by."""
        return self._of(COEFFICIENTS, layer)

    def outputs(self, layer: int) -> Float[Tensor, "n d_model"]:
        """What the FFN itself has written."""
        return self._of(_WRITTEN, layer)

    def sub_updates(self, layer: int, row: int = 0) -> Float[Tensor, "d_mlp d_model"]:
        """``m_i v_i`` of one position; their sum and ``values.bias(layer)`` are its row of `outputs`."""
        return self.coefficients(layer)[row, :, None] * self.values.layer(layer)

    def contributions(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """``|m_i| ||v_i||``, the length of each sub-update."""
        return self.coefficients(layer).abs() * self.values.norms(layer)

    def shares(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """Contribution of each sub-update relative to the sum of all of them."""
        return _relative(self.contributions(layer))

    def dominant(self, layer: int, k: int = DOMINANT) -> Int[Tensor, "n k"]:
        """The ``k`` sub-updates that contribute most, the greatest first.

        Raises
        ------
        InputError
            ``k`` is less than 1, or more than there are.
        """
        return self.contributions(layer).topk(require_count(k, self.values)).indices

    def _of(self, kind: str, layer: int) -> Tensor:
        site = str(Site(kind, self.values.resolve_layer(layer)))
        if site not in set(self.activations):
            there = ", ".join(map(str, self.layers)) or "none"
            raise InputError(f"{site} was not collected. There are updates of these layers: {there}.")
        return self.activations[site].to(self.values.device)


def _relative(contributions: Tensor) -> Tensor:
    whole = contributions.sum(-1, keepdim=True)
    return contributions / whole.where(whole > 0, torch.ones_like(whole))  # an FFN that writes nothing


def require_count(k: int, values: ValueVectors) -> int:
    """Give back a number of sub-updates of a layer that can be had.

    Raises
    ------
    InputError
        It is less than 1, or more than there are.
    """
    if not 1 <= k <= values.d_mlp:
        raise InputError(f"{k} sub-updates were asked for. Expected 1 to {values.d_mlp}.")
    return k


def random_sub_updates(values: ValueVectors, n: int, k: int, *, seed: int) -> list[Int[Tensor, "n k"]]:
    """For each layer ``k`` different random sub-updates of each of ``n`` examples."""
    generator, shape = torch.Generator().manual_seed(seed), (n, values.d_mlp)
    return [torch.rand(shape, generator=generator).topk(k).indices for _ in range(values.n_layers)]


def dominant_table(
    updates: Updates, projection: Projection, *, row: int = 0, k: int = DOMINANT, n_tokens: int = 10
) -> pd.DataFrame:
    """The dominant sub-updates of one position with the tokens that they promote, layer after layer.

    Columns are ``layer, rank, value, coefficient, contribution, share, tokens``; ``tokens`` are those of the
    sub-update, as people see them, with commas between.

    Parameters
    ----------
    updates, projection
        Of the model.
    row
        Which position.
    k, n_tokens
        How many sub-updates of each layer, and how many tokens of each.
    """
    if not 0 <= row < updates.activations.n_rows:
        raise InputError(f"Row {row} was asked for. Expected 0 to {updates.activations.n_rows - 1}.")
    rows = []
    for layer in updates.layers:
        chosen = updates.dominant(layer, k)[row]
        tokens = projection.top(updates.sub_updates(layer, row)[chosen], n_tokens).ids
        of_all = (updates.coefficients(layer), updates.contributions(layer), updates.shares(layer))
        numbers = torch.stack([one[row, chosen] for one in of_all], 1).tolist()
        for rank, (index, told, ids) in enumerate(
            zip(chosen.tolist(), numbers, tokens, strict=True), start=1
        ):
            texts = ", ".join(map(visible, token_texts(projection.tokenizer, ids)))
            rows.append((layer, rank, str(ValueVector(layer, index)), *told, texts))
    columns = ["layer", "rank", "value", "coefficient", "contribution", "share", "tokens"]
    return pd.DataFrame(rows, columns=columns)


def dominance(
    model: TransformerBridge,
    examples: Examples,
    *,
    k: int = DOMINANT,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Share of the ``k`` dominant sub-updates at each layer, and of ``k`` random ones (Figure 6).

    The columns are those of all tables; the methods are ``dominant`` and ``random``, ``target`` is the layer.
    The random sub-updates are drawn for each example and layer from the seed, whatever the batches are.

    Raises
    ------
    InputError
        The model has no value vectors, or fewer than ``k`` in a layer.
    """
    values = ValueVectors(model)
    require_count(k, values)
    sites = [str(Site(COEFFICIENTS, layer)) for layer in range(values.n_layers)]
    drawn = random_sub_updates(values, len(examples), k, seed=seed)
    norms = [values.norms(layer).cpu() for layer in range(values.n_layers)]
    found = {method: torch.empty(values.n_layers, len(examples)) for method in ("dominant", "random")}
    for rows in stream(model, examples, sites, batch_tokens=batch_tokens, progress=progress):
        index = torch.from_numpy(rows.index)
        for layer, site in enumerate(sites):
            shares = _relative(rows.vectors[site].abs() * norms[layer])
            found["dominant"][layer, index] = shares.topk(k).values.sum(1)
            found["random"][layer, index] = shares.gather(1, drawn[layer][index]).sum(1)
    corpus = examples.provenance.get("corpus", "unnamed")
    return result_table(
        result_row(
            EXPERIMENT, model=values.model_name, corpus=corpus, method=method, layer=layer, target=layer,
            metric="share", k=k, estimate=metrics.mean(shares[layer]),
        )
        for layer in range(values.n_layers)
        for method, shares in found.items()
    )  # fmt: skip
