"""The exit rule under every reading of section 6.2, tested against chance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int
from scipy.stats import norm

from exits.outcomes import FEWEST_EXAMPLES, EvaluatedExits, evaluate_exits, first_exit, split_examples
from matlens.ffn import Clusters, ExitRule, Trace, active_clusters, find_saturation

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
                training_rows = np.setdiff1d(np.arange(len(trace)), part)
                signals = rule.fit(active, layers, training_rows).signals(active, part)
                evaluated.append(evaluate_exits(first_exit(signals), right[part]))
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
