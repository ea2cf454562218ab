"""The pages of all value vectors: one that finds and shows them, and scripts beside it that bring the data.

A browser lets a page that is opened from a disk run scripts beside it, and fetch nothing. So every part of
the data is a script that hands its content over by name, and is asked for when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from matlens.errors import checked, printable
from matlens.plots.page_assembly import assemble, embedded_json, packed

BLOCK = 256
"""Value vectors in one script."""
SENTENCES = 1024
"""Sentences in one script."""
TOKENS = 1024
"""Tokens whose value vectors are listed in one script."""
INDEX = "index.html"


@dataclass(frozen=True, eq=False)
class VectorBlock:
    """Some value vectors of a layer that follow each other.

    Attributes
    ----------
    tokens, scores
        By reading (``plain``, and ``norm`` where there is a final norm) and side (``top``, ``bottom``): the
        tokens that stand out, the most extreme first.
    norms
        Lengths of the vectors.
    neighbours, cosines
        Rows of the value vectors that point most the same way, and how much.
    dominant
        At which share of the corpus's tokens each is among the dominant sub-updates of its layer.
    sentences, peaks, coefficients
        The sentences that use each most, -1 for none, the largest coefficient in each, and those of all of
        its tokens in steps of ``|peak| / 127``.
    """

    tokens: Mapping[tuple[str, str], Int[np.ndarray, "n k"]]
    scores: Mapping[tuple[str, str], Float[np.ndarray, "n k"]]
    norms: Float[np.ndarray, " n"]
    neighbours: Int[np.ndarray, "n near"]
    cosines: Float[np.ndarray, "n near"]
    dominant: Float[np.ndarray, " n"] | None = None
    sentences: Int[np.ndarray, "n best"] | None = None
    peaks: Float[np.ndarray, "n best"] | None = None
    coefficients: Int[np.ndarray, "n best longest"] | None = None


def shard(name: str, content: Any) -> str:
    """A script that hands a part of the data over."""
    return f"matlensShard({embedded_json(name)},{embedded_json(content)});\n"


def block_name(layer: int, number: int) -> str:
    """The name of the part of some value vectors, without its ending."""
    return f"vectors-{layer}-{number}"


@checked
def index_page(
    *, model: str, n_layers: int, d_mlp: int, among: int, corpus: str | None, n_clusters: int
) -> str:
    """The page that finds and shows value vectors.

    Parameters
    ----------
    model
        The model, as people read it.
    n_layers, d_mlp
        How many value vectors there are.
    among
        Among how many top tokens of each vector it finds a token.
    corpus
        The sentences that are shown, as people read it; ``None`` where there are none.
    n_clusters
        How many clusters there are; 0 where they are not known.
    """
    data = {
        "model": model, "nLayers": n_layers, "dMlp": d_mlp, "block": BLOCK, "sentences": SENTENCES,
        "tokens": TOKENS, "among": among, "corpus": corpus, "nClusters": n_clusters,
    }  # fmt: skip
    return assemble(
        "values.html", "values.js", title=f"Value vectors of {model}", data=data, sources=["'self'"],
        model=printable(model), corpus=None if corpus is None else printable(corpus), among=among,
        n_vectors=f"{n_layers * d_mlp:,}",
    )  # fmt: skip


def vector_shard(layer: int, number: int, block: VectorBlock, lengths: np.ndarray) -> str:
    """The part of some value vectors; ``lengths`` are those of all sentences."""
    lists = [
        {"reading": reading, "side": side, "ids": packed(ids), "scores": packed(block.scores[reading, side])}
        for (reading, side), ids in block.tokens.items()
    ]
    content: dict[str, Any] = {
        "lists": lists,
        "norms": packed(block.norms),
        "neighbours": packed(block.neighbours),
        "cosines": packed(block.cosines),
        "sentences": None,
    }
    if block.sentences is not None and block.peaks is not None and block.coefficients is not None:
        known = block.sentences >= 0
        longest = block.coefficients.shape[-1]
        inside = np.arange(longest) < np.where(known, lengths[block.sentences], 0)[..., None]
        content |= {
            "dominant": packed(np.asarray(block.dominant)),
            "sentences": packed(np.where(known, block.sentences + 1, 0)),
            "peaks": packed(np.where(known, block.peaks, 0)),
            "coefficients": packed(block.coefficients[inside].astype(np.int64) + 128),
            "starts": packed(np.concatenate([[0], np.cumsum(inside.sum((1, 2)))])),
        }
    return shard(block_name(layer, number), content)
