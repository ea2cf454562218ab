"""Cells of a page: what a lens reads at each token of a prompt and each layer, and of which tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.errors import InputError, check_int, checked
from matlens.models.vocabulary import token_texts, visible
from matlens.numerics.probabilities import kl_divergence, log_softmax
from matlens.plots.page_trajectory import LensCells

_SCORES = 2**24  # scores over the vocabulary that are held at once, 64 MiB; several tensors of this size live


@checked
@torch.inference_mode()
def read_cells(
    logits: Callable[[Tensor, int], Tensor],
    vectors: Sequence[Float[Tensor, "n d_model"]],
    layers: Sequence[int],
    *,
    followed: Int[Tensor, " followed"],
    k: int = 10,
) -> LensCells:
    """Read every token of a prompt at every layer.

    Parameters
    ----------
    logits
        Scores of all tokens for vectors of a layer, such as `Lens.logits`.
    vectors, layers
        The stream of the prompt at each layer and its number, the last layer of the model at the end.
    followed
        Tokens whose ranks and probabilities are kept in every cell.
    k
        How many of the most probable tokens are kept.

    Raises
    ------
    InputError
        There are not as many layers as tensors of vectors, a followed token is not in the vocabulary, or
        ``k`` is more than there are tokens.
    """
    if len(vectors) != len(layers) or not layers:
        raise InputError(f"There are vectors of {len(vectors)} layers for {len(layers)} numbers of layers.")
    n_tokens = len(vectors[-1])
    width = logits(vectors[-1][:1], layers[-1]).shape[-1]
    check_int(k, "k", min=1, max=width)
    if len(followed) and not 0 <= int(followed.min()) <= int(followed.max()) < width:
        raise InputError(f"The followed tokens are not all in the vocabulary, which has 0 to {width - 1}.")
    step = max(_SCORES // width, 1)
    blocks = [
        _read_block([of_layer[start : start + step] for of_layer in vectors], layers, logits, followed, k)
        for start in range(0, n_tokens, step)
    ]
    return LensCells(*(torch.cat(parts, 1).numpy() for parts in zip(*blocks, strict=True)))


def tokens_of_interest(final: Int[Tensor, "n k"], tokens: Int[Tensor, " n"], place: int) -> list[int]:
    """Tokens worth following through a prompt, the likeliest to be asked for first.

    Those that the model predicts at each token, from the one that is read backwards; the others that it holds
    for likely there; and the prompt's own.
    """
    return [
        *final[[*range(place, -1, -1)], 0].tolist(),
        *final[place].tolist(),
        *final[place + 1 :, 0].tolist(),
        *tokens.tolist(),
    ]


def texts_of(tokenizer: Any, ids: Iterable[np.ndarray]) -> dict[int, str]:
    """How people read each of the tokens in some arrays."""
    unique = np.unique(np.concatenate([np.asarray(part).ravel() for part in ids])).tolist()
    return dict(zip(unique, map(visible, token_texts(tokenizer, unique)), strict=True))


def _read_block(
    vectors: Sequence[Tensor],
    layers: Sequence[int],
    logits: Callable[[Tensor, int], Tensor],
    followed: Tensor,
    k: int,
) -> list[Tensor]:
    """The parts of `LensCells` for some of the tokens."""
    true = log_softmax(logits(vectors[-1], layers[-1]))
    final = true.argmax(-1, keepdim=True)
    chosen = followed.to(true.device)
    columns: list[tuple[Tensor, ...]] = []
    for h, layer in zip(vectors, layers, strict=True):
        log_q = log_softmax(logits(h, layer))
        best = log_q.topk(k)
        of_followed = log_q[:, chosen]
        ranks = [1 + (log_q > of_followed[:, [i]]).sum(-1) for i in range(len(chosen))]
        columns.append(
            (
                best.indices,
                best.values,
                torch.special.entr(log_q.exp()).sum(-1),
                kl_divergence(true, log_q).clamp(min=0),
                1 + (log_q > log_q.gather(1, final)).sum(-1),
                torch.stack(ranks, 1) if ranks else torch.empty(len(h), 0, dtype=torch.long),
                of_followed,
            )
        )
    return [torch.stack(part).cpu() for part in zip(*columns, strict=True)]
