"""Samples of fits: selected rows, weights, and whether they are enough."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Rows
from matlens.errors import InputError, check, short, warn
from matlens.linear.maps import tensor_digest
from matlens.models.identity import Provenance
from matlens.numerics import in_float64

ENOUGH = 2  # samples per dimension; with fewer, least squares follows the noise of Gaussian samples


def check_alike(samples: Mapping[str, Tensor]) -> None:
    """Raise InputError unless all sites have as many vectors: row by row they are of one token."""
    for site, vectors in samples.items():
        check(vectors, Num[Tensor, "n width"], f"samples of {site}")
    counts = {site: len(vectors) for site, vectors in samples.items()}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{count} of {site}" for site, count in counts.items())
        raise InputError(f"All sites must have the same number of samples, got {numbers}.")


@dataclass(frozen=True)
class Selection:
    """Which of all samples are fitted on, and how much each counts.

    Attributes
    ----------
    mask
        True for each sample that is fitted on, whose weight is above 0.
    weights
        The weight of each sample in float64, or ``None`` where all count the same.
    """

    mask: Bool[Tensor, " n"]
    weights: Float[Tensor, " n"] | None

    @classmethod
    def parse(cls, rows: Tensor | None, weights: Tensor | None, n: int) -> Selection | None:
        """Check ``rows`` and ``weights`` of ``n`` samples; ``None`` if neither is given."""
        if rows is None and weights is None:
            return None
        mask = torch.ones(n, dtype=torch.bool) if rows is None else rows.cpu()
        if len(mask) != n:
            raise InputError(f"rows must have a value for each of the {n} samples, got {len(mask)}.")
        if weights is not None:
            weights = check_weights(weights, n).cpu()
            mask = mask & (weights > 0)
        if not bool(mask.any()):
            raise InputError("rows and weights must select at least one sample, got none.")
        return cls(mask, weights)

    @property
    def n(self) -> int:
        """How many samples are fitted on."""
        return int(self.mask.sum())

    @property
    def details(self) -> dict[str, str]:
        """Samples and weights of a fit, for its provenance."""
        weights = {} if self.weights is None else {"weights": tensor_digest(self.weights[self.mask])}
        return {"rows": tensor_digest(self.mask)} | weights

    def part(self, index: Any) -> Selection:
        """The same of some of the samples, by their index or a mask."""
        index = torch.as_tensor(index)
        return Selection(self.mask[index], None if self.weights is None else self.weights[index])

    def apply(self, vectors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """The selected vectors, and their weights."""
        selected = {site: of_site[self.mask.to(of_site.device)] for site, of_site in vectors.items()}
        return selected, None if self.weights is None else self.weights[self.mask]


def vectors_of(batch: Rows | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The vectors of a batch by site."""
    return batch.vectors if isinstance(batch, Rows) else batch


def selected_batches(
    batches: Iterable[Rows | Mapping[str, Tensor]],
    rows: Tensor | None,
    weights: Tensor | None,
    provenance: Provenance | None,
    *,
    divided: bool = False,
) -> Iterator[tuple[Mapping[str, Tensor], Tensor | None]]:
    """Vectors of the selected samples and their weights, batch by batch."""
    expected = next((len(given) for given in (rows, weights) if given is not None), None)
    selection = Selection.parse(rows, weights, expected or 0)
    seen = 0
    for batch in batches:
        vectors = vectors_of(batch)
        if isinstance(batch, Rows) and provenance is not None and provenance.model is not None:
            provenance.check_same(batch.provenance, ours="the provenance", theirs="the vectors")
        count = len(next(iter(vectors.values()), ()))
        if not count:
            continue
        index = torch.as_tensor(batch.index) if isinstance(batch, Rows) else torch.arange(seen, seen + count)
        seen += count
        if selection is None:
            yield vectors, None
        elif int(index.max()) < len(selection.mask):
            yield selection.part(index).apply(vectors)
        else:
            break
    if divided and expected is not None:
        of_ranks = parallel.concatenate({"seen": torch.tensor([seen])}, "the number of samples seen")
        seen = int(of_ranks["seen"].sum())
    if expected not in (None, seen):
        raise InputError(f"rows and weights must have a value for each sample, got {expected}.")


def check_weights(weights: Tensor, n: int) -> Float[Tensor, " n"]:
    """Weights of ``n`` samples in float64; raises InputError unless they are finite and >= 0."""
    if len(weights) != n or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise InputError(
            f"weights must be finite numbers of at least 0 for the {n} samples, got {short(weights)}."
        )
    return in_float64(weights.detach())


def are_few(n_samples: int, width: int) -> bool:
    """Whether samples are fewer than twice the width, so a fit needs a penalty."""
    return n_samples < ENOUGH * width


class NoisyFit(NamedTuple):
    """A fit whose error on other samples is mostly noise of those that it was fitted on.

    Attributes
    ----------
    name
        Name of the fit, such as ``"h.3 -> h.30"``.
    n, width
        How many samples it was fitted on, and of how many dimensions.
    r2, r2_fitted
        On samples excluded from the fit, and on the same samples in the fit; ``None`` where the numbers of
        samples and dimensions tell already.
    """

    name: str
    n: int
    width: int
    r2: float | None = None
    r2_fitted: float | None = None


def warn_of_noise(fits: Sequence[NoisyFit], n_fits: int) -> None:
    """Issue one `InputWarning` for all fits of a call that overfit their samples."""
    if not fits:
        return
    worst = min(fits, key=lambda fit: -torch.inf if fit.r2 is None else fit.r2)
    if worst.r2 is None:
        what = (
            f"Maps of {worst.width:,} dimensions must have at least {ENOUGH * worst.width:,} samples, got "
            f"{worst.n:,}: with so few, most of their error on other samples is noise."
        )
    else:
        what = (
            f"{len(fits)} of {n_fits} fits on {worst.n:,} samples in {worst.width:,} dimensions mostly "
            f"follow noise: r2 of {worst.name} is {worst.r2:.2f} on samples excluded from the fit, and "
            f"{worst.r2_fitted:.2f} on the same samples in it."
        )
    warn(f"{what} Use more samples or a ridge.")


def warn_of_same_sentences(fitted: Provenance, validation: Provenance, what: str, *, parts: bool) -> None:
    """Issue an `InputWarning` if maps are evaluated on their training sentences.

    With ``parts`` only some of the samples count here; if the fit took only some too, they may be others.
    """
    if parts and "rows" in fitted.details:
        return
    texts = (fitted.data or {}).get("corpus_fingerprint"), (validation.data or {}).get("corpus_fingerprint")
    same_texts = texts[0] is not None and texts[0] == texts[1]
    if same_texts or (fitted.examples is not None and fitted.examples == validation.examples):
        warn(
            f"{what} were fitted on the sentences of {validation.corpus} that they are evaluated on, so r2 "
            "and predictions are better than on new text. Use other sentences, see Corpus.split."
        )
