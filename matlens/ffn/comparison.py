"""All ways of leaving early, on the same examples and over the same splits (Table 6).

Beside the rule and the classifiers of the paper stand the confidence exit of paper A and a fixed layer, both
set on the calibration examples so that there they are right at least as often as the rule is; the rule's own
layers dealt out at random; and leaving where the prediction is made, which no method can know.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from matlens.activations import Activations
from matlens.errors import InputError
from matlens.evaluation import taking
from matlens.exits import Confidence, confidences, exit_layers, least_lam, thresholds
from matlens.ffn.classifiers import FOLDS, LASSO, RIDGE, STRENGTHS, Classifiers
from matlens.ffn.clusters import Clusters
from matlens.ffn.events import saturation
from matlens.ffn.exits import (
    Judged,
    OverlapRule,
    active_clusters,
    by_chance,
    judge,
    leaving,
    parts,
)  # fmt: skip
from matlens.ffn.trace import Trace, before_ffn
from matlens.fitting import fit_samples
from matlens.readout import Readout
from matlens.sites import Site, anatomy

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

RULE, BY_LAYER = "sub-updates rule", "rule, others by layer"
EITHER, CHANCE = "rule, attention's too", "rule's layers at random"
FIXED, ORACLE = "fixed layer", "where it is made"
_WRITTEN = "ffn_out"
_ENOUGH = 2  # samples for each dimension that maps are fitted on


def wanted_sites(model: TransformerBridge) -> list[str]:
    """Sites that `compare` has to have: the stream, what is before each FFN, and what each FFN writes."""
    found = anatomy(model)
    inside = [[*before_ffn(model, layer), str(Site(_WRITTEN, layer))] for layer in range(found.n_layers)]
    return list(dict.fromkeys([*map(str, found.stream), *(site for sites in inside for site in sites)]))


class Compared(NamedTuple):
    """What `compare` has found.

    Attributes
    ----------
    judged
        By method, one for each split.
    penalties
        By classifiers, how often each penalty was chosen, over layers and splits.
    """

    judged: dict[str, list[Judged]]
    penalties: dict[str, Counter[str]]


def compare(
    model: TransformerBridge,
    trace: Trace,
    clusters: Clusters,
    activations: Activations,
    *,
    seeds: int = 5,
    strengths: Sequence[float] = STRENGTHS,
    kinds: Sequence[int] = (RIDGE, LASSO),
    folds: int = FOLDS,
    progress: bool = True,
) -> Compared:
    """Judge every way of leaving, once for each seed of the split.

    Events are those of FFNs: a prediction that attention makes counts as no event, but for
    ``rule, attention's too``, which takes it for one of that layer. The rule learns from the training and the
    calibration part, as in the paper; from the training part alone for the accuracy that others have to reach
    on the calibration part. ``mat`` is fitted on the training part, and left out where that has fewer than
    two examples for each dimension.

    Parameters
    ----------
    model, trace, clusters
        The model, what its FFNs do to the predictions of the examples, and the clusters of its value vectors.
    activations
        `wanted_sites` at the same examples.
    seeds
        How many splits, from seed 0 on.
    strengths, kinds, folds
        See `Classifiers`.

    Raises
    ------
    InputError
        The activations are of other examples or another model, or there are fewer than 10 examples.
    """
    _require_same(trace, activations)
    made, right = saturation(trace), (trace.after == trace.final[:, None]).numpy()
    layer = made.layer.numpy()
    by_ffn = np.where(made.by_ffn.numpy(), layer, -1)
    active, features = active_clusters(trace, clusters), _features(model, activations)
    rules = {
        RULE: (OverlapRule(), by_ffn),
        EITHER: (OverlapRule(), layer),
        BY_LAYER: (OverlapRule(others="by-layer"), by_ffn),
    }
    readout, last = Readout(model), activations[-1]
    every = [taking(activations[place]) for place in range(1, trace.n_layers + 1)]
    plain = confidences(readout, last, every, name="id", progress=progress)
    positions = torch.from_numpy(trace.examples.positions)
    judged, chosen = defaultdict[str, list[Judged]](list), defaultdict[str, Counter[str]](Counter)
    for seed in tqdm(range(seeds), desc="splits", unit="split", disable=not progress, delay=1):
        split = parts(len(trace), seed=seed)
        train, calibration, test = split

        def leave(name: str, learn: Int[np.ndarray, " m"], rows: Int[np.ndarray, " n"]) -> np.ndarray:
            rule, made_at = rules[name]
            return leaving(rule.fit(active, made_at, learn).signals(active, rows))

        wanted = right[calibration, leave(RULE, train, calibration)].mean()
        learn = np.concatenate([train, calibration])
        leaves = {name: leave(name, learn, test) for name in rules}
        for name, own in features.items():
            learnt = Classifiers(strengths=strengths, kinds=kinds, folds=folds, seed=seed)
            learnt.fit(own, by_ffn, split, progress=progress)
            leaves[name] = leaving(learnt.signals(own, test))
            chosen[name].update(learnt.penalties)
        leaves[FIXED] = np.full(len(test), (right[calibration].mean(0) >= wanted).argmax())
        leaves[ORACLE] = layer[test]
        for name, where in leaves.items():
            judged[name].append(judge(where, right[test]))
        judged[CHANCE].append(by_chance(leaves[RULE], right[test]))
        mean_length, rows = float((positions[train] + 1).double().mean()), np.concatenate([calibration, test])
        exits = {"id": Confidence(plain.difference[rows], plain.right[rows])}
        mapped = _mapped(readout, activations, train, rows, progress)
        if mapped is not None:
            exits["mat"] = mapped
        for name, confidence in exits.items():
            found = _confident(confidence, positions[rows], mean_length, len(calibration), wanted)
            judged[f"confidence, {name}"].append(found)
    return Compared(dict(judged), dict(chosen))


def _require_same(trace: Trace, activations: Activations) -> None:
    theirs = activations.provenance["model"]["fingerprint"], activations.examples.fingerprint
    if (trace.provenance["model"]["fingerprint"], trace.examples.fingerprint) != theirs:
        raise InputError(
            "The trace and the activations are of different models or examples. Collect the activations at "
            "the examples of the trace, `trace.examples`."
        )


def _features(
    model: TransformerBridge, activations: Activations
) -> dict[str, list[Float[np.ndarray, "n d"]]]:
    """What classifiers see at each layer: the stream before the FFN, what the FFN writes, and both."""
    layers = range(anatomy(model).n_layers)
    x = [
        torch.stack([activations[site] for site in before_ffn(model, layer)]).sum(0).numpy()
        for layer in layers
    ]
    o = [activations[Site(_WRITTEN, layer)].numpy() for layer in layers]
    both = [np.concatenate(pair, axis=1) for pair in zip(x, o, strict=True)]
    return {"classifiers on x": x, "classifiers on o": o, "classifiers on x and o": both}


def _mapped(
    readout: Readout,
    activations: Activations,
    train: Int[np.ndarray, " m"],
    rows: Int[np.ndarray, " n"],
    progress: bool,
) -> Confidence | None:
    """Confidences of ``mat``, fitted on the training examples, where they are enough."""
    last = int(activations.provenance["model"]["n_layers"])
    d_model = activations[last].shape[1]
    if len(train) < _ENOUGH * d_model:
        return None
    samples = {f"h.{layer}": activations[layer][train] for layer in range(1, last + 1)}
    maps = fit_samples(samples, [(layer, last) for layer in range(1, last)])
    mapped = [linear(activations[linear.source][rows]) for linear in maps]
    truth = activations[last][rows]
    return confidences(readout, truth, [*map(taking, mapped), taking(truth)], name="mat", progress=progress)


def _confident(
    confidence: Confidence,
    positions: Int[Tensor, " n"],
    mean_length: float,
    n_calibration: int,
    wanted: float,
) -> Judged:
    """Judge the confidence exit on the test examples, which follow those that set its ``lam``."""
    known, new = slice(n_calibration), slice(n_calibration, None)
    calibration = Confidence(confidence.difference[known], confidence.right[known])
    lam = least_lam(calibration, positions[known], mean_length, wanted)
    left = exit_layers(confidence.difference[new], thresholds(positions[new], lam, mean_length))
    return judge(left.numpy() - 1, confidence.right[new].numpy())
