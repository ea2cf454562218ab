"""Trained lenses: steps down ``KL(delta(h^L) || delta(.))``, and the mean Jacobian.

The expensive part of a step is the read-out of every sample over the whole vocabulary. `polish` reads out a
sample of it: each token has a chance that grows with the probability it gets somewhere, tokens with much of
it are always in, and a token that is in counts as one over its chance, so that the normaliser of either
distribution is estimated without bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations
from matlens.data.corpus import Corpus, as_corpus
from matlens.errors import (
    Between,
    InputError,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Seed,
    checked,
    short,
)
from matlens.lens.config import LensConfig, closed_forms, resolve_layers
from matlens.lens.maps import LayerMap, LensParts, Standardisation
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.readout import Readout, check_vectors
from matlens.numerics.precision import in_float64
from matlens.numerics.probabilities import kl_divergence, log_softmax
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Trained = Literal["scaled", "polished", "tuned"]
ON_VECTORS: tuple[Trained, ...] = ("scaled", "polished", "tuned")
"""Lenses that are trained on vectors of the layer and of the last one."""
PILOT = 512  # samples read out over the whole vocabulary before the first step
_FLOOR = 1e-3  # of the mean weight: the least of a token, so that each can be drawn
_SCALES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
# A step's matrix is brought near an orthogonal one by so many odd polynomials of these coefficients, which
# take singular values from 0.01 to 1 into 0.7 to 1.2 (Jordan, "Muon", 2024).
_QUINTIC, _ROUNDS = (3.4445, -4.7750, 2.0315), 5
TOKENS, STEPS, BATCH = 2048, 48, 1024
_FEWEST = 128  # samples of a step, where there are few
TUNED = 120_000  # samples that the tuned lens sees at most, over all steps
SKIPPED = 16  # first positions that TransformerLens excludes, sinks among them
PROMPTS, LONGEST = 30, 128  # that Jacobians are taken on, and the tokens that each is cut to


@checked
@dataclass(frozen=True)
class VocabularySample:
    """Chances by which tokens are sampled, each more than 0 and at most 1."""

    chances: Float[Tensor, " d_vocab"]

    @classmethod
    def from_weights(cls, weights: Float[Tensor, " d_vocab"], n: PositiveInt) -> VocabularySample:
        """Chances in proportion to weights, 1 at most, with ``n`` tokens expected."""
        if not bool(weights.isfinite().all()) or not len(weights) or float(weights.min()) < 0:
            raise InputError("weights must be finite numbers of at least 0.")
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
        """Sampled tokens, and the logarithm of each one's chance, which is subtracted from its score."""
        tokens = (torch.rand(len(self.chances), generator=generator) < self.chances.cpu()).nonzero()[:, 0]
        return tokens, self.chances.cpu()[tokens].log()


@checked
def divergence(
    scores: Float[Tensor, "n k"], truth: Float[Tensor, "n k"], offset: Float[Tensor, " k"] | None = None
) -> Float[Tensor, " n"]:
    """``KL(p || q)`` of each row, for scores of ``q`` and of ``p`` (``truth``).

    ``offset`` has the logarithms of the chances by which tokens were sampled, if they were.
    """
    if scores.shape != truth.shape or (offset is not None and len(offset) != scores.shape[1]):
        raise InputError(
            f"scores, truth and offset must be of the same tokens, got {short(scores)} and {short(truth)}."
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
    tokens: PositiveInt = TOKENS,
    steps: PositiveInt = STEPS,
    batch: PositiveInt = BATCH,
    rate: NonNegative = 0.03,
    seed: Seed = 0,
) -> LayerMap:
    """Improve a map by steps down the divergence of what is read out (definitions, section 9).

    A step changes the matrix as much in every direction: its gradient with momentum, with all singular
    values made equal. The intercept and a factor on the scores go by Adam.

    Parameters
    ----------
    start
        The map to start from, the best closed form.
    h, last
        ``h^l`` and ``h^L``, row by row. No sample is seen more than twice: few samples make smaller steps.
    norm
        What is done to ``h^l`` before the map.
    tokens
        Expected number of tokens that are read out at a step.
    steps, batch, rate
        Number of steps, samples of each, and the first one's size: about what the singular values of the
        matrix change by. It falls to 0 linearly.
    """
    _check_pairs(readout, h, last)
    steps, batch = steps_for(len(h), steps, batch)
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
    with readout.weights.constant():
        for step, rows in enumerate(list(_batches(len(h), steps, batch, generator))):
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
    """The map with the factor on its scores that minimises the divergence, of 0.4, 0.5 to 1; see `polish`."""
    _check_pairs(readout, h, last)
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
) -> LayerMap:
    """Train ``h + A h + b`` from ``A = 0`` as the package tuned-lens does by default.

    Stochastic gradient descent with Nesterov's momentum of 0.9, weight decay of 0.001, gradients of at most 1
    in norm, and a rate that falls to 0 linearly. Gradients are bounded for the layer alone, where the package
    bounds those of all its layers together, and parameters are in float32, not bfloat16.

    Parameters
    ----------
    passes
        How often each sample is seen, which gives the samples of a step; by default twice, and less often
        where that were more than 120,000 samples.
    rate
        The first step's size, as the package counts it: momentum is not counted twice.
    """
    passes = passes_for(len(h)) if passes is None else passes
    steps = max(1, min(steps, math.ceil(len(h) * passes)))
    rate, seed = rate, seed
    batch = max(1, math.ceil(len(h) * passes / steps))
    _check_pairs(readout, h, last)
    generator = torch.Generator().manual_seed(seed)
    width = readout.d_model
    trained = _Trained(readout, LayerMap(torch.zeros(width, width), bias=torch.zeros(width)), residual=True)
    optimiser = torch.optim.SGD(trained.parts, lr=rate * 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    with readout.weights.constant():
        for rows in list(_batches(len(h), steps, batch, generator)):
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
        if len(weight) != width:
            raise InputError(f"The map is of {len(weight)} dimensions, the model of {width}: another model?")
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
        """Root of the summed squares of each token's probability in either distribution."""
        squares = torch.zeros(self.readout.d_vocab, device=self.readout.device)
        for truth, scores in self._read(h, last):
            squares += truth.exp().square().sum(0) + log_softmax(scores).exp().square().sum(0)
        return squares.sqrt()

    def best_scale(self, h: Tensor, last: Tensor) -> float:
        """The factor on the scores that minimises the divergence, of those tried."""
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


def _check_pairs(readout: Readout, h: Tensor, last: Tensor) -> None:
    for vectors in (h, last):
        check_vectors(vectors, readout.d_model, n_axes=2)
    if len(h) != len(last) or not len(h):
        raise InputError(f"h and last must be as many samples, one or more, got {len(h)} and {len(last)}.")


def steps_for(n: int, steps: int, batch: int) -> tuple[int, int]:
    """Steps and their samples so that none is seen more than twice: smaller steps before fewer."""
    batch = min(batch, max(_FEWEST, 2 * n // steps))
    return max(1, min(steps, 2 * n // batch)), batch


def passes_for(n: int) -> float:
    """How often `tune` sees each sample: twice, or as often as makes `TUNED` samples."""
    return min(2.0, TUNED / max(1, n))


def _batches(n: int, steps: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Samples of each step: all in a random order, again and again."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(order) < min(batch, n):
            order = torch.cat([order, torch.randperm(n, generator=generator)])
        yield order[:batch]
        order = order[batch:]


@checked
def best_start(model: TransformerBridge) -> str:
    """The closed form that ``scaled`` and ``polished`` start from: standardised if the head allows."""
    try:
        Standardisation.from_model(model)
    except InputError:
        return "affine"
    return "normed+affine"


def with_start(methods: Mapping[str, LensConfig | None], model: TransformerBridge) -> list[LensConfig]:
    """The closed forms in some methods, and the one that trained ones in them start from."""
    closed = {name: config for name, config in methods.items() if config is not None}
    if not {"scaled", "polished"}.isdisjoint(methods):
        closed |= closed_forms(best_start(model))
    return list(closed.values())


@checked
def train_maps(
    name: Trained,
    readout: Readout,
    rows: Activations,
    *,
    start: LensParts | None = None,
    layers: Sequence[int] | None = None,
    seed: Seed = 0,
    progress: bool = True,
) -> LensParts:
    """Train one map per layer on collected vectors. Several processes each train some of the layers.

    Parameters
    ----------
    name
        ``"scaled"``, see `scale_map`; ``"polished"``, see `polish`; ``"tuned"``, see `tune`.
    rows
        Vectors of the layers and of the last one.
    start
        The closed form that ``scaled`` and ``polished`` start from, see `best_start`.
    layers
        The layers, by default those of ``start``, or all but the last.
    """
    readout.check_same(rows.provenance, theirs="the rows")
    last = rows.provenance.identity.n_layers
    if name == "tuned":
        start = None
    elif start is None:
        raise InputError(f"{name!r} starts from a closed form: give start.")
    begin = {} if start is None else dict(start.maps)
    wanted = list(layers if layers is not None else begin or range(last))
    absent = [layer for layer in [*wanted, last] if f"h.{layer}" not in rows]
    absent += [layer for layer in wanted if begin and layer not in begin]
    if absent or not wanted:
        raise InputError(f"The rows lack the layers {short(absent)}. Collect these sites too.")
    norm = None if start is None else start.norm
    h_last = rows[last]
    fit: dict[str, Callable[[int], LayerMap]] = {
        "scaled": lambda layer: scale_map(readout, begin[layer], rows[layer], h_last, norm=norm, seed=seed),
        "polished": lambda layer: polish(readout, begin[layer], rows[layer], h_last, norm=norm, seed=seed),
        "tuned": lambda layer: tune(readout, rows[layer], h_last, seed=seed),
    }
    mine = wanted[parallel.rank() :: parallel.world_size()]
    fitted = {layer: fit[name](layer) for layer in Bar(mine, desc=name, disable=not progress)}
    maps = _merged(fitted, wanted) if parallel.world_size() > 1 else fitted
    provenance = rows.provenance.with_details(method=name, n_fitted=len(h_last), seed=seed)
    return LensParts(maps, name, provenance, norm)


def _merged(fitted: Mapping[int, LayerMap], wanted: Sequence[int]) -> dict[int, LayerMap]:
    """The maps of all layers, of which each process has fitted some."""
    parts: dict[str, Tensor] = {}
    for layer, of_layer in fitted.items():
        parts |= {f"{layer}.{name}": part for name, part in of_layer.parts.items()}
        parts[f"{layer}.scale"] = torch.tensor(of_layer.scale, dtype=torch.float64)
    whole = parallel.merge(parts, "maps that are trained")
    maps = {}
    for layer in wanted:
        prefix = f"{layer}."
        named = {key.removeprefix(prefix): part for key, part in whole.items() if key.startswith(prefix)}
        scale = float(named.pop("scale"))
        maps[layer] = LayerMap(**named, scale=scale)
    return maps


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

    For each prompt there is a backward pass for every few dimensions of ``h^L``: minutes per prompt on a CPU;
    all layers come from the same passes. Several processes divide the prompts.

    Parameters
    ----------
    prompts
        The texts, or a corpus. Those with no more than ``skip + 1`` tokens are excluded.
    layers
        Layers to fit, by default all; layer 0 is skipped.
    longest
        Tokens that a prompt is cut to.
    skip
        First positions of a prompt that are no sources.
    at_once
        Dimensions per pass; more take more memory and no more work.

    Raises
    ------
    InputError
        The model is no plain decoder, or no prompt is long enough.
    """
    from transformer_lens.tools.analysis import JacobianLens

    wanted = [layer for layer in resolve_layers(layers, int(model.cfg.n_layers)) if layer]
    if not wanted:
        raise InputError("layers must have one after a block: TransformerLens fits none of layer 0.")
    name = prompts.name if isinstance(prompts, Corpus) else "given sentences"
    lengths = [(text, min(longest, len(model.to_tokens(text)[0]))) for text in as_corpus(prompts).sentences]
    long = [(text, length) for text, length in lengths if length > skip + 1]
    if not long:
        raise InputError(f"prompts must have one of more than {skip + 1} tokens.")
    n_fitted, jacobians = 0, torch.zeros(len(wanted), int(model.cfg.d_model), int(model.cfg.d_model))
    if own := [text for text, _ in long[parallel.rank() :: parallel.world_size()]]:
        try:
            fitted = JacobianLens.fit(
                model, own, corpus=name, source_layers=[layer - 1 for layer in wanted], dim_batch=at_once,
                max_seq_len=longest, skip_first_positions=skip,
                show_progress=progress and parallel.is_main(),
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise InputError(f"TransformerLens cannot fit a Jacobian lens here: {error}") from error
        n_fitted = fitted.n_prompts
        jacobians = torch.stack([fitted.jacobians[layer - 1].cpu() for layer in wanted])
    if parallel.world_size() > 1:
        jacobians, n_fitted = _mean(jacobians, n_fitted)
    n_tokens = sum(length for _, length in long)
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


def _mean(means: Float[Tensor, "layers d d"], n: int) -> tuple[Float[Tensor, "layers d d"], int]:
    """The mean over the prompts of all processes, each of which counts once, and how many they are."""
    own = {"sums": (n * means.double())[None], "n": torch.tensor([n])}
    of_all = parallel.concatenate(own, "Jacobians")
    count = int(of_all["n"].sum())
    return (of_all["sums"].sum(0) / count).float(), count
