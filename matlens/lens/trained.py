"""Trained lenses: steps down ``KL(delta(h^L) || delta(.))``, and the mean Jacobian.

The expensive part of a step is the readout of every sample over the whole vocabulary. `polish` reads out a
sample of it: each token has a chance that grows with the probability it gets somewhere, tokens with much of
it are always in, and a token that is in counts as one over its chance, so that the normalizer of either
distribution is estimated without bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations
from matlens.data.corpus import Corpus
from matlens.data.making import make_examples
from matlens.data.overlap import fitted_on
from matlens.errors import InputError
from matlens.lens.closed_forms import fit_closed_forms
from matlens.lens.config import ENTRY_POINTS, LensConfig
from matlens.lens.maps import LensMaps, Standardisation
from matlens.linear.least_squares import warn_if_few
from matlens.linear.maps import LinearMap
from matlens.models.identity import Provenance
from matlens.models.readout import Readout, check_vectors
from matlens.numerics import in_float64, kl_divergence, log_softmax, recording_gradients, without_autocast
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PILOT = 512  # samples read out over the whole vocabulary before the first step
_FLOOR = 1e-3  # min weight of a token, relative to the mean, so that each can be sampled
_SCALES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
# A step's matrix is brought near an orthogonal one by so many odd polynomials of these coefficients, which
# take singular values from 0.01 to 1 into 0.7 to 1.2 (Jordan, "Muon", 2024).
_QUINTIC, _ROUNDS = (3.4445, -4.7750, 2.0315), 5
TOKENS, STEPS, BATCH = 2048, 48, 1024
_FEWEST = 128  # samples of a step, where there are few
TUNED = 120_000  # samples that the tuned lens sees at most, over all steps
SKIPPED = 16  # initial positions that TransformerLens excludes, such as sinks
PROMPTS, LONGEST = 30, 128  # that Jacobians are taken on, and the tokens that each is cut to
AT_ONCE = 8  # dimensions per backward pass; more would need more memory


def token_chances(weights: Float[Tensor, " d_vocab"], n: int) -> Float[Tensor, " d_vocab"]:
    """Chances in proportion to weights, more than 0 and at most 1, with ``n`` tokens expected."""
    if n >= len(weights) or not float(weights.max()) > 0:
        return torch.ones_like(weights)
    weights = in_float64(weights)
    weights = weights + _FLOOR * weights.mean()
    certain = torch.zeros_like(weights, dtype=torch.bool)
    while True:  # tokens that are certain leave the rest to the others
        left = weights.masked_fill(certain, 0)
        chances = left * ((n - int(certain.sum())) / left.sum())
        if not bool((chances > 1).any()):
            return chances.masked_fill(certain, 1).float().clamp(max=1)
        certain |= chances >= 1


def draw_tokens(
    chances: Float[Tensor, " d_vocab"], generator: torch.Generator
) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
    """Sample tokens, with the log-probabilities that correct their scores."""
    tokens = (torch.rand(len(chances), generator=generator, dtype=torch.float32) < chances).nonzero()[:, 0]
    return tokens, chances[tokens].log()


def divergence(
    scores: Float[Tensor, "n k"], truth: Float[Tensor, "n k"], offset: Float[Tensor, " k"] | float = 0.0
) -> Float[Tensor, " n"]:
    """``KL(p || q)`` of each row, for scores of ``q`` and of ``p`` (``truth``).

    ``offset`` has the log-probabilities of sampled tokens.
    """
    return kl_divergence(log_softmax(truth - offset), log_softmax(scores - offset))


class LayerTraining:
    """A map ``h^l -> h^L`` in training, with its readout.

    It begins with the map ``start``, by default 0, and ``scale``, the factor on its scores.
    """

    @recording_gradients()
    def __init__(
        self,
        readout: Readout,
        h: Float[Tensor, "n d_model"],
        last: Float[Tensor, "n d_model"],
        *,
        start: LinearMap | None = None,
        scale: float = 1.0,
        norm: Standardisation | None = None,
        seed: int = 0,
    ) -> None:
        width, device = readout.d_model, readout.device
        for vectors in (h, last):
            check_vectors(vectors, width)
        if len(h) != len(last) or not len(h):
            raise InputError(f"h and last must be as many samples, one or more, got {len(h)}, {len(last)}.")
        zeros = torch.zeros(width + 1, width, dtype=torch.float32)
        weight, bias = zeros[:-1], zeros[-1]
        if start is not None:
            weight, bias = start.matrix, bias if start.bias is None else start.bias
        self.readout, self.h, self.last, self.norm = readout, h, last, norm
        self.weight, self.bias = (
            part.detach().to(device, torch.float32).clone().requires_grad_() for part in (weight, bias)
        )
        self.log_scale = torch.tensor(math.log(scale), dtype=torch.float32, device=device, requires_grad=True)
        self.residual = False  # whether the map is added to the vectors
        self.generator = torch.Generator().manual_seed(seed)

    @without_autocast()
    def rescale(self) -> None:
        """Find the factor on the scores that minimizes the divergence, of 0.4, 0.5 to 1."""
        with torch.no_grad():
            losses = torch.zeros(len(_SCALES), dtype=torch.float32, device=self.readout.device)
            for truth, scores in self._pilot():
                losses += torch.stack([divergence(scale * scores, truth).sum() for scale in _SCALES])
            self.log_scale += math.log(_SCALES[int(losses.argmin())])

    @recording_gradients()
    @without_autocast()
    def polish(
        self, *, steps: int = STEPS, batch: int = BATCH, tokens: int = TOKENS, rate: float = 0.03
    ) -> None:
        """Minimize the KL divergence of the readout by steps on samples of the vocabulary.

        A step changes the matrix as much in every direction: its gradient with momentum, with all singular
        values made equal. The intercept and a factor on the scores go by Adam. ``rate`` is about what the
        singular values of the matrix change by at the first step; it falls to 0 linearly.
        """
        steps, batch = steps_for(len(self.h), steps, batch)
        with torch.no_grad():  # the chance of a token grows with its probability in either distribution
            squares = torch.zeros(self.readout.d_vocab, dtype=torch.float32, device=self.readout.device)
            for truth, scores in self._pilot():
                squares += truth.exp().square().sum(0) + log_softmax(scores).exp().square().sum(0)
            chances = token_chances(squares.sqrt().cpu(), tokens)
        momentum = torch.zeros_like(self.weight)
        groups: list[dict[str, Any]] = [{"params": [self.bias]}, {"params": [self.log_scale], "lr": 0.01}]
        adam = torch.optim.Adam(groups, lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / steps)
        for step, rows in enumerate(list(_batches(len(self.h), steps, batch, self.generator))):
            self.weight.grad = None
            adam.zero_grad()
            self._loss(rows, *draw_tokens(chances, self.generator)).backward()
            assert self.weight.grad is not None
            momentum = 0.9 * momentum + self.weight.grad
            with torch.no_grad():
                change = _orthogonal(self.weight.grad + 0.9 * momentum)
                self.weight -= rate * (1 - step / steps) * change
            adam.step()
            schedule.step()

    @recording_gradients()
    @without_autocast()
    def tune(self, *, steps: int = 250, rate: float = 1.0, batch: int | None = None) -> None:
        """Train ``h + A h + b`` from ``A = 0`` as the package tuned-lens does by default.

        Stochastic gradient descent with Nesterov's momentum of 0.9, weight decay of 0.001, gradients of at
        most 1 in norm, and a rate that falls to 0 linearly; ``rate`` is the first step's as the package
        counts it, where momentum is not counted twice. Gradients are bounded for the layer alone, where the
        package bounds those of all its layers together, and parameters are in float32, not bfloat16.
        ``batch`` is the samples of a step, by default few enough that `passes_for` holds.
        """
        n, parts = len(self.h), [self.weight, self.bias]
        self.residual = True
        if batch is None:
            steps = max(1, min(steps, math.ceil(n * passes_for(n))))
            batch = max(1, math.ceil(n * passes_for(n) / steps))
        optimizer = torch.optim.SGD(parts, lr=rate * 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for rows in list(_batches(n, steps, batch, self.generator)):
            optimizer.zero_grad()
            self._loss(rows).backward()
            torch.nn.utils.clip_grad_norm_(parts, 1.0)
            optimizer.step()
            schedule.step()

    def result(self) -> dict[str, Tensor]:
        """Weight, bias and scale."""
        weight = self.weight
        if self.residual:
            weight = weight + torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        parts = {"weight": weight, "bias": self.bias, "scale": self.log_scale.exp()}
        if not all(bool(part.isfinite().all()) for part in parts.values()):
            raise InputError("Training diverged. Use a smaller rate.")
        return {name: part.detach().cpu() for name, part in parts.items()}

    def _scores(self, h: Tensor, tokens: Tensor | None = None) -> Tensor:
        h = h.to(self.readout.device, torch.float32)
        x = h if self.norm is None else self.norm(h)
        mapped = torch.nn.functional.linear(x, self.weight, self.bias)
        approximation = x + mapped if self.residual else mapped
        return self.log_scale.exp() * self.readout.logits(approximation, tokens=tokens, gradients=True)

    def _loss(self, rows: Tensor, tokens: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            truth = self.readout.logits(self.last[rows], tokens=tokens, gradients=True)
        scores = self._scores(self.h[rows], tokens)
        return divergence(scores, truth, 0.0 if offset is None else offset.to(truth.device)).mean()

    def _pilot(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The model's log-probabilities and the map's scores of a few samples."""
        for rows in torch.randperm(len(self.h), generator=self.generator)[:PILOT].split(64):
            yield self.readout.log_probs(self.last[rows]), self._scores(self.h[rows])


def _orthogonal(gradient: Tensor) -> Tensor:
    """A matrix with the same singular vectors and singular values near 1."""
    a, b, c = _QUINTIC
    x = gradient / gradient.norm().clamp(min=1e-12)
    for _ in range(_ROUNDS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


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


def best_start(model: TransformerBridge) -> LensConfig:
    """The closed form that ``scaled`` and ``polished`` start from."""
    try:
        Standardisation.from_model(model)
    except InputError:
        return LensConfig(intercept=True)
    return LensConfig(standardise=True, intercept=True)


def fit_on_vectors(
    name: str,
    readout: Readout,
    model: TransformerBridge,
    vectors: Activations,
    *,
    layers: Sequence[int],
    seed: int = 0,
    progress: bool = True,
) -> LensMaps:
    """Fit a lens that needs vectors: trained, or a method of another package.

    Several processes each train some of the layers.
    """
    details = {"method": name, "n_fitted": vectors.n_rows, "seed": seed, **fitted_on(vectors.examples)}
    provenance = vectors.provenance.with_details(**details)
    if name not in TRAINED:
        (entry,) = entry_points(group=ENTRY_POINTS, name=name)
        maps = entry.load()(model, vectors, layers=layers, seed=seed, progress=progress)
        return LensMaps(maps, name, provenance)
    readout.check_same(vectors.provenance, theirs="the activations")
    start = None
    if name != "tuned":
        config = best_start(model)
        closed = fit_closed_forms(model, vectors, [config], layers=layers, progress=progress)
        start = closed[config.name]
    else:
        warn_if_few(vectors.n_rows, readout.d_model)
    norm, last = None if start is None else start.norm, f"h.{vectors.provenance.identity.n_layers}"
    parts: dict[str, Tensor] = {}
    mine = layers[parallel.rank() :: parallel.world_size()]
    for layer in Bar(mine, desc=name, disable=not progress):
        begin = None if start is None else start.maps[layer]
        training = LayerTraining(readout, vectors[layer], vectors[last], start=begin, norm=norm, seed=seed)
        TRAINED[name](training)
        parts |= {f"{layer}.{part}": values for part, values in training.result().items()}
    parts = parallel.merge(parts, "maps that are trained")
    maps = {
        layer: LinearMap(parts[f"{layer}.weight"], parts[f"{layer}.bias"], f"h.{layer}", last, provenance)
        for layer in layers
    }
    scales = {layer: float(parts[f"{layer}.scale"]) for layer in layers}
    return LensMaps(maps, name, provenance, norm, scales)


TRAINED: dict[str, Callable[[LayerTraining], None]] = {
    "scaled": LayerTraining.rescale, "polished": LayerTraining.polish, "tuned": LayerTraining.tune,
}  # fmt: skip


def longest_sentences(sentences: Sequence[str], n: int) -> list[str]:
    """The sentences with the most words, which Jacobians are taken on."""
    return sorted(sentences, key=lambda text: (-len(text.split()), text))[:n]


@recording_gradients()
def fit_jacobian(
    model: TransformerBridge,
    corpus: Corpus,
    *,
    layers: Sequence[int],
    n_prompts: int = PROMPTS,
    longest: int = LONGEST,
    skip: int = SKIPPED,
    progress: bool = True,
) -> LensMaps:
    """Fit a Jacobian lens by TransformerLens; processes divide the prompts.

    For each prompt there is a backward pass for every few dimensions of ``h^L``: minutes per prompt on a CPU;
    all layers come from the same passes.

    Parameters
    ----------
    n_prompts, longest
        How many of the longest sentences are prompts, and the tokens that each is cut to. Those with no more
        than ``skip + 1`` tokens are excluded.
    skip
        Number of initial positions excluded as sources.
    """
    from transformer_lens.tools.analysis import JacobianLens

    layers = [layer for layer in layers if layer]
    if not layers:
        raise InputError("layers must have a layer above 0: TransformerLens does not fit layer 0.")
    prompts = longest_sentences(corpus.sentences, n_prompts)
    if model.cfg.default_prepend_bos and (bos := model.tokenizer.bos_token):
        prompts = [text.removeprefix(bos) for text in prompts]  # which model.to_tokens adds
    lengths = [(text, min(longest, len(model.to_tokens(text)[0]))) for text in prompts]
    long = [(text, length) for text, length in lengths if length > skip + 1]
    if not long:
        raise InputError(f"corpus must have a sentence of more than {skip + 1} tokens, got none.")
    n_fitted, jacobians = (
        0,
        torch.zeros(len(layers), int(model.cfg.d_model), int(model.cfg.d_model), dtype=torch.float32),
    )
    if own := [text for text, _ in long[parallel.rank() :: parallel.world_size()]]:
        try:
            fitted = JacobianLens.fit(
                model, own, corpus=corpus.name, source_layers=[layer - 1 for layer in layers],
                dim_batch=AT_ONCE, max_seq_len=longest, skip_first_positions=skip,
                show_progress=progress and parallel.is_main(),
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise InputError(f"TransformerLens cannot fit a Jacobian lens here: {error}") from error
        n_fitted = fitted.n_prompts
        jacobians = torch.stack([fitted.jacobians[layer - 1].cpu() for layer in layers])
    if parallel.world_size() > 1:  # the mean over all prompts, each of which counts once
        sums = {"sums": (n_fitted * jacobians.double())[None], "n": torch.tensor([n_fitted])}
        of_all = parallel.concatenate(sums, "Jacobians")
        n_fitted = int(of_all["n"].sum())
        jacobians = (of_all["sums"].sum(0) / n_fitted).float()
    provenance = Provenance.from_model(
        model,
        data={"corpus": corpus.name, "n": n_fitted},
        details={
            "method": "jacobian", "n_fitted": n_fitted, "n_tokens": sum(length for _, length in long),
            "longest": longest, "skip": skip, **fitted_on(make_examples(model, [text for text, _ in long])),
        },
    )  # fmt: skip
    maps = {
        layer: LinearMap(jacobian.clone(), None, f"h.{layer}", f"h.{model.cfg.n_layers}", provenance)
        for layer, jacobian in zip(layers, jacobians, strict=True)
    }
    return LensMaps(maps, "jacobian", provenance)
