"""Paper B, Figure 4: how far the final norm changes which tokens value vectors promote.

Overlap (IoU) of the 30 top tokens by ``E v`` and by ``E ln_f(v)`` at every layer, of all value vectors and of
random vectors with their mean and standard deviation. Expect a large overlap of the value vectors, so that
the norm can be ignored, and a smaller one of the random vectors. The paper's figure is ``--model gpt2``. The
table also has tests of the difference. Only weights are read; no corpus is needed.
"""

from __future__ import annotations

import warnings

import pandas as pd
import torch
from figures.paper_b import shares_by_layer
from jaxtyping import Float, Int
from studies import LayerRow, Model, Report, Study, TwoOrMore, layer_table, run_study
from torch import Tensor

from matlens import metrics
from matlens.errors import PositiveInt
from matlens.ffn import Projection, ValueVectors
from matlens.parallel import Bar

NAME = "paper_b_fig4_overlap"
_LISTS = 1024  # lists of tokens compared at once


def main(study: Study, report: Report, random: TwoOrMore = 500, top: PositiveInt = 30) -> None:
    """Compare top tokens with and without the final norm, and plot the overlap by layer.

    Parameters
    ----------
    random
        Random vectors at each layer.
    top
        Tokens of each list.
    """
    table = norm_overlap(study.model, n_random=random, k=top, seed=study.seed)
    origin = study.origin_of_weights | {"n_random": random}
    shares = table[(table["method"] != "difference") & table["layer"].notna()].astype({"layer": int})
    report.write(NAME, table, origin, shares_by_layer(shares, f"overlap of the {top} top tokens (IoU)"))


def iou(first: Int[Tensor, "n k"], second: Int[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """Intersection over union of two lists of different tokens, row by row."""
    pairs = zip(first.split(_LISTS), second.split(_LISTS), strict=True)
    both = torch.cat([(a[:, :, None] == b[:, None, :]).sum((1, 2)) for a, b in pairs])
    return both / (2 * first.shape[1] - both)


def norm_overlap(model: Model, *, n_random: int = 1000, k: int = 30, seed: int = 0) -> pd.DataFrame:
    """Overlap of the top tokens by ``E v`` and by ``E ln_f(v)``, layer by layer (Figure 4).

    One row per layer and method: ``values`` are all value vectors of the layer, ``random`` are random vectors
    with their mean and standard deviation, and the metric is ``iou``. ``difference`` compares both: its
    metrics are ``iou``, the difference of the means with Welch's interval; ``above``, the probability that a
    value vector's overlap is larger than a random vector's (ties count half); and ``p`` of the Mann-Whitney
    test. Rows without a layer are over all layers: ``iou`` is a mean over layers, and ``p`` is that of the
    Wilcoxon test of the layers' differences. ``k`` is the length of the lists, ``target`` is the layer, and
    the corpus is ``none``.
    """
    values, plain, normed = ValueVectors(model), Projection.from_model(model), Projection.after_norm(model)
    overlaps: dict[str, list[Tensor]] = {"values": [], "random": []}
    layers = range(values.n_layers)
    for layer in Bar(layers, desc="overlap", unit="layer"):
        random = values.random(layer, n_random, seed=seed)
        for method, vectors in (("values", values.layer(layer)), ("random", random)):
            overlaps[method].append(iou(plain.top(vectors, k).ids, normed.top(vectors, k).ids))
    pairs = list(zip(overlaps["values"], overlaps["random"], strict=True))
    means = {method: torch.stack([layer.mean() for layer in lists]) for method, lists in overlaps.items()}
    rows: list[LayerRow] = []
    for layer, (real, random) in enumerate(pairs):
        rows += [
            ("values", layer, "iou", k, metrics.mean(real)),
            ("random", layer, "iou", k, metrics.mean(random)),
        ]
        rows += [("difference", layer, metric, k, each) for metric, each in _compare(real, random).items()]
    rows += [(method, None, "iou", k, metrics.mean(of_layers)) for method, of_layers in means.items()]
    from scipy import stats  # slow to import

    above = means["values"] - means["random"]
    rows.append(("difference", None, "iou", k, metrics.mean(above)))
    p = float(stats.wilcoxon(above.cpu().double().numpy()).pvalue) if above.any() else 1.0
    rows.append(("difference", None, "p", k, metrics.Estimate.without_interval(p, len(above))))
    return layer_table("overlap", values.identity.name, "none", rows)


def _compare(real: Tensor, random: Tensor) -> dict[str, metrics.Estimate]:
    """Overlaps of value vectors compared with those of random vectors."""
    from scipy import stats

    first, second = real.cpu().double().numpy(), random.cpu().double().numpy()
    difference, n = float(first.mean() - second.mean()), len(first) + len(second)
    low = high = difference
    if first.var() or second.var():
        with warnings.catch_warnings():  # of a sample that is exactly constant
            warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
            interval = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
        low, high = float(interval.low), float(interval.high)
    test = stats.mannwhitneyu(first, second)
    return {
        "iou": metrics.Estimate(difference, low, high, n),
        "above": metrics.Estimate.without_interval(test.statistic / (len(first) * len(second)), n),
        "p": metrics.Estimate.without_interval(test.pvalue, n),
    }


if __name__ == "__main__":
    run_study(main, corpus=None)
