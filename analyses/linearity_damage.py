"""Which cheap score predicts the loss increase when a part is replaced by its best affine map.

The maps and loss increases are those of ``analyses/linearity.py``, whose stored atlas is reused. On other
text, every part's residual (its map's output minus its own) is weighed by gradients at the part's output, of
all parts at once: one forward pass, and one backward pass for each sample of tokens from the model's own
predictions (``fisher``), for the tokens of the text (``first order``), or for each random projection of the
last layer; see docs/definitions.md. ``noise ceiling`` is the correlation of the loss increase with itself
plus noise of its own standard error.

Give ``--model`` once for each of several models. An interrupted run resumes at the layer of the atlas, or at
the model, where it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from time import process_time
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from figures.beyond import plot_damage
from scipy import stats
from studies import SECONDS, AtlasText, Cells, Report, Study, TwoOrMore, bootstrap, run_study
from torch import Tensor

from matlens import LinearMap, Readout
from matlens.activations import find_sinks
from matlens.data import Examples, make_windows
from matlens.errors import PositiveInt
from matlens.io import result_row, result_table
from matlens.linearity import atlas_seconds, linearity_atlas, model_parts, rank_correlations, sum_parts
from matlens.metrics import Estimate
from matlens.models import ModelIdentity, ModelLayout, Provenance

NAME = "linearity_damage"
CHOSEN, BASELINE, CEILING = "fisher", "nbl bound", "noise ceiling"
BATCH = 128  # tokens whose activations and gradients are in memory at once
RESAMPLES = 999
LARGE = 0.02  # nats: loss increases whose ratio to a score is not noise
Key = tuple[Any, str]  # a part, and the tokens that its map is fitted on and used at
Row = dict[str, Any]


def main(
    studies: Iterable[Study],
    report: Report,
    text: AtlasText,
    score_windows: TwoOrMore = 16,
    samples: PositiveInt = 4,
    every: PositiveInt = 1,
) -> None:
    """Score all parts, correlate scores with loss increases, and plot both.

    Parameters
    ----------
    score_windows
        Other windows that scores are of.
    samples
        Samples of predictions, and projections.
    every
        Use the parts of every n-th block; 1 for all.
    """
    tables, correlations, models = [], list[Row](), list[Row]()
    for study in studies:
        model, seed, folder = study.model, study.seed, text.folder(study)
        fitted, evaluated = text.examples(model, study)
        rest = make_windows(model, study.parts[1], size=text.window, targets=True, seed=seed)
        scored = windows_without(rest, evaluated, score_windows)
        if every > 1:
            folder = folder.with_name(f"{folder.name}-every-{every}")
        atlas = linearity_atlas(model, fitted, evaluated, folder=folder, every=every)
        job = study.origin_of_weights | {
            "fitted": fitted.fingerprint, "scored": scored.fingerprint, "samples": samples,
        }  # fmt: skip
        place = study.folder / f"{folder.name}-{NAME}-{score_windows}-{samples}"
        with Cells.stored(place, NAME, job) as cells:
            score = partial(score_parts, model, fitted, scored, every=every, samples=samples, seed=seed)
            result = cells.get("scores", score)
        rows: list[Any] = [*atlas.to_dict("records"), *result["rows"]]
        table = result_table(rows, "kind", "tokens", "parts")
        tables.append(table)
        of_maps = rank_correlations(table, seed=seed).query("method == 'map'").assign(experiment=NAME)
        correlations += cast(list[Row], of_maps.to_dict("records")) + comparisons(table, seed=seed)
        made = job | {
            "n_fitted": len(fitted.tokens), "n_evaluated": len(evaluated.targets),
            "n_scored": len(scored.targets), "seconds": {"atlas": atlas_seconds(folder), **result["taken"]},
        }  # fmt: skip
        models.append(made)
    origin = {
        **asdict(text), "score_windows": score_windows,
        "samples": samples, "every": every, "models": models,
        SECONDS: sum(sum(each["seconds"].values()) for each in models),
    }  # fmt: skip
    found = result_table(correlations, "kind", "tokens")
    report.write(NAME, found, origin, plot_damage(pd.concat(tables, ignore_index=True), found))


def windows_without(every: Examples, others: Examples, n: int) -> Examples:
    """Up to ``n`` windows, spread evenly, that are not in other examples."""
    texts, taken = (np.split(each.tokens, each.offsets[1:-1]) for each in (every, others))
    known = {text.tobytes() for text in taken}
    free = np.flatnonzero([text.tobytes() not in known for text in texts])
    chosen = free[np.linspace(0, len(free) - 1, min(n, len(free))).round().astype(int)]
    return every.select(chosen, n=len(chosen))


def score_parts(
    model: Any, fitted: Examples, scored: Examples, *, every: int, samples: int, seed: int
) -> dict[str, Any]:
    """Rows of the scores of all parts, and the CPU seconds of the maps, gradients and scores."""
    begun = process_time()
    layout, sinks = ModelLayout.from_model(model), find_sinks(model, scored, progress=False)
    provenance = Provenance(ModelIdentity.from_model(model), fitted.provenance, fitted.fingerprint)
    parts = [part for part in model_parts(layout) if part.layer % every == 0]
    sums = sum_parts(model, fitted, parts)
    maps: dict[Key, LinearMap] = {
        (part, "all" if with_sinks else "no sinks"): linear
        for part, with_sinks, linear, _ in sums.solve(provenance)
        if with_sinks or bool(sinks.any())
    }
    seconds = {"maps": process_time() - begun, "gradients": 0.0, "scores": 0.0}
    readout, generator = Readout(model), torch.Generator().manual_seed(seed)
    totals: dict[Key, dict[str, float]] = {}
    for index in scored.batch_indices(BATCH):
        begun = process_time()
        vectors, gradients = read_batch(model, readout, parts, scored, index, samples, generator)
        between = process_time()
        inside = scored.batch(index).mask.bool()
        for (part, tokens), linear in maps.items():
            places = inside if tokens == "all" else inside & ~sinks[index][:, : inside.shape[1]]
            residual = (linear(vectors[part.source]) - vectors[part.target]) * places[..., None]
            scores = residual_scores(residual, gradients[part.target], vectors[f"h.{part.end}"])
            total = totals.setdefault((part, tokens), dict.fromkeys(scores, 0.0))
            for score, value in scores.items():
                total[score] += value / len(scored.targets)
        seconds["gradients"] += between - begun
        seconds["scores"] += process_time() - between
    rows = [
        result_row(
            NAME, model=model.cfg.model_name, corpus=scored.provenance["corpus"], method="map",
            layer=part.layer, target=part.end, metric=score,
            estimate=Estimate.without_interval(value, len(scored.targets)), kind=part.kind, tokens=tokens,
            parts="",
        ) | {"k": None}
        for (part, tokens), scores in totals.items()
        for score, value in scores.items()
    ]  # fmt: skip
    return {"rows": rows, "taken": seconds}


def read_batch(
    model: Any, readout: Readout, parts: list[Any], examples: Examples, index: np.ndarray, samples: int,
    generator: torch.Generator,
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:  # fmt: skip
    """Vectors at all sites, and gradients at all targets, of a batch.

    Gradients are of sums over its positions: of the log-probability of the text's token ``[1, text, place,
    d]``, of sampled tokens, and of random projections of the last layer, divided by its norm.
    """
    layout = ModelLayout.from_model(model)
    batch, (row, position, number) = examples.batch(index), examples.rows_of(index)
    last = str(layout.stream[-1])
    written = {part.target: layout.written_at(part.target)[0] for part in parts}
    hooks = {site: layout.hook(site) for part in parts for site in part.ends}
    hooks |= {str(site): layout.hook(site) for site in layout.stream}
    seen: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> None:
        seen[hook.name] = value

    ids, others = batch.inputs(model)
    with model.hooks(fwd_hooks=[(hook, keep) for hook in {*hooks.values(), *written.values()}]):
        model(ids, **others, return_type=None)
    h = seen[hooks[last]][row, position]
    log_p = readout.logits(h, gradients=True).log_softmax(-1)
    chances, of_text = log_p.detach().exp().cpu(), torch.from_numpy(examples.targets[number])
    sampled = [chances.multinomial(1, generator=generator)[:, 0] for _ in range(samples)]
    sums = [log_p.gather(1, tokens[:, None].to(h.device)).sum() for tokens in (of_text, *sampled)]
    unit = h / h.detach().norm(dim=1, keepdim=True)
    sums += [(unit * torch.randn(h.shape, generator=generator).to(h)).sum() for _ in range(samples)]
    at = [seen[hook] for hook in written.values()]
    gradients = [torch.autograd.grad(each, at, retain_graph=True) for each in sums]
    of_sites = (torch.stack(each).flatten(3) for each in zip(*gradients, strict=True))
    vectors = {site: seen[hook].detach().flatten(2) for site, hook in hooks.items()}
    sizes = (1, samples, samples)
    return vectors, {site: [*each.split(sizes)] for site, each in zip(written, of_sites, strict=True)}


def residual_scores(residual: Tensor, gradients: list[Tensor], stream: Tensor) -> dict[str, float]:
    """Scores of a part, summed over a batch: of residuals ``[text, place, d]``, gradients and the stream."""
    of_text, of_samples, of_last = ((each * residual).sum(-1).double() for each in gradients)
    size, slope = residual.square().sum(-1).double(), gradients[1].square().sum(-1).double().mean(0)
    relative = size / stream.square().sum(-1).double()
    first, fisher = -float(of_text.sum()), float(of_samples.sum(-1).square().mean(0).sum()) / 2
    return {
        "fisher": fisher,
        "fisher by token": float(of_samples.square().mean(0).sum()) / 2,
        "fisher of the text": float(of_text.sum(-1).square().sum()) / 2,
        "first order": first,
        "first order + fisher": first + fisher,
        "last layer": float(of_last.sum(-1).square().mean(0).sum()) / 2,
        "gradient norm": float((size * slope).sum()) / 2,
        "residual norm": float(size.sum()),
        "relative residual": float(relative[size > 0].sum()),
    }


def comparisons(table: pd.DataFrame, *, seed: int) -> list[Row]:
    """The chosen score: lead over NBL's bound, median ratio to the loss increase; and the noise ceiling."""
    rows = list[Row]()
    single = table[(table["method"] == "map") & ~table["kind"].str.startswith("together")]
    for tokens, of_tokens in single.groupby("tokens", sort=False):
        wide = of_tokens.pivot(index=["kind", "layer"], columns="metric", values=["value", "low", "high"])
        values = wide["value"][["loss increase", CHOSEN, BASELINE]].to_numpy(float)
        width = wide["high", "loss increase"] - wide["low", "loss increase"]
        errors = width.to_numpy(float) / (2 * stats.norm.ppf(0.975))
        n, generator = len(values), np.random.default_rng(seed)

        noisy = values[:, :1] + errors[:, None] * generator.normal(size=(n, RESAMPLES))
        of_noisy: Any = stats.spearmanr(values[:, :1], noisy).statistic
        ceiling = of_noisy[0, 1:]
        large = values[values[:, 0] > LARGE]
        ratios = large[:, 1] / large[:, 0] if len(large) else np.array([np.nan])
        middle, low, high = np.quantile(ceiling, [0.5, 0.025, 0.975]).tolist()
        ratio = bootstrap(np.median, ratios, generator, resamples=RESAMPLES)._replace(n=len(large))
        estimates = {
            f"{CHOSEN} - {BASELINE}": bootstrap(lead, values, generator, resamples=RESAMPLES),
            f"{CHOSEN} / loss increase": ratio,
            CEILING: Estimate(middle, low, high, n),
        }
        rows += [
            result_row(
                NAME, model=str(table["model"].iloc[0]), corpus=str(table["corpus"].iloc[0]), method="map",
                layer=None, target=None, metric=metric, estimate=estimate, kind="all kinds",
                tokens=str(tokens),
            )
            for metric, estimate in estimates.items()
        ]  # fmt: skip
    return rows


def lead(values: np.ndarray) -> float:
    """How much better the second column correlates with the first than the third does."""
    ranks: Any = stats.spearmanr(values).statistic
    return float(ranks[0, 1] - ranks[0, 2])


if __name__ == "__main__":
    run_study(main, model=["smollm2-135m"], train=4000, val=1000)
