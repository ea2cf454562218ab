"""The Jacobian lens, fitted by TransformerLens: the mean Jacobian of ``h^L`` in ``h^l`` (definitions, 9)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from matlens import parallel
from matlens.data.corpus import Corpus, as_corpus
from matlens.errors import InputError, NonNegativeInt, PositiveInt, checked, short
from matlens.lens.maps import LayerMap, LensParts
from matlens.models.identity import ModelIdentity, Provenance

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

SKIPPED = 16  # first positions that TransformerLens leaves out, sinks among them
PROMPTS, LONGEST = 30, 128  # that Jacobians are taken on, and the tokens that each is cut to


def longest_sentences(corpus: Corpus, n: int) -> list[str]:
    """The sentences of a corpus that have the most words, which are those that Jacobians are taken on."""
    return sorted(corpus.sentences, key=lambda text: (-len(text.split()), text))[:n]


@checked
def fit_jacobian(
    model: TransformerBridge,
    prompts: Corpus | Iterable[str],
    *,
    layers: Sequence[int] | None = None,
    longest: PositiveInt = LONGEST,
    skip: NonNegativeInt = SKIPPED,
    at_once: PositiveInt = 8,
    progress: bool = True,
) -> LensParts:
    """Fit a Jacobian lens by ``JacobianLens.fit`` of TransformerLens; ``Lens(*parts)`` is the lens.

    For each prompt there is a pass back through the model for every few coordinates of ``h^L``, so that a
    prompt takes minutes on a processor; all layers come from the same passes. Several processes that share
    the work divide the prompts. Matrices are taken as they are, and there is no intercept.

    Parameters
    ----------
    model
        A decoder.
    prompts
        The texts, or a corpus. Those with no more than ``skip + 1`` tokens are left out.
    layers
        Layers to fit, from 1 to ``L - 1``; by default all.
    longest
        Tokens that a prompt is cut to.
    skip
        First positions of a prompt that are no sources.
    at_once
        Coordinates of a pass; more take more memory and no more work.
    progress
        Whether to show a bar.

    Raises
    ------
    InputError
        The model is no plain decoder, a layer is out of range, or no prompt is long enough.
    """
    from transformer_lens.tools.analysis import JacobianLens

    n_layers = int(model.cfg.n_layers)
    wanted = list(range(1, n_layers)) if layers is None else sorted(set(layers))
    if not wanted or not 1 <= wanted[0] <= wanted[-1] < n_layers:
        raise InputError(
            f"The layers {short(wanted)} cannot be fitted: TransformerLens knows those after a block and "
            f"before the last. Expected layers from 1 to {n_layers - 1}."
        )
    name = prompts.name if isinstance(prompts, Corpus) else "given sentences"
    texts = list(as_corpus(prompts).sentences)
    if not texts or not all(text.strip() for text in texts):
        raise InputError("A prompt is no text or empty, or there is none. Expected texts to fit on.")
    jacobians = torch.zeros(len(wanted), int(model.cfg.d_model), int(model.cfg.d_model))
    n_fitted = 0
    try:
        lengths = [min(longest, len(model.to_tokens(text)[0])) for text in texts]
        long = [text for text, length in zip(texts, lengths, strict=True) if length > skip + 1]
        # Where no text is long enough, TransformerLens says so.
        own = long[parallel.rank() :: parallel.world_size()] if long and parallel.world_size() > 1 else texts
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="skipping prompt")
            if own:
                fitted = JacobianLens.fit(
                    model, own, corpus=name, source_layers=[layer - 1 for layer in wanted], dim_batch=at_once,
                    max_seq_len=longest, skip_first_positions=skip,
                    show_progress=progress and parallel.is_main(),
                )  # fmt: skip
                n_fitted = fitted.n_prompts
                jacobians = torch.stack([fitted.jacobians[layer - 1].cpu() for layer in wanted])
    except (ValueError, TypeError) as error:
        raise InputError(f"TransformerLens cannot fit a Jacobian lens here: {error}") from error
    if parallel.world_size() > 1:
        jacobians, n_fitted = _of_all(jacobians, n_fitted)
    n_tokens = sum(length for length in lengths if length > skip + 1)
    provenance = Provenance(
        ModelIdentity.from_model(model),
        {"corpus": name, "n": n_fitted},
        details={
            "method": "jacobian", "n_fitted": n_fitted, "n_tokens": n_tokens, "longest": longest,
            "skip": skip,
        },
    )  # fmt: skip
    maps = {layer: LayerMap(jacobian.clone()) for layer, jacobian in zip(wanted, jacobians, strict=True)}
    return LensParts(maps, "jacobian", provenance)


def _of_all(means: Float[Tensor, "layers d d"], n: int) -> tuple[Float[Tensor, "layers d d"], int]:
    """The mean over the prompts of all processes, each of which counts once, and how many they are."""
    own = {"sums": (n * means.double())[None], "n": torch.tensor([n])}
    of_all = parallel.concatenate(own, "Jacobians")
    count = int(of_all["n"].sum())
    return (of_all["sums"].sum(0) / count).float(), count
