"""Early-exit methods compared on the same examples and the same splits (Table 6).

In addition to the rule and the classifiers of the paper: the confidence exit of paper A and a fixed
layer, both calibrated to be right at least as often as the rule on the calibration examples; and an
oracle that exits where the prediction is made. And the rule under every reading of section 6.2, tested
against chance.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy.stats import norm
from studies import Model
from torch import Tensor
from tqdm.auto import tqdm

from exits.classifiers import ExitClassifiers
from exits.outcomes import (
    FEWEST_EXAMPLES,
    EvaluatedExits,
    ExampleSplit,
    evaluate_exits,
    first_exit,
    split_examples,
)
from matlens import InputError, Readout
from matlens.activations import Activations
from matlens.ffn import Clusters, ExitRule, Trace, ValueVectors, active_clusters, find_saturation
from matlens.lens import ExitConfidence, evaluate, exit_layers, thresholds
from matlens.linear import fit_stream
from matlens.models import ModelLayout
from matlens.parallel import Bar

RULE, PLACES = "sub-updates rule", "rule, equal places"
CLASSIFIERS = tuple(f"classifiers on {features}" for features in ("x", "o", "x + o"))
FIXED, ORACLE = "fixed layer", "oracle"
_STEPS = np.linspace(-0.112, 1.112, 613)  # of lam: at one end all examples exit at once, at the other none
_PER_DIMENSION = 2  # min training examples per dimension to fit maps


def classifier_sites(model: Model) -> list[str]:
    """Sites of `compare_exits`: layers, and inputs and outputs of each FFN."""
    layout = ModelLayout.from_model(model)
    sites = list(map(str, layout.stream))
    for layer in range(layout.n_layers):
        sites += [*_before_ffn(layout, layer), f"{ValueVectors(model).output_kind}.{layer}"]
    return list(dict.fromkeys(sites))


def _before_ffn(layout: ModelLayout, layer: int) -> list[str]:
    """Sites whose sum is the residual stream before an FFN; in parallel blocks as if attention came first."""
    return [f"mid.{layer}"] if "mid" in layout.kinds else [f"h.{layer}", f"attn_out.{layer}"]


class ExitComparison(NamedTuple):
    """Evaluation of all early-exit methods (Table 6), see `compare_exits`.

    Attributes
    ----------
    evaluated
        By method, its evaluation on each split.
    penalties
        By set of classifiers, how often each penalty was selected, over layers and splits.
    """

    evaluated: dict[str, list[EvaluatedExits]]
    penalties: dict[str, Counter[str]]


def compare_exits(
    model: Model,
    trace: Trace,
    clusters: Clusters,
    activations: Activations,
    *,
    seeds: int = 5,
    **options: Any,
) -> ExitComparison:
    """Evaluate all early-exit methods on one split per seed (Table 6, appendix A.5).

    Predictions made by attention count as events of their layer, like those made by the FFN. The rule is
    evaluated by ``sets`` and by ``places``, see `ExitRule`; `compare_readings` has its other readings. It
    learns from the training and calibration parts, as in the paper; its accuracy on the calibration part,
    which other methods have to reach, is that of a rule learned from the training part alone. Classifiers
    see the residual stream before the FFN, the FFN output, and their sum. ``mat`` is fitted on the training
    part, and skipped if that has fewer than two examples per dimension. ``options`` are those of
    `ExitClassifiers`.
    """
    activations.provenance.check_same(trace.provenance, ours="the activations", theirs="the trace")
    if trace.examples.fingerprint != activations.examples.fingerprint:
        raise InputError(
            "activations must be of the examples of the trace, got others. Collect them at `trace.examples`."
        )
    saturation, right = find_saturation(trace), (trace.after == trace.final[:, None]).numpy()
    made_at = saturation.layer.numpy()
    active, features = active_clusters(trace, clusters), classifier_features(model, activations)
    rules = {
        RULE: partial(_by_rule, ExitRule(), active, made_at),
        PLACES: partial(_by_rule, ExitRule(overlap="places"), active, made_at),
    }
    evaluated = defaultdict[str, list[EvaluatedExits]](list)
    penalties = defaultdict[str, Counter[str]](Counter)
    by_confidence = _ConfidenceExits(Readout(model), activations)
    for seed in Bar(range(seeds), desc="splits", unit="split"):
        split = split_examples(len(trace), seed=seed)
        train, calibration, test = split
        accuracy = float(right[calibration, rules[RULE](train, calibration)].mean())
        exits = {name: rule(np.concatenate([train, calibration]), test) for name, rule in rules.items()}
        for name, of_layers in features.items():
            classifiers = ExitClassifiers(**options, seed=seed).fit(of_layers[:-1], made_at, split)
            signals = classifiers.signals(of_layers[:-1], test)
            exits[name] = first_exit(np.pad(signals, ((0, 0), (0, 1))))  # the last layer always exits
            penalties[name].update(classifiers.penalties)
        exits[FIXED] = np.full(len(test), (right[calibration].mean(0) >= accuracy).argmax())
        exits[ORACLE] = made_at[test]
        for name, layers in exits.items():
            evaluated[name].append(evaluate_exits(layers, right[test]))
        for name, of_split in by_confidence.evaluated(split, accuracy):
            evaluated[name].append(of_split)
    return ExitComparison(dict(evaluated), dict(penalties))


def classifier_features(model: Model, activations: Activations) -> dict[str, list[Float[np.ndarray, "n d"]]]:
    """Features: the residual stream before each FFN, its output, and their sum."""
    layout = ModelLayout.from_model(model)
    layers = range(layout.n_layers)
    x = [
        torch.stack([activations[site] for site in _before_ffn(layout, layer)]).sum(0).numpy()
        for layer in layers
    ]
    kind = ValueVectors(model).output_kind
    o = [activations[f"{kind}.{layer}"].numpy() for layer in layers]
    total = [before + written for before, written in zip(x, o, strict=True)]
    return dict(zip(CLASSIFIERS, (x, o, total), strict=True))


def _by_rule(
    rule: ExitRule,
    active: Int[np.ndarray, "n n_layers k"],
    made_at: Int[np.ndarray, " n"],
    training_rows: Int[np.ndarray, " m"],
    rows: Int[np.ndarray, " r"],
) -> Int[np.ndarray, " r"]:
    return first_exit(rule.fit(active, made_at, training_rows).signals(active, rows))


class _ConfidenceExits:
    """The confidence exit of paper A by ``id``, and by ``mat`` if there are enough examples to fit it."""

    def __init__(self, readout: Readout, activations: Activations) -> None:
        self._readout, self._activations = readout, activations
        self._layers = range(1, activations.provenance.identity.n_layers + 1)
        self._positions = torch.from_numpy(activations.examples.positions)
        self._id = self._read([activations[layer] for layer in self._layers])
        n_train, d_model = len(split_examples(activations.n_rows).train), activations[0].shape[1]
        self._fits_maps = n_train >= _PER_DIMENSION * d_model
        if not self._fits_maps:
            tqdm.write(
                f"mat is skipped: {n_train} training examples for {d_model} dimensions. Expected "
                f"{_PER_DIMENSION * d_model} or more.",
                file=sys.stderr,
            )

    def evaluated(self, split: ExampleSplit, accuracy: float) -> Iterator[tuple[str, EvaluatedExits]]:
        """Evaluate on the test part, with the smallest ``lam`` accurate on the calibration part."""
        rows = np.concatenate([split.calibration, split.test])
        confidences = {"id": ExitConfidence(*(of_id[rows] for of_id in self._id))}
        if self._fits_maps:
            last = self._layers[-1]
            samples = {f"h.{layer}": self._activations[layer][split.train] for layer in self._layers}
            maps = fit_stream([samples], [(layer, last) for layer in self._layers[:-1]])
            mapped = [linear(self._activations[linear.source][rows]) for linear in maps]
            confidences["mat"] = self._read([*mapped, self._activations[last][rows]])
        mean_length = float((self._positions[split.train] + 1).double().mean())
        calibration, test = slice(len(split.calibration)), slice(len(split.calibration), None)
        positions = self._positions[rows]
        for name, (difference, right) in confidences.items():
            calibrated = ExitConfidence(difference[calibration], right[calibration])
            lam = least_lam(calibrated, positions[calibration], mean_length, accuracy)
            layers = exit_layers(difference[test], thresholds(positions[test], lam, mean_length))
            yield f"confidence, {name}", evaluate_exits(layers.numpy() - 1, right[test].numpy())

    def _read(self, vectors: Sequence[Float[Tensor, "n d_model"]]) -> ExitConfidence:
        layers = dict(enumerate(vectors))
        evaluated = evaluate(self._readout, vectors[-1], layers, confidence=True, progress=False)
        return ExitConfidence.from_evaluations(evaluated.values())


def least_lam(
    confidence: ExitConfidence, positions: Int[Tensor, " n"], mean_length: float, wanted: float
) -> float:
    """The smallest ``lam``, in steps of 0.002, with at least the given Precision@1."""
    for lam in _STEPS:
        left = exit_layers(confidence.difference, thresholds(positions, lam, mean_length))
        if float(confidence.right.gather(1, left[:, None] - 1).double().mean()) >= wanted:
            return float(lam)
    return float(_STEPS[-1])  # all layers are run, and all examples right


# Readings of the rule

BOTH, OF_FFNS = "FFN and attention", "FFN"
OVERLAPS: tuple[Any, ...] = ("sets", "places")
OTHERS: tuple[Any, ...] = ("later", "by-layer", "together")
EXIT_CLUSTERS = 200
"""How many clusters the rule compares unless another number is given, as in the authors' notebook."""


def compare_readings(trace: Trace, clusters: Sequence[Clusters], *, seed: int = 0) -> pd.DataFrame:
    """Evaluate the rule under every reading by cross-validation, against chance.

    Ten folds, so that every example is tested once. One row per reading; columns are ``clusters, overlap,
    others, events``, which identify the reading; ``accuracy``; ``chance``, of the same exit layers shuffled
    within each fold; ``above``, the accuracy minus chance; ``chance_sd``, the standard deviation of the
    accuracy under such shuffling; ``p``, two-sided, from a normal with that deviation; ``saved`` and
    ``saved_share``, over right examples; ``exited``, see `summarize_exits`; and ``n``, the number of
    examples. ``p`` is for one reading with its exits fixed: the folds share training examples, and a table
    of many readings needs a correction for multiple tests.
    """
    split_examples(len(trace))
    saturation, right = find_saturation(trace), (trace.after == trace.final[:, None]).numpy()
    made_at = saturation.layer.numpy()
    events = {BOTH: made_at, OF_FFNS: np.where(saturation.by_ffn.numpy(), made_at, -1)}
    parts = np.array_split(np.random.default_rng(seed).permutation(len(trace)), FEWEST_EXAMPLES)
    rows = []
    for each in clusters:
        active = active_clusters(trace, each)
        for overlap, others, (counted, layers) in itertools.product(OVERLAPS, OTHERS, events.items()):
            rule, evaluated = ExitRule(others=others, overlap=overlap), []
            for part in parts:
                exits = _by_rule(rule, active, layers, np.setdiff1d(np.arange(len(trace)), part), part)
                evaluated.append(evaluate_exits(exits, right[part]))
            reading = {"clusters": len(each), "overlap": overlap, "others": others, "events": counted}
            rows.append(reading | _pooled(evaluated, np.array(list(map(len, parts))), trace.n_layers))
    return pd.DataFrame(rows)


def _pooled(
    evaluated: Sequence[EvaluatedExits], sizes: Int[np.ndarray, " parts"], n_layers: int
) -> dict[str, float]:
    """Evaluation of all parts, with exits shuffled within each part."""
    per_layer, weights = pd.DataFrame(evaluated), sizes / sizes.sum()
    accuracy, chance, exited = (float(per_layer[name] @ weights) for name in ("accuracy", "chance", "exited"))
    chance_sd = float(np.sqrt(np.square(per_layer["chance_sd"] * weights).sum()))
    hits = per_layer["accuracy"] * weights
    saved = float((per_layer["saved"].fillna(0) * hits).sum() / hits.sum()) if hits.sum() else math.nan
    return {
        "accuracy": accuracy, "chance": chance, "above": accuracy - chance, "chance_sd": chance_sd,
        "p": float(2 * norm.sf(abs(accuracy - chance) / chance_sd)) if chance_sd else 1.0,
        "saved": saved, "saved_share": saved / n_layers, "exited": exited,
        "n": int(sizes.sum()),
    }  # fmt: skip
