"""Additions to the lens report: tokens and operations of fits, cosines of matrices."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd
import torch
from jaxtyping import Float
from studies import LayerRow, Model, layer_table
from torch import Tensor

from matlens import Lens, LinearMap, make_examples
from matlens.data import Corpus
from matlens.data.overlap import fitted_on_any
from matlens.lens import trained
from matlens.metrics import Estimate
from matlens.numerics import in_float64

STEPS = 250  # of a tuned lens

# Jacobians


def fit_jacobians(
    model: Model, corpus: Corpus, layers: Sequence[int], n_prompts: int, longest: int
) -> tuple[tuple[Lens, Lens], Lens, float]:
    """Jacobian lenses of two halves of the longest sentences, their mean, and CPU seconds."""
    prompts = trained.longest_sentences(corpus.sentences, n_prompts - n_prompts % 2)
    begin = time.process_time()
    halves = [
        Lens.fit(
            model, replace(corpus, sentences=tuple(prompts[i::2])), method="jacobian", layers=layers,
            longest=longest, n_prompts=n_prompts,
        )
        for i in (0, 1)
    ]  # fmt: skip
    seconds = time.process_time() - begin
    return (halves[0], halves[1]), mean_jacobian(halves[0], halves[1]), seconds


def mean_jacobian(first: Lens, second: Lens) -> Lens:
    """The Jacobian lens of the prompts of both, each of which counts once."""
    n_fitted, n_tokens = (
        [lens.provenance.details[name] for lens in (first, second)] for name in ("n_fitted", "n_tokens")
    )
    share = n_fitted[0] / sum(n_fitted)
    provenance = first.provenance.with_details(
        n_fitted=sum(n_fitted), n_tokens=sum(n_tokens),
        **fitted_on_any([first.provenance, second.provenance]),
    )  # fmt: skip
    maps = {
        layer: LinearMap(
            share * first.matrix(layer) + (1 - share) * second.matrix(layer), None,
            f"h.{layer}", f"h.{first.n_layers}", provenance,
        )
        for layer in first.layers
    }  # fmt: skip
    return replace(first, maps=maps, provenance=provenance)


def fit_halves(
    model: Model, corpus: Corpus, methods: Sequence[str], layers: Sequence[int], seed: int
) -> dict[str, tuple[Lens, Lens]]:
    """Closed forms fitted on each half of the tokens of a corpus."""
    examples = make_examples(model, corpus, seed=seed)
    first = torch.arange(len(examples.tokens)) < len(examples.tokens) // 2
    one, other = (
        Lens.fit(model, examples, method=list(methods), layers=layers, rows=rows) for rows in (first, ~first)
    )
    return {name: (one[name], other[name]) for name in methods}


def cosine_table(lenses: Mapping[str, Lens], halves: Mapping[str, tuple[Lens, Lens]]) -> pd.DataFrame:
    """Cosines of the lenses' matrices by layer, and of two halves of each if given.

    The method ``"mat and jacobian"`` is the cosine of their matrices; ``"halves of jacobian"`` is that of two
    fits on half of the data each; and ``"ceiling of mat and jacobian"`` is the cosine to expect if both
    estimated the same matrix with the noise of such halves: the geometric mean of both lenses' reliability,
    ``2 c / (1 + c)`` for a cosine ``c`` of halves (Spearman and Brown).
    """
    first = next(iter(lenses.values()))
    identity, width = first.provenance.identity, first.provenance.identity.d_model
    for lens in lenses.values():
        first.provenance.check_same(lens.provenance.identity, ours="the first lens", theirs="another lens")
    rows = list[LayerRow]()

    def add(method: str, layer: int, value: float) -> None:
        rows.append((method, layer, "cosine", None, Estimate.without_interval(value, width * width)))

    for layer in sorted(set.intersection(*(set(lens.layers) for lens in lenses.values()))):
        matrices = {name: lens.matrix(layer) for name, lens in lenses.items()}
        reliability = {}
        for name, pair in halves.items():
            c = matrix_cosine(*(half.matrix(layer) for half in pair))
            reliability[name] = 2 * c / (1 + c) if c > 0 else 0.0
            add(f"halves of {name}", layer, c)
        for name, other in itertools.combinations(lenses, 2):
            add(f"{name} and {other}", layer, matrix_cosine(matrices[name], matrices[other]))
            if name in reliability and other in reliability:
                ceiling = (reliability[name] * reliability[other]) ** 0.5
                add(f"ceiling of {name} and {other}", layer, ceiling)
    table = layer_table("lens_cosine", identity.name, first.provenance.corpus, rows)
    return table.assign(target=identity.n_layers)


def matrix_cosine(first: Float[Tensor, "n d"], second: Float[Tensor, "n d"]) -> float:
    """Cosine of two flattened matrices; NaN if one is 0."""
    a, b = in_float64(first).flatten(), in_float64(second).flatten()
    return float((a @ b) / (a.norm() * b.norm()))


# Tokens and operations, counted from sizes


def seen_tokens(lens: Lens, n: int) -> int:
    """Tokens that a fit on ``n`` tokens reads; those of training steps if it has any."""
    if lens.method == "id":
        return 0
    if lens.method == "jacobian":
        return int(lens.provenance.details["n_tokens"])
    if lens.method == "polished":
        steps, batch = trained.steps_for(n, trained.STEPS, trained.BATCH)
        return steps * min(batch, n)
    if lens.method == "tuned":
        seen = math.ceil(trained.passes_for(n) * n)
        steps = min(STEPS, seen)
        return steps * math.ceil(seen / steps)
    return n


def flops_rows(report: pd.DataFrame, n: int, lenses: Mapping[str, Lens]) -> pd.DataFrame:
    """Table rows of floating-point operations of each lens per layer."""
    rows = report[report["metric"] == "seconds"].assign(metric="flops")
    return rows.assign(value=[fit_flops(lenses[name], n) for name in rows["method"]])


def fit_flops(lens: Lens, n: int) -> float:
    """Floating-point operations of the fit of one layer of a lens on ``n`` samples."""
    readout, name, seen = lens.on_readout, lens.method, seen_tokens(lens, n)
    d, vocabulary = readout.d_model, readout.d_vocab
    if name == "id":
        return 0
    if name == "jacobian":
        parameters = sum(weight.numel() for weight in lens.model.blocks.parameters() if weight.ndim == 2)
        return jacobian_flops(seen, d, parameters) / len(lens.layers)
    if name == "tuned":
        return training_flops(seen, d, vocabulary)
    flops = closed_form_flops(n, d)
    if name in ("scaled", "polished"):
        trained_on = seen if name == "polished" else 0
        tokens, pilot = min(trained.TOKENS, vocabulary), min(trained.PILOT, n)
        flops += training_flops(trained_on, d, tokens, pilot=pilot, d_vocab=vocabulary)
    return flops


def closed_form_flops(n: int, d: int) -> int:
    """Floating-point operations of least squares for one layer.

    Householder's ``QR`` of ``[x 1]`` with ``Q`` written out takes ``4 n d^2 - 4/3 d^3``, ``Q'y`` takes
    ``2 n d^2``, and solving the triangle ``d^3``.
    """
    return round(6 * n * d**2 - d**3 / 3) if n >= d else 6 * d * n**2


def training_flops(rows: int, d: int, tokens: int, *, pilot: int = 0, d_vocab: int = 0) -> int:
    """Floating-point operations of training the lens of one layer on KL.

    Per sample: ``4 d^2`` for the map and its gradient; ``6 d`` for each of ``tokens`` for the readout,
    its gradient, and the readout of ``h^L``. Each ``pilot`` sample is mapped once and read out twice over
    the whole vocabulary.
    """
    return rows * (4 * d**2 + 6 * d * tokens) + pilot * (2 * d**2 + 4 * d * d_vocab)


def jacobian_flops(tokens: int, d: int, parameters: int, *, at_once: int = trained.AT_ONCE) -> int:
    """Floating-point operations of Jacobians: one backward pass per dimension.

    ``parameters`` are those of the blocks' matrices. Each group of ``at_once`` dimensions needs a forward
    pass. Attention products and norms, a few percent, are not counted.
    """
    return 2 * tokens * parameters * (d + at_once)
