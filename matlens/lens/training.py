"""Maps that are trained on what the read-out makes of them: steps down ``KL(delta(h^L) || delta(.))``.

The dear part of a step is the read-out of every row over the whole vocabulary. `polish` reads out a sample of
it: each token has a chance that grows with the probability it gets somewhere, tokens with much of it are
always in, and a token that is in counts as one over its chance, so that the normaliser of either distribution
is met without bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.errors import Between, InputError, NonNegative, PositiveInt, Seed, check_int, checked
from matlens.lens.maps import LayerMap, Standardisation
from matlens.models.readout import Readout, check_vectors
from matlens.numerics.precision import in_float64
from matlens.numerics.probabilities import kl_divergence, log_softmax
from matlens.parallel import Bar

PILOT = 512  # rows read out over the whole vocabulary before the first step
_FLOOR = 1e-3  # of the mean weight: the least of a token, so that each can be drawn
_SCALES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
# A step's matrix is brought near an orthogonal one by so many odd polynomials of these coefficients, which
# take singular values from 0.01 to 1 into 0.7 to 1.2 (Jordan, "Muon", 2024).
_QUINTIC, _ROUNDS = (3.4445, -4.7750, 2.0315), 5
TOKENS, STEPS, BATCH = 2048, 48, 1024
_FEWEST = 128  # rows of a step, where there are few
TUNED = 120_000  # rows that the tuned lens is trained on at most, counted as often as they are seen


@checked
@dataclass(frozen=True)
class VocabularySample:
    """Chances by which tokens are drawn, so that a few thousand stand for all.

    Attributes
    ----------
    chances
        The chance of each token, more than 0 and at most 1.
    """

    chances: Float[Tensor, " d_vocab"]

    @classmethod
    def from_weights(cls, weights: Float[Tensor, " d_vocab"], n: PositiveInt) -> VocabularySample:
        """Chances that are in proportion to weights, 1 at most, and ``n`` tokens in the mean.

        Parameters
        ----------
        weights
            How much of each token there is, at least 0 and not all of them.
        n
            How many tokens are drawn in the mean; all are where there are no more.
        """
        if not bool(weights.isfinite().all()) or not len(weights) or float(weights.min()) < 0:
            raise InputError("A weight of a token is negative or not finite. Expected numbers of at least 0.")
        if n >= len(weights) or not float(weights.max()) > 0:
            return cls(torch.ones_like(weights))
        weights = in_float64(weights)
        weights = weights + _FLOOR * weights.mean()
        certain = torch.zeros_like(weights, dtype=torch.bool)
        while True:  # tokens that are certain leave the rest to the others
            left = weights.masked_fill(certain, 0)
            chances = left * ((n - int(certain.sum())) / left.sum())
            if not bool((chances > 1).any()):
                return cls(chances.masked_fill(certain, 1).float().clamp(max=1))
            certain |= chances >= 1

    def draw(self, generator: torch.Generator) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
        """Tokens, and the logarithm of each one's chance, which is taken off its score."""
        tokens = (torch.rand(len(self.chances), generator=generator) < self.chances.cpu()).nonzero()[:, 0]
        return tokens, self.chances.cpu()[tokens].log()


@checked
def divergence(
    scores: Float[Tensor, "n k"], truth: Float[Tensor, "n k"], offset: Float[Tensor, " k"] | None = None
) -> Float[Tensor, " n"]:
    """``KL(p || q)`` of each row, of the distributions that scores give.

    Parameters
    ----------
    scores, truth
        Scores of ``q`` and of ``p``.
    offset
        Logarithms of the chances by which the tokens were drawn, where they are a sample.

    Raises
    ------
    InputError
        The shapes differ.
    """
    if scores.shape != truth.shape or (offset is not None and len(offset) != scores.shape[1]):
        raise InputError(
            f"Scores of the shapes {tuple(scores.shape)} and {tuple(truth.shape)} cannot be compared. "
            "Expected the same shape, and an offset for each token or none."
        )
    if offset is not None:
        scores, truth = scores - offset, truth - offset
    return kl_divergence(log_softmax(truth), log_softmax(scores))


@checked
def polish(
    readout: Readout,
    start: LayerMap,
    h: Float[Tensor, "n d_model"],
    last: Float[Tensor, "n d_model"],
    *,
    norm: Standardisation | None = None,
    tokens: int = TOKENS,
    steps: int = STEPS,
    batch: int = BATCH,
    rate: NonNegative = 0.03,
    seed: Seed = 0,
    progress: bool = False,
) -> LayerMap:
    """Improve a map by steps down the divergence of what is read out (definitions, section 9).

    A step changes the matrix as much in every direction: its gradient with momentum, with all singular
    values made equal. The intercept and a factor on the scores go by Adam.

    Parameters
    ----------
    readout
        The read-out of the model.
    start
        Where to start: the best closed form.
    h, last
        ``h^l`` and ``h^L``, row by row. No row is seen more than twice: few rows make smaller steps, of 128
        rows and more, and very few make fewer.
    norm
        What is done to ``h^l`` before the map.
    tokens
        How many tokens are read out at a step, in the mean.
    steps, batch, rate
        Number of steps, rows of each, and the first one's size: about what the singular values of the
        matrix change by. It falls to 0 in a straight line.
    seed
        Of the order of rows and of the tokens.
    progress
        Whether to show a bar.

    Raises
    ------
    InputError
        The rows are not two sets of as many finite vectors of the model's width, or a number is out of its
        range.
    """
    steps, batch = _check_rows(readout, h, last, steps, batch)
    rate, seed = rate, seed
    generator = torch.Generator().manual_seed(seed)
    trained = _Trained(readout, start, norm)
    pilot = torch.randperm(len(h), generator=generator)[:PILOT]
    with torch.no_grad():
        sample = VocabularySample.from_weights(trained.token_weights(h[pilot], last[pilot]), tokens)
    matrix, bias = trained.parts
    momentum = torch.zeros_like(matrix)
    groups: list[dict[str, Any]] = [{"params": [bias]}, {"params": [trained.log_scale], "lr": 0.01}]
    adam = torch.optim.Adam(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / steps)
    batches = list(_batches(len(h), steps, batch, generator))
    with readout.weights.constant():
        for step, rows in enumerate(Bar(batches, desc="polishing", disable=not progress)):
            drawn, offset = sample.draw(generator)
            matrix.grad = None
            adam.zero_grad()
            trained.loss(h[rows], last[rows], drawn, offset).backward()
            assert matrix.grad is not None
            momentum = 0.9 * momentum + matrix.grad
            with torch.no_grad():
                matrix -= rate * (1 - step / steps) * _orthogonal(matrix.grad + 0.9 * momentum)
            adam.step()
            schedule.step()
    return trained.result()


@checked
def scale_map(
    readout: Readout,
    start: LayerMap,
    h: Float[Tensor, "n d_model"],
    last: Float[Tensor, "n d_model"],
    *,
    norm: Standardisation | None = None,
    seed: Seed = 0,
) -> LayerMap:
    """The same map with the factor on its scores that makes the divergence least, of 0.4, 0.5 to 1.

    Parameters
    ----------
    readout, start, h, last, norm, seed
        See `polish`; a few hundred rows are drawn.

    Raises
    ------
    InputError
        As for `polish`.
    """
    _check_rows(readout, h, last, 1, 1)
    generator = torch.Generator().manual_seed(seed)
    pilot = torch.randperm(len(h), generator=generator)[:PILOT]
    trained = _Trained(readout, start, norm)
    with torch.no_grad():
        return replace(start, scale=trained.best_scale(h[pilot], last[pilot]))


@checked
def tune(
    readout: Readout,
    h: Float[Tensor, "n d_model"],
    last: Float[Tensor, "n d_model"],
    *,
    steps: PositiveInt = 250,
    passes: Annotated[float, Between(0, 1000)] | None = None,
    rate: NonNegative = 1.0,
    seed: Seed = 0,
    progress: bool = False,
) -> LayerMap:
    """Train ``h + A h + b`` from ``A = 0`` as the package tuned-lens does by default.

    Stochastic gradient descent with Nesterov's momentum of 0.9, weight decay of 0.001, gradients of at most 1
    in norm, and a rate that falls to 0 in a straight line. Gradients are bounded for the layer alone, where
    the package bounds those of all its layers together, and numbers are in float32, not bfloat16.

    Parameters
    ----------
    readout, h, last, seed, progress
        See `polish`.
    steps
        Number of steps.
    passes
        How many times each row is seen, which gives the rows of a step; by default twice, and less often
        where that were more than 120,000 rows.
    rate
        The first step's size, as the package counts it: momentum is not counted twice.

    Raises
    ------
    InputError
        As for `polish`.
    """
    passes = passes_for(len(h)) if passes is None else passes
    steps = max(1, min(steps, math.ceil(len(h) * passes)))
    rate, seed = rate, seed
    batch = max(1, math.ceil(len(h) * passes / steps))
    _check_rows(readout, h, last, 1, 1)
    generator = torch.Generator().manual_seed(seed)
    width = readout.d_model
    trained = _Trained(readout, LayerMap(torch.zeros(width, width), bias=torch.zeros(width)), residual=True)
    optimiser = torch.optim.SGD(trained.parts, lr=rate * 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    with readout.weights.constant():
        for rows in Bar(list(_batches(len(h), steps, batch, generator)), desc="tuning", disable=not progress):
            optimiser.zero_grad()
            trained.loss(h[rows], last[rows]).backward()
            torch.nn.utils.clip_grad_norm_(trained.parts, 1.0)
            optimiser.step()
            schedule.step()
    return trained.result()


class _Trained:
    """A map while it is trained, and what is read out through it."""

    def __init__(
        self,
        readout: Readout,
        start: LayerMap,
        norm: Standardisation | None = None,
        *,
        residual: bool = False,
    ) -> None:
        width, device = readout.d_model, readout.device
        bias = torch.zeros(width) if start.bias is None else start.bias
        weight = start.matrix(width)
        if tuple(weight.shape) != (width, width) or len(bias) != width:
            raise InputError(
                f"A map of the shape {tuple(weight.shape)} cannot be trained for vectors of {width} "
                "coordinates, the model's width. Is it of another model?"
            )
        self.readout, self.norm, self.residual = readout, norm, residual
        self.parts = [
            part.detach().to(device, torch.float32).clone().requires_grad_() for part in (weight, bias)
        ]
        self.log_scale = torch.tensor(math.log(start.scale), device=device, requires_grad=True)

    def scores(self, h: Tensor, tokens: Tensor | None = None) -> Tensor:
        h = h.to(self.readout.device, torch.float32)
        x = h if self.norm is None else self.norm(h)
        mapped = torch.nn.functional.linear(x, *self.parts)
        features = self.readout.features(x + mapped if self.residual else mapped)
        return self.log_scale.exp() * self.readout.token_scores(features, tokens)

    def loss(
        self, h: Tensor, last: Tensor, tokens: Tensor | None = None, offset: Tensor | None = None
    ) -> Tensor:
        with torch.no_grad():
            truth = self.readout.token_scores(self.readout.features(last), tokens)
        offset = None if offset is None else offset.to(truth.device)
        return divergence(self.scores(h, tokens), truth, offset).mean()

    def token_weights(self, h: Tensor, last: Tensor) -> Tensor:
        """How much of each token there is: the root mean square of its probability in either distribution."""
        squares = torch.zeros(self.readout.d_vocab, device=self.readout.device)
        for truth, scores in self._read(h, last):
            squares += truth.exp().square().sum(0) + log_softmax(scores).exp().square().sum(0)
        return squares.sqrt()

    def best_scale(self, h: Tensor, last: Tensor) -> float:
        """The factor on the scores that makes the divergence least, of those that are tried."""
        losses = torch.zeros(len(_SCALES), device=self.readout.device)
        for truth, scores in self._read(h, last):
            losses += torch.stack([divergence(scale * scores, truth).sum() for scale in _SCALES])
        return _SCALES[int(losses.argmin())] * float(self.log_scale.exp())

    def _read(self, h: Tensor, last: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(h), 64):
            part = slice(start, start + 64)
            yield self.readout.log_probs(last[part]), self.scores(h[part])

    def result(self) -> LayerMap:
        weight, bias = (part.detach().cpu() for part in self.parts)
        if self.residual:
            weight = weight + torch.eye(len(weight))
        if not bool(weight.isfinite().all() & bias.isfinite().all() & self.log_scale.isfinite()):
            raise InputError("The training has overflowed. Give a smaller rate.")
        return LayerMap(weight, bias=bias, scale=float(self.log_scale.detach().exp()))


def _orthogonal(gradient: Tensor) -> Tensor:
    """A matrix with the same singular vectors and singular values near 1."""
    a, b, c = _QUINTIC
    x = gradient / gradient.norm().clamp(min=1e-12)
    for _ in range(_ROUNDS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def _check_rows(readout: Readout, h: Tensor, last: Tensor, steps: int, batch: int) -> tuple[int, int]:
    """Refuse rows that do not belong together; how many steps there are of how many rows, see `steps_for`."""
    for vectors in (h, last):
        check_vectors(vectors, readout.d_model, n_axes=2)
    if len(h) != len(last) or not len(h):
        raise InputError(
            f"There are {len(h)} rows of the layer and {len(last)} of the last one. Expected as many of "
            "each, one or more."
        )
    steps = check_int(steps, "The number of steps", min=1)
    batch = check_int(batch, "The number of rows of a step", min=1)
    return steps_for(len(h), steps, batch)


def steps_for(n: int, steps: int, batch: int) -> tuple[int, int]:
    """How many steps of how many rows see no row more than twice: few rows, smaller steps before fewer."""
    batch = min(batch, max(_FEWEST, 2 * n // steps))
    return max(1, min(steps, 2 * n // batch)), batch


def passes_for(n: int) -> float:
    """How often `tune` sees each row: twice, or as often as makes `TUNED` rows."""
    return min(2.0, TUNED / max(1, n))


def _batches(n: int, steps: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of each step: all in a drawn order, again and again."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(order) < min(batch, n):
            order = torch.cat([order, torch.randperm(n, generator=generator)])
        yield order[:batch]
        order = order[batch:]
