"""Samples as fits take them: which are fitted on, how much each counts, and whether they are enough."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Num, Real
from torch import Tensor

from matlens.errors import InputError, check, short, warn
from matlens.linear.maps import tensor_digest
from matlens.models.identity import Provenance
from matlens.numerics.precision import in_float64

ENOUGH = 2  # samples per dimension; with fewer, least squares follows the noise of Gaussian samples


@runtime_checkable
class Samples(Protocol):
    """As much of `Activations` as a fit needs."""

    @property
    def provenance(self) -> Provenance:
        """Where the vectors come from."""

    @property
    def n_rows(self) -> int:
        """The number of vectors of each site."""

    def __getitem__(self, site: Any, /) -> Tensor:
        """The vectors of a site."""

    def __iter__(self) -> Iterator[str]:
        """The sites."""


@runtime_checkable
class StoredSamples(Samples, Protocol):
    """Samples in a folder, which may be more than fit into memory."""

    def stored_bytes(self, sites: Iterable[str]) -> int:
        """Bytes that the vectors of some sites take in memory; 0 where they are there already."""

    def shards(
        self, sites: Sequence[Any], *, divided: bool, device: torch.device | str | None
    ) -> Iterator[Passing]:
        """The vectors of some sites part by part."""


@runtime_checkable
class Passing(Protocol):
    """Vectors of one batch that know which samples they are, such as `matlens.activations.Rows`."""

    @property
    def index(self) -> Any:
        """The place of each vector among all samples."""

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """The vectors by site."""

    @property
    def provenance(self) -> Provenance:
        """The model and the examples that they are of."""


def check_alike(samples: Mapping[str, Tensor]) -> None:
    """Refuse sites whose samples are not as many as those of the others, or are no vectors."""
    for site, vectors in samples.items():
        check(vectors, Num[Tensor, "n width"], f"samples of {site}")
    counts = {site: len(vectors) for site, vectors in samples.items()}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{count} of {site}" for site, count in counts.items())
        raise InputError(
            f"There are {numbers}. Expected as many samples of every site: row by row they are of one token."
        )


def chosen_samples(
    rows: Any, weights: Any, n: int
) -> tuple[Int[Tensor, " chosen"] | None, Float[Tensor, " chosen"] | None]:
    """Read which of so many samples are fitted on, ``None`` for all, and the weights of these.

    Raises
    ------
    InputError
        Rows are no mask, or weights no numbers of at least 0, or not as many as samples; or none is chosen.
    """
    if weights is not None:
        weights = check_weights(weights, n)
    check(rows, Bool[Tensor, " n"] | None, "rows")
    if rows is not None and len(rows) != n:
        raise InputError(f"'rows' has {len(rows)} values for {n} samples. Expected one for each.")
    counted = rows if weights is None else (weights > 0 if rows is None else rows & (weights > 0))
    if counted is None:
        return None, None
    chosen = counted.nonzero()[:, 0]
    if not len(chosen):
        raise InputError(
            "No sample is left to fit on. Expected at least one true value in 'rows', and a weight above 0 "
            "there."
        )
    return chosen, None if weights is None else weights[chosen]


@dataclass(frozen=True)
class Chosen:
    """Which of all samples are fitted on, for those that pass by in batches.

    Attributes
    ----------
    mask
        True for each sample that is; of those whose weight is 0 none is.
    weights
        How much each sample counts in float64, or ``None`` where all count as much.
    """

    mask: Bool[Tensor, " n"]
    weights: Float[Tensor, " n"] | None

    @classmethod
    def of(cls, rows: Any, weights: Any, n: int) -> Chosen | None:
        """Read what a caller says of so many samples; ``None`` where that is nothing, so that all count.

        Raises
        ------
        InputError
            As `chosen_samples`.
        """
        index, kept = chosen_samples(rows, weights, n)
        if index is None:
            return None
        mask = torch.zeros(n, dtype=torch.bool)
        mask[index.cpu()] = True
        if kept is None:
            return cls(mask, None)
        return cls(mask, torch.zeros(n, dtype=torch.float64).masked_scatter_(mask, kept.cpu()))

    @property
    def n(self) -> int:
        """How many samples are fitted on."""
        return int(self.mask.sum())

    @property
    def details(self) -> dict[str, str]:
        """What goes into the provenance of what is fitted: that it is of some samples, or weighted."""
        weights = {} if self.weights is None else {"weights": tensor_digest(self.weights)}
        return {"rows": tensor_digest(self.mask)} | weights

    def among(self, rows: Bool[Tensor, " n"]) -> Chosen:
        """The same of some of the samples, in their order."""
        return Chosen(self.mask[rows], None if self.weights is None else self.weights[rows])

    def of_batch(self, places: Any) -> tuple[Bool[Tensor, " batch"], Float[Tensor, " chosen"] | None]:
        """Which samples of a batch are fitted on, by their places among all, and the weights of these."""
        places = torch.as_tensor(places)
        kept = self.mask[places]
        return kept, None if self.weights is None else self.weights[places[kept]]


def vectors_of(batch: Any) -> Mapping[str, Tensor]:
    """The vectors of a batch that says where they come from, or of one that is vectors by site alone."""
    return batch.vectors if isinstance(batch, Passing) else batch


def chosen_of_batches(
    batches: Iterable[Any], rows: Any, weights: Any, provenance: Provenance | None
) -> Iterator[tuple[Mapping[str, Tensor], Tensor | None]]:
    """Vectors of the chosen samples and their weights, batch by batch."""
    expected = next(
        (len(given) for given in (rows, weights) if isinstance(given, Tensor) and given.ndim), None
    )
    chosen = Chosen.of(rows, weights, expected or 0)
    seen = 0
    for batch in batches:
        vectors = vectors_of(batch)
        if isinstance(batch, Passing) and provenance is not None and provenance.model is not None:
            provenance.check_same(batch.provenance, ours="the provenance", theirs="the vectors")
        count = len(next(iter(vectors.values()), ()))
        if not count:
            continue
        places = (
            torch.as_tensor(batch.index) if isinstance(batch, Passing) else torch.arange(seen, seen + count)
        )
        seen += count
        if chosen is None:
            yield vectors, None
        elif int(places.max()) < len(chosen.mask):
            kept, of_kept = chosen.of_batch(places)
            yield {site: of_site[kept.to(of_site.device)] for site, of_site in vectors.items()}, of_kept
        else:
            break
    if expected not in (None, seen):
        raise InputError(
            f"'rows' or 'weights' has {expected} values, and the batches hold another number of samples. "
            "Expected one value for each."
        )


def check_weights(weights: Any, n: int) -> Float[Tensor, " n"]:
    """Read the weights of so many samples, in float64.

    Raises
    ------
    InputError
        They are no tensor of one number for each sample, or one is negative or not finite.
    """
    check(weights, Real[Tensor, " n"], "weights")
    if len(weights) != n or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise InputError(
            f"weights must be finite numbers of at least 0 for the {n} samples, got {short(weights)}."
        )
    return in_float64(weights.detach())


def are_few(n_samples: int, width: int) -> bool:
    """Whether samples are fewer than twice the width, which leaves a fit without a penalty to their noise."""
    return n_samples < ENOUGH * width


class NoisyFit(NamedTuple):
    """A fit whose error on other samples is mostly noise of those that it was fitted on.

    Attributes
    ----------
    name
        What was fitted, such as ``"h.3 -> h.30"``.
    n, width
        How many samples it was fitted on, and of how many dimensions.
    r2, r2_fitted
        On samples left out of the fit, and on the same samples in the fit; ``None`` where that is known from
        the numbers of samples and dimensions alone.
    """

    name: str
    n: int
    width: int
    r2: float | None = None
    r2_fitted: float | None = None


def warn_of_noise(fits: Sequence[NoisyFit], n_fits: int) -> None:
    """Warn once, with `InputWarning`, of all fits of a call that follow the noise of their samples."""
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
            f"follow noise: r2 of {worst.name} is {worst.r2:.2f} on samples left out of the fit, and "
            f"{worst.r2_fitted:.2f} on the same samples in it."
        )
    warn(f"{what} Use more samples or a ridge.")


def warn_of_same_sentences(fitted: Provenance, validation: Provenance, what: str, *, parts: bool) -> None:
    """Warn, with `InputWarning`, of maps that are judged on the sentences that they were fitted on.

    Parameters
    ----------
    fitted, validation
        Where the samples of a fit, and those that it is judged on, come from.
    what
        What was fitted, as the first words of the message.
    parts
        Whether only some samples count here. If the fit took only some too, they may well be others.
    """
    if parts and "rows" in fitted.details:
        return
    texts = (fitted.data or {}).get("corpus_fingerprint"), (validation.data or {}).get("corpus_fingerprint")
    same_texts = texts[0] is not None and texts[0] == texts[1]
    if same_texts or (fitted.examples is not None and fitted.examples == validation.examples):
        warn(
            f"{what} were fitted on the sentences of {validation.corpus} that they are judged on here, so "
            "r2 and predictions are better than on new text. Use other sentences, see Corpus.split."
        )
