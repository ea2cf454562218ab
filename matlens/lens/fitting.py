"""Lenses fitted in closed form: one pass over the data keeps what all methods need of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations, Positions, Rows
from matlens.activations.collecting import stream
from matlens.data.corpus import Corpus
from matlens.data.corpus_examples import make_examples
from matlens.data.examples import Examples
from matlens.errors import InputError, PositiveInt, Seed, checked
from matlens.lens.maps import Standardisation
from matlens.lens.methods import check_methods, row_keys
from matlens.lens.moments import LensMoments
from matlens.linear.samples import Chosen
from matlens.models.identity import ModelIdentity, Provenance

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
def lens_moments(
    model: TransformerBridge,
    data: Corpus | Sequence[str] | Examples | Activations,
    methods: str | Sequence[str],
    *,
    positions: Positions = "all",
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    layers: Sequence[int] | None = None,
    seed: Seed = 0,
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> LensMoments:
    """What methods need of the data, by one pass over it; the parameters are those of `Lens.fit`.

    Several processes that share the work each pass over a part of the data, and all get the whole.

    Raises
    ------
    InputError
        A method is none, or not of this model; the data are not of this model, or lack a layer; or rows or
        weights are not those of the samples.
    """
    names = check_methods(methods)
    norm = Standardisation.from_model(model) if any(method.normed for method in names.values()) else None
    if isinstance(data, Activations):
        data.provenance.check_same(ModelIdentity.from_model(model), ours="the activations")
        provenance, examples, positions = data.provenance, data.examples, data.positions
    else:
        examples = data if isinstance(data, Examples) else make_examples(model, data, seed=seed)
        provenance = Provenance(
            ModelIdentity.from_model(model), examples.provenance, examples.fingerprint, positions
        )
    n = examples.n_positions if positions == "drawn" else len(examples.tokens)
    chosen = Chosen.of(rows, weights, n)
    if chosen is not None:
        provenance = provenance.with_details(**chosen.details)
    moments = LensMoments(provenance, methods, layers=layers, norm=norm)
    parallel.check_same([provenance.to_json(), list(names), list(moments.layers)], "the job of lenses")
    keys = row_keys(examples, drawn=positions == "drawn")
    batches: Iterable[Rows] = ()
    if isinstance(data, Activations):
        absent = [site for site in moments.sites if site not in data]
        if absent:
            raise InputError(
                f"The activations lack {', '.join(absent[:4])}. Expected the stream at every layer that is "
                "fitted and at the last one; where sinks are left out, at all layers."
            )
        batches = data.shards(moments.sites, divided=True)
    elif not all(method.is_identity for method in names.values()):
        batches = stream(
            model, examples, moments.sites, positions=positions, batch_tokens=batch_tokens, progress=progress,
            divided=True,
        )  # fmt: skip
    for batch in batches:
        _add_chosen(moments, chosen, batch, keys[batch.index])
    return moments.unite()


def _add_chosen(moments: LensMoments, chosen: Chosen | None, batch: Rows, keys: np.ndarray) -> None:
    """Add those rows of a batch that are fitted on."""
    if chosen is None:
        moments.update(batch.vectors, places=batch.places, keys=keys)
        return
    kept, weights = chosen.of_batch(batch.index)
    if bool(kept.any()):
        taken = {site: of_site[kept.to(of_site.device)] for site, of_site in batch.vectors.items()}
        moments.update(taken, places=batch.places[kept.numpy()], keys=keys[kept.numpy()], weights=weights)
