"""The page of a prompt: what lenses read at every layer and token, and the sub-updates that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from matlens.errors import InputError, checked, printable
from matlens.plots.page_assembly import PageVocabulary, assemble, packed

_STEPS = 2**15 - 1  # of a score that is kept as a whole number, against the largest score of its value vector


@dataclass(frozen=True, eq=False)
class LensCells:
    """What one lens reads at every layer and token of a prompt.

    Attributes
    ----------
    ids, log_probs
        The ``k`` most probable tokens, the most probable first, and the natural logarithms of their
        probabilities.
    entropy
        Of the distribution, in nats.
    kl
        ``KL(delta(h^L) || q)``, from the model's own distribution to this one, in nats.
    rank
        Of the token that the model predicts in the end, from 1.
    followed_ranks, followed_log_probs
        Of the tokens that are followed through all cells, from 1.
    """

    ids: Int[np.ndarray, "layers tokens k"]
    log_probs: Float[np.ndarray, "layers tokens k"]
    entropy: Float[np.ndarray, "layers tokens"]
    kl: Float[np.ndarray, "layers tokens"]
    rank: Int[np.ndarray, "layers tokens"]
    followed_ranks: Int[np.ndarray, "layers tokens followed"]
    followed_log_probs: Float[np.ndarray, "layers tokens followed"]


@dataclass(frozen=True, eq=False)
class UpdateCells:
    """The dominant sub-updates of every FFN at every token, and what they do to the followed tokens.

    A sub-update ``s m_i v_i`` points one way along its value vector or, where its coefficient is negative,
    the other; ``way`` says which of these each is. The effect of one on the score of a token is
    ``scale * |coefficient| * static[way]``. The effects of the dominant ones, ``rest`` and ``scale * bias``
    add up to that of the whole FFN.

    Attributes
    ----------
    way
        Rows of ``layer``, ``index``, ``negative``, ``promoted`` and ``static``, the greatest first.
    coefficient, share
        ``m_i``, and the part of the lengths of all sub-updates of the FFN.
    scale
        ``s``, by which a norm after the FFN multiplies all of a token's sub-updates; 1 where there is none.
    rest, bias
        Effects of all other sub-updates together, and of the FFN's bias, on the followed tokens.
    layer, index, negative
        Value vectors by the number of their FFN and their index in it, and which way they point.
    promoted
        The tokens that each promotes most, this way.
    static
        ``E v_i``, or its opposite, for the followed tokens.
    d_mlp
        How many sub-updates an FFN has.
    """

    way: Int[np.ndarray, "ffns tokens k"]
    coefficient: Float[np.ndarray, "ffns tokens k"]
    share: Float[np.ndarray, "ffns tokens k"]
    scale: Float[np.ndarray, "ffns tokens"]
    rest: Float[np.ndarray, "ffns tokens followed"]
    bias: Float[np.ndarray, "ffns followed"]
    layer: Int[np.ndarray, " ways"]
    index: Int[np.ndarray, " ways"]
    negative: Int[np.ndarray, " ways"]
    promoted: Int[np.ndarray, "ways n"]
    static: Float[np.ndarray, "ways followed"]
    d_mlp: int


@checked
def trajectory_page(
    *,
    model: str,
    prompt: str,
    tokens: Int[np.ndarray, " tokens"],
    layers: Sequence[int],
    lenses: Mapping[str, LensCells],
    followed: Int[np.ndarray, " followed"],
    texts: Mapping[int, str],
    updates: UpdateCells | None = None,
    pinned: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> str:
    """The page as one HTML text, which needs nothing from elsewhere.

    Parameters
    ----------
    model, prompt
        What was run on what, as people read it.
    tokens
        The prompt's tokens.
    layers
        Numbers of the layers of each lens's rows, ascending; the last is the model's own prediction.
    lenses
        Cells by the lens's name, the first of which is shown at first.
    followed
        Tokens whose ranks are known in every cell.
    texts
        How people read each token that comes up.
    updates
        The sub-updates, where they are known.
    pinned
        Which of the followed tokens are pinned at first.
    notes
        Sentences about how it was made.

    Raises
    ------
    InputError
        There is no lens, the cells of one are not those of these layers and tokens, or a token has no text.
    """
    _check_shapes(tokens, layers, lenses, followed)
    parts = [tokens, followed, *(cells.ids for cells in lenses.values())]
    vocabulary = PageVocabulary(parts if updates is None else [*parts, updates.promoted])
    unnamed = [int(token) for token in vocabulary.ids if int(token) not in texts]
    if unnamed:
        raise InputError(f"{len(unnamed)} tokens have no text, the first is {unnamed[0]}. Expected all.")
    data = {
        "model": model,
        "prompt": prompt,
        "layers": list(map(int, layers)),
        "texts": [texts[int(token)] for token in vocabulary.ids],
        "ids": packed(vocabulary.ids),
        "tokens": packed(vocabulary.places(tokens)),
        "followed": packed(vocabulary.places(followed)),
        "pinned": [int(place) for place in vocabulary.places(np.asarray(pinned, dtype=np.int64))],
        "lenses": [_lens_data(name, cells, vocabulary) for name, cells in lenses.items()],
        "updates": None if updates is None else _update_data(updates, vocabulary),
    }
    title = f"{prompt} · {model}"
    return assemble(
        "trajectory.html", "trajectory.js", title=title, data=data, model=printable(model),
        notes=list(map(printable, notes)),
    )  # fmt: skip


def _check_shapes(
    tokens: np.ndarray, layers: Sequence[int], lenses: Mapping[str, LensCells], followed: np.ndarray
) -> None:
    if not lenses:
        raise InputError("There is no lens to show. Expected one or more, by their names.")
    cells = len(layers), len(tokens)
    for name, lens in lenses.items():
        shapes = {"ids": lens.ids.shape[:2], "entropy": lens.entropy.shape, "kl": lens.kl.shape}
        shapes |= {"rank": lens.rank.shape, "log_probs": lens.log_probs.shape[:2]}
        wrong = [f"{part} {shape}" for part, shape in shapes.items() if shape != cells]
        if wrong or lens.followed_ranks.shape != (*cells, len(followed)):
            raise InputError(
                f"The lens {name} does not have the {cells[0]} layers, {cells[1]} tokens and {len(followed)} "
                f"followed tokens of the page ({', '.join(wrong) or 'followed_ranks'})."
            )


def _lens_data(name: str, cells: LensCells, vocabulary: PageVocabulary) -> dict[str, Any]:
    return {
        "name": name,
        "top": packed(vocabulary.places(cells.ids)),
        "logProbs": packed(cells.log_probs),
        "entropy": packed(cells.entropy),
        "kl": packed(cells.kl),
        "rank": packed(cells.rank),
        "followedRanks": packed(cells.followed_ranks),
        "followedLogProbs": packed(cells.followed_log_probs),
    }


def _update_data(updates: UpdateCells, vocabulary: PageVocabulary) -> dict[str, Any]:
    largest = np.abs(updates.static).max(1, initial=0)
    steps = updates.static / np.where(largest > 0, largest, 1)[:, None] * _STEPS
    return {
        "dMlp": updates.d_mlp,
        "way": packed(updates.way),
        "coefficient": packed(updates.coefficient),
        "share": packed(updates.share),
        "scale": packed(updates.scale),
        "rest": packed(updates.rest),
        "bias": packed(updates.bias),
        "layer": packed(updates.layer),
        "index": packed(updates.index),
        "negative": packed(updates.negative),
        "promoted": packed(vocabulary.places(updates.promoted)),
        "static": packed(steps.round().astype(np.int16)),
        "step": packed(largest / _STEPS),
    }
