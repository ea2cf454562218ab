"""Compare lenses of one model on one corpus: fitted on the same tokens, evaluated, and what each costs."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import collect
from matlens.activations.sinks import SinkWarning, sink_rows
from matlens.data.corpus import Corpus
from matlens.data.making import make_examples
from matlens.data.readers import is_masked
from matlens.errors import Between, InputError, NonNegativeInt, PositiveInt, Seed, checked, short, warn
from matlens.io.tables import result_row, result_table
from matlens.lens import trained
from matlens.lens.closed_forms import lens_least_squares
from matlens.lens.config import LensConfig, Method, layers_read, parse_methods, resolve_layers
from matlens.lens.early_exit import exit_sweep
from matlens.lens.evaluation import Member, report_table
from matlens.lens.lens import Lens
from matlens.lens.open_sets import EvaluationItem, evaluate_open_sets
from matlens.linear.maps import LinearMap
from matlens.metrics import Estimate
from matlens.models.readout import Readout
from matlens.numerics import in_float64
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


METHODS = (
    "id", "mat", "affine", "ridge-identity", "weighted", "normed", "normed+affine", "scaled", "polished"
)  # fmt: skip
"""What is compared by default; ``tuned`` and ``jacobian`` take minutes a layer."""


@checked
def default_methods(model: TransformerBridge) -> list[str]:
    """`METHODS` that a model's head allows."""
    standardises = trained.best_start(model) != "affine"
    return [name for name in METHODS if standardises or not name.startswith("normed")]


@dataclass(frozen=True)
class Comparison:
    """Tables of a comparison, and the lenses.

    Attributes
    ----------
    report
        See `report_table`.
    exits
        See `exit_sweep`.
    cosines
        See `cosine_table`; ``None`` without Jacobians.
    evaluations
        See `evaluate_open_sets`; ``None`` where none were given.
    members
        The lenses and what each took.
    origin
        What the values come from.
    """

    report: pd.DataFrame
    exits: pd.DataFrame
    cosines: pd.DataFrame | None
    evaluations: pd.DataFrame | None
    members: Mapping[str, Member]
    origin: Mapping[str, Any] = field(repr=False)


@checked
def compare_lenses(
    model: TransformerBridge,
    parts: tuple[Corpus, Corpus],
    folder: str | Path,
    *,
    methods: Sequence[Method] | None = None,
    layers: Sequence[int] | None = None,
    against: str | None = None,
    n_prompts: Annotated[int, Between(2)] = trained.PROMPTS,
    longest: PositiveInt = trained.LONGEST,
    evaluations: Mapping[str, Sequence[EvaluationItem]] | None = None,
    seed: Seed = 0,
    progress: bool = True,
) -> Comparison:
    """Fit lenses on one part of a corpus, and evaluate all on the same tokens of the other.

    Lenses are fitted at every token of the training sentences, or at their masks, and evaluated at one
    sampled token of each validation sentence, so that tokens are independent.

    Parameters
    ----------
    parts
        The training and the validation sentences, as `Corpus.split` gives them.
    folder
        Where vectors are written, which can be removed afterwards; an interrupted run resumes there.
    methods
        See `Lens.fit`; by default `default_methods` of the model.
    layers
        The layers, by default a sixth, a third, a half, two thirds and five sixths of the way.
    against
        The lens from which paired differences are taken, by default ``mat`` where it is there.
    n_prompts, longest
        Training sentences that Jacobians are taken on, the longest, and the tokens that they are cut to.
        Half of them fit one lens and half the other; the mean of both is evaluated.
    evaluations
        Open sets to read besides, see `read_evaluations`; for decoders.
    seed
        For sampled positions, and the samples and tokens that training draws.
    """
    configs = parse_methods(default_methods(model) if methods is None else methods)
    train_texts, validation_texts = (frozenset(part.sentences) for part in parts)
    if both := len(train_texts & validation_texts):
        warn(
            f"{both:,} of {len(validation_texts):,} validation sentences are training sentences too, so "
            "lenses look better than they are on new text. Use Corpus.split."
        )
    if against is None:
        against = "mat" if "mat" in configs else None
    elif against not in configs:
        raise InputError(f"against must be one of {short(list(configs))}, got {short(against)}.")
    masked, last = is_masked(model), int(model.cfg.n_layers)
    if masked and "jacobian" in configs:
        raise InputError("A masked-LM model has no Jacobian lens. Expected methods without 'jacobian'.")
    if layers is None:
        wanted = sorted({max(1, round(last * share / 6)) for share in range(1, 6)} - {last}) or [0]
    else:
        wanted = list(resolve_layers(layers, last))
    sites = layers_read(configs, wanted, last)
    place: Positions = "drawn" if masked else "all"
    train = collect(
        model, make_examples(model, parts[0], seed=seed), sites, positions=place,
        folder=Path(folder) / f"lens-rows-{'all' if len(sites) > last else '-'.join(map(str, wanted))}",
        progress=progress,
    )  # fmt: skip
    validation = collect(
        model, make_examples(model, parts[1], seed=seed), folder=Path(folder) / "lens-validation",
        progress=progress,
    )  # fmt: skip
    on_vectors = {name: config for name, config in configs.items() if name != "jacobian"}
    members = fit_members(model, train, on_vectors, wanted, seed=seed, progress=progress)
    cosines = None
    if "jacobian" in configs:
        *halves, members["jacobian"] = _jacobians(model, parts[0], wanted, n_prompts, longest, progress)
        cosines = _cosines(members, (halves[0], halves[1]), train)
    members = {name: members[name] for name in configs}
    lenses = {name: member.lens for name, member in members.items()}
    evaluated_at = [layer for layer in wanted if layer or "jacobian" not in configs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SinkWarning)
        sinks = sink_rows(validation)
    table = report_table(
        members, validation, layers=evaluated_at, sinks=sinks, progress=progress, against=against
    )
    exits = exit_sweep(lenses, validation, layers=evaluated_at, progress=progress)
    read = None
    if evaluations is not None:
        read = evaluate_open_sets(lenses, evaluations, layers=evaluated_at, progress=progress)
    details = {name: lens.provenance.details for name, lens in lenses.items()}
    origin = {
        **validation.provenance.to_json("model", "data"),
        "train": train.provenance.to_json("data", "positions"), "n_rows": train.n_rows,
        "strengths": {name: its["strengths"] for name, its in details.items() if "strengths" in its},
        "layers": wanted, "methods": list(configs), "seed": seed, "n_sinks": int(sinks.sum()),
    }  # fmt: skip
    if jacobian := details.get("jacobian"):
        origin |= {"n_prompts": jacobian["n_fitted"], "n_prompt_tokens": jacobian["n_tokens"]}
    return Comparison(table, exits, cosines, read, members, origin)


def fit_members(
    model: TransformerBridge,
    train: Activations,
    configs: Mapping[str, LensConfig | None],
    layers: Sequence[int],
    *,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Member]:
    """Fit lenses on the same vectors and measure what each takes.

    A lens is charged with all that it needs but for collecting: ``polished`` with the closed form that it
    starts from, and a closed form with the statistics that it shares with others.
    """
    readout, groups = Readout(model), dict[Any, list[LensConfig]]()
    for config in filter(None, configs.values()):
        groups.setdefault((config.standardise, config.weighted, config.sinks), []).append(config)
    fitted: dict[str, tuple[Lens, float]] = {}
    for group in Bar(list(groups.values()), desc="closed forms", disable=not progress):
        begin = time.process_time()
        statistics = lens_least_squares(model, train, group, layers=layers, progress=progress)
        shared = time.process_time() - begin
        for config in group:
            begin = time.process_time()
            ((name, maps),) = statistics.solve(config).items()
            lens = Lens(**vars(maps), readout=readout, model=model)
            fitted[name] = lens, shared + time.process_time() - begin
    for name in (name for name, config in configs.items() if config is None):
        begin = time.process_time()
        lens = Lens.fit(model, train, method=name, layers=layers, seed=seed, progress=progress)
        fitted[name] = lens, time.process_time() - begin
    members: dict[str, Member] = {}
    for name in configs:
        lens, seconds = fitted[name]
        flops = fit_flops(name, train.n_rows, readout) * len(layers)
        members[name] = Member(lens, seconds, flops) if flops else Member(lens)
    return members


@checked
def fit_flops(name: str, n: PositiveInt, readout: Readout) -> int:
    """Floating-point operations of the fit of one layer on ``n`` samples, counted from sizes."""
    d, vocabulary, pilot = readout.d_model, readout.d_vocab, min(trained.PILOT, n)
    if name == "id":
        return 0
    if name == "tuned":
        return training_flops(round(trained.passes_for(n) * n), d, vocabulary)
    flops = closed_form_flops(n, d)
    if name in ("scaled", "polished"):
        steps, batch = trained.steps_for(n, trained.STEPS, trained.BATCH)
        seen = steps * min(batch, n) if name == "polished" else 0
        tokens = min(trained.TOKENS, vocabulary)
        flops += training_flops(seen, d, tokens, pilot=pilot, d_vocab=vocabulary)
    return flops


def _jacobians(
    model: TransformerBridge, corpus: Corpus, layers: list[int], n: int, longest: int, progress: bool
) -> tuple[Lens, Lens, Member]:
    """Lenses of two halves of the prompts, and their mean, which has taken the time of both."""
    prompts = trained.longest_sentences(corpus, n - n % 2)
    if len(prompts) < 2:
        raise InputError("Jacobians are taken on two halves of the prompts. Expected two sentences or more.")
    begin = time.process_time()
    halves = [
        trained.fit_jacobian(
            model, replace(corpus, sentences=tuple(prompts[i::2])), longest=longest, progress=progress,
            layers=layers,
        )
        for i in (0, 1)
    ]  # fmt: skip
    seconds = time.process_time() - begin
    n_fitted, n_tokens = (
        [half.provenance.details[name] for half in halves] for name in ("n_fitted", "n_tokens")
    )
    share = n_fitted[0] / sum(n_fitted)
    provenance = halves[0].provenance.with_details(n_fitted=sum(n_fitted), n_tokens=sum(n_tokens))
    maps = {
        layer: LinearMap(
            share * halves[0].matrix(layer) + (1 - share) * halves[1].matrix(layer), None,
            f"h.{layer}", f"h.{model.cfg.n_layers}", provenance,
        )
        for layer in halves[0].layers
    }  # fmt: skip
    mean = replace(halves[0], maps=maps, provenance=provenance)
    parameters = sum(weight.numel() for weight in model.blocks.parameters() if weight.ndim == 2)
    flops = jacobian_flops(sum(n_tokens), int(model.cfg.d_model), parameters)
    first, second, lens = (Lens(**vars(of)).on(model) for of in (*halves, mean))
    return first, second, Member(lens, seconds, flops)


# Cosines of matrices


def _cosines(
    members: Mapping[str, Member], halves: tuple[Lens, Lens], train: Activations
) -> pd.DataFrame | None:
    """Cosines of the Jacobian lens and those in closed form; ``None`` where there is none of these."""
    plain: dict[str, Lens] = {name: members[name].lens for name in ("mat", "affine") if name in members}
    if not plain:
        return None
    first = torch.arange(train.n_rows) < train.n_rows // 2
    pairs = {"jacobian": halves}
    for name, lens in plain.items():
        one, other = (
            Lens.fit(lens.model, train, method=name, layers=lens.layers, rows=rows, progress=False)
            for rows in (first, ~first)
        )
        pairs[name] = one, other
    return cosine_table({**plain, "jacobian": members["jacobian"].lens}, pairs)


@checked
def cosine_table(
    lenses: Mapping[str, Lens], halves: Mapping[str, tuple[Lens, Lens]] | None = None
) -> pd.DataFrame:
    """Cosines of the lenses' matrices, layer by layer, and of two halves of each where these are given.

    A row of the method ``"mat and jacobian"`` is the cosine of their matrices; ``"halves of jacobian"``
    is that of two fits on half of the data each; and ``"ceiling of mat and jacobian"`` is the most that the
    first could be were both the same but for what such halves differ in: the geometric mean of both lenses'
    reliability, ``2 c / (1 + c)`` for a cosine ``c`` of halves (Spearman and Brown). Only lenses that map the
    stream as it is are comparable, those without a norm before.
    """
    if len(lenses) < 2 or any(lens.norm is not None for lens in lenses.values()):
        raise InputError("lenses must be two or more that map the stream as it is, without a norm before.")
    first = next(iter(lenses.values()))
    identity, width = first.provenance.identity, first.provenance.identity.d_model
    for lens in lenses.values():
        first.provenance.check_same(lens.provenance.identity, ours="the first lens", theirs="another lens")
    rows: list[dict[str, Any]] = []

    def add(method: str, layer: int, value: float) -> None:
        estimate = Estimate(value, float("nan"), float("nan"), width * width)
        rows.append(
            result_row(
                "lens_cosine", model=identity.name, corpus=first.provenance.corpus, method=method,
                layer=layer, target=identity.n_layers, metric="cosine", estimate=estimate,
            )
        )  # fmt: skip

    shared = sorted(set.intersection(*(set(lens.layers) for lens in lenses.values())))
    if not shared:
        raise InputError("The lenses have no layer in common. Expected one or more.")
    for layer in shared:
        matrices = {name: lens.matrix(layer) for name, lens in lenses.items()}
        reliability = {}
        for name, pair in (halves or {}).items():
            c = matrix_cosine(*(half.matrix(layer) for half in pair))
            reliability[name] = 2 * c / (1 + c) if c > 0 else 0.0
            add(f"halves of {name}", layer, c)
        for name, other in itertools.combinations(lenses, 2):
            add(f"{name} and {other}", layer, matrix_cosine(matrices[name], matrices[other]))
            if name in reliability and other in reliability:
                ceiling = (reliability[name] * reliability[other]) ** 0.5
                add(f"ceiling of {name} and {other}", layer, ceiling)
    return result_table(rows)


@checked
def matrix_cosine(first: Float[Tensor, "n d"], second: Float[Tensor, "n d"]) -> float:
    """Cosine of two matrices as long vectors; NaN where one is 0."""
    if first.shape != second.shape:
        raise InputError(f"first and second must have one shape, got {short(first)} and {short(second)}.")
    a, b = in_float64(first).flatten(), in_float64(second).flatten()
    return float((a @ b) / (a.norm() * b.norm()))


# Operations, counted from sizes


def closed_form_flops(n: int, d: int) -> int:
    """Floating-point operations of least squares for one layer: ``n`` samples factorised, and solved.

    Householder's ``QR`` of ``[x 1]`` with ``Q`` written out takes ``4 n d^2 - 4/3 d^3``, ``Q'y`` takes
    ``2 n d^2``, and solving the triangle ``d^3``.
    """
    return round(6 * n * d**2 - d**3 / 3) if n >= d else 6 * d * n**2


@checked
def training_flops(
    rows: NonNegativeInt,
    d: PositiveInt,
    tokens: PositiveInt,
    *,
    pilot: NonNegativeInt = 0,
    d_vocab: NonNegativeInt = 0,
) -> int:
    """Floating-point operations of steps down the divergence, over all steps of one layer.

    A sample is mapped, and its gradient goes back into the map: ``4 d^2``. It is read out, the gradient goes
    back through the read-out, and ``h^L`` is read out as well: ``6 d`` for each of ``tokens``. One of the
    ``pilot`` is mapped once and read out twice over the whole vocabulary.
    """
    return rows * (4 * d**2 + 6 * d * tokens) + pilot * (2 * d**2 + 4 * d * d_vocab)


def jacobian_flops(tokens: int, d: int, parameters: int, *, at_once: int = 8) -> int:
    """Floating-point operations of Jacobians, all layers: a backward pass through the blocks per dimension.

    ``parameters`` are those of the blocks' matrices. Each of ``at_once`` dimensions needs a copy of the
    forward pass. Attention's own products and norms, a few hundredths, are left out.
    """
    return 2 * tokens * parameters * (d + at_once)
