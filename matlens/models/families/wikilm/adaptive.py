"""Adaptive embeddings: those of frequency band ``i`` are ``factor ** i`` times narrower.

As an input (Baevski and Auli 2019) a word is its narrow vector, projected. As an output (Grave et al. 2017)
the first band competes with one class per other band: ``log p(w) = log p(band of w) + log p(w | band)``.
`torch.nn.AdaptiveLogSoftmaxWithLoss` keeps projections transposed, so they cannot be tied to those of the
input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from matlens.errors import InputError, check_int, short
from matlens.numerics import log_softmax


def band_edges(cutoffs: Sequence[int], d_vocab: int) -> tuple[tuple[int, int], ...]:
    """First word and end of each band; each ends at a cutoff, and the last with the vocabulary."""
    ends = [check_int(end, "A cutoff", min=1, max=d_vocab) for end in cutoffs]
    if not ends or ends != sorted(set(ends)):
        raise InputError(f"cutoffs must be increasing, such as [20000, 60000], got {short(ends)}.")
    ends += [d_vocab] if ends[-1] < d_vocab else []
    return tuple(zip([0, *ends], ends, strict=False))


def band_widths(d_model: int, factor: float, n_bands: int) -> tuple[int, ...]:
    """How wide the embeddings of each band are."""
    return tuple(int(d_model // factor**band) for band in range(n_bands))


class AdaptiveInput(nn.Module):
    """An embedding of words in bands: ``words [n_words, width]``, ``projections [d_model, width]``."""

    def __init__(self, d_model: int, d_vocab: int, cutoffs: Sequence[int], factor: float = 4.0) -> None:
        super().__init__()
        self.bands = band_edges(cutoffs, d_vocab)
        self.embedding_dim, self.num_embeddings = d_model, d_vocab
        widths = band_widths(d_model, factor, len(self.bands))
        sizes = [end - start for start, end in self.bands]
        self.words = _words(sizes, widths)
        self.projections = _matrices((d_model, width) for width in widths)

    @property
    def weight(self) -> Float[Tensor, "d_vocab d_model"]:
        """The vectors of all words, projected."""
        return torch.cat([linear(w, p) for w, p in zip(self.words, self.projections, strict=True)])

    def forward(self, tokens: Int[Tensor, ...]) -> Float[Tensor, "... d_model"]:
        """The vectors of some words."""
        flat = tokens.reshape(-1)
        vectors = self.projections[0].new_zeros(len(flat), self.embedding_dim)
        for (start, end), words, projection in zip(self.bands, self.words, self.projections, strict=True):
            here = (start <= flat) & (flat < end)
            vectors[here] = linear(embedding(flat[here] - start, words), projection)
        return vectors.view(*tokens.shape, self.embedding_dim)


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of words in bands, which serve as logits: a softmax leaves them as they are.

    ``words`` and ``projections`` as in `AdaptiveInput`, without a projection of the first band; ``classes``
    has a vector for each other band, ``[n_bands - 1, d_model]``, whose score stands for all its words.
    """

    bias = None  # as a linear layer without one

    def __init__(self, d_model: int, d_vocab: int, cutoffs: Sequence[int], factor: float = 4.0) -> None:
        super().__init__()
        self.bands = band_edges(cutoffs, d_vocab)
        self.in_features, self.out_features = d_model, d_vocab
        widths = band_widths(d_model, factor, len(self.bands))
        sizes = [end - start for start, end in self.bands]
        self.words = _words(sizes, widths)
        self.projections = _matrices((d_model, width) for width in widths[1:])
        self.classes = nn.Parameter(torch.randn(len(widths) - 1, d_model) * d_model**-0.5)

    def tie(self, embeddings: AdaptiveInput, *, projections: bool) -> None:
        """Take the embeddings of the input for its own, and where asked their projections."""
        self.words = nn.ParameterList(embeddings.words)
        if projections:
            self.projections = nn.ParameterList(list(embeddings.projections)[1:])

    @property
    def weight(self) -> Float[Tensor, "d_vocab d_model"]:
        """``E``, with projections and without the bands' classes: it compares words of one band only."""
        rest = zip(list(self.words)[1:], self.projections, strict=True)
        return torch.cat([self.words[0], *(linear(words, projection) for words, projection in rest)])

    def forward(self, features: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_vocab"]:
        """Natural logarithms of the probabilities of all words."""
        first, classes = self._first(features)
        parts = [first]
        for band in range(1, len(self.bands)):
            parts.append(self._within(features, band) + classes[..., band - 1, None])
        return torch.cat(parts, -1)

    def losses(self, features: Float[Tensor, "n d_model"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Negative log-probability of one word for each vector, at the price of its band alone."""
        first, classes = self._first(features)
        losses = features.new_zeros(len(features), dtype=first.dtype)
        for band, (start, end) in enumerate(self.bands):
            here = ((start <= targets) & (targets < end)).nonzero()[:, 0]
            within = first[here] if band == 0 else self._within(features[here], band)
            log_p = within.gather(1, (targets[here] - start)[:, None])[:, 0]
            losses = losses.index_add(0, here, -log_p if band == 0 else -log_p - classes[here, band - 1])
        return losses

    def _first(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the words of the first band, and of the other bands."""
        head = torch.cat([self.words[0], self.classes])
        first, classes = log_softmax(linear(features, head)).split(
            [len(self.words[0]), len(self.classes)], -1
        )
        return first, classes

    def _within(self, features: Tensor, band: int) -> Tensor:
        """Log-probabilities of a band's words, given the band."""
        return log_softmax(linear(features @ self.projections[band - 1], self.words[band]))


def _words(sizes: Sequence[int], widths: Sequence[int]) -> nn.ParameterList:
    """Embeddings with norms of about 1 for any width."""
    shapes = zip(sizes, widths, strict=True)
    return nn.ParameterList(nn.Parameter(torch.randn(n, width) * width**-0.5) for n, width in shapes)


def _matrices(shapes: Iterable[tuple[int, int]]) -> nn.ParameterList:
    return nn.ParameterList(nn.init.xavier_uniform_(nn.Parameter(torch.empty(*shape))) for shape in shapes)
