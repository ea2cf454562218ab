"""Lenses by budget: quality and CPU seconds of each lens over the tokens that it is fitted on.

Lenses are fitted at every token of the first sentences of the training part, as many as have the tokens of
a budget, and at last all of them; Jacobians are taken on the longest sentences, within the budget. All are
evaluated at one sampled token of each validation sentence, with paired differences. At the last ``--layer``
the tuned lens is then trained on all tokens in rounds of its default schedule of 250 steps, each from where
the last one ended, until a round takes less than 1% off the KL on other sentences. ``--batch`` is the tokens
of a step, 2^18 in the package tuned-lens; of several, the smallest is trained in rounds, the others for one.

Expect polishing to lead while tokens are few, and long training to catch up. An interrupted run resumes at
the lens where it was. Half an hour for SmolLM2, half of it for collecting and for Jacobians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from figures.beyond import plot_budgets
from lenses import STEPS, seen_tokens
from lenses.budgets import fit_jacobian, is_falling, passages_of, sentences_of, tune_further
from studies import Cells, Model, Report, Study, run_study

from matlens import Lens, collect, make_examples
from matlens.activations import Activations
from matlens.errors import Between, PositiveInt
from matlens.io import result_row, result_table
from matlens.lens import evaluate_open_sets, evaluation, read_evaluations
from matlens.metrics import Estimate
from matlens.parallel import Bar

NAME = "lens_budgets"
COLUMNS = ("tokens", "seen", "batch", "round", "against")
LENSES = ("id", "mat", "affine", "scaled", "polished", "tuned", "jacobian")
CLOSED = ("mat", "affine", "scaled")
AGAINST = {"polished": CLOSED, "tuned": (*CLOSED, "polished"), "jacobian": ("id",)}
Row = Callable[..., dict[str, Any]]
read = partial(evaluation.evaluate_layers, kl=True, progress=False)


def main(
    study: Study,
    report: Report,
    layer: list[int] | None = None,
    budget: Annotated[list[int] | None, Between(1)] = None,
    batch: Annotated[list[int] | None, Between(1)] = None,
    rounds: PositiveInt = 30,
    stopping: PositiveInt = 20,
    jacobian: PositiveInt = 1000,
    longest: PositiveInt = 128,
    evaluations: Path | None = None,
) -> None:
    """Fit lenses on each budget, train tuned ones further, evaluate all, and plot quality over tokens.

    Parameters
    ----------
    layer
        A layer; give it once for each.
    budget
        Tokens to fit on; all of them are a budget, too.
    batch
        Tokens of a step of rounds.
    rounds
        Maximum number of rounds.
    stopping
        Training sentences that end the rounds, and are not fitted on.
    jacobian
        Passages that Jacobians are taken on.
    longest
        Tokens that such a passage is cut to.
    evaluations
        Folder of open evaluation sets.
    """
    model, (training, held_out), seed = study.model, study.parts, study.seed
    layers = layer or [round(study.n_layers / 3), round(2 * study.n_layers / 3)]
    sizes = sorted(batch or [32])
    sets = {} if evaluations is None else read_evaluations(evaluations)
    fitted_on, watched_on = (
        replace(training, sentences=part)
        for part in (training.sentences[:-stopping], training.sentences[-stopping:])
    )

    parts: dict[str, Any] = {
        "rows": (fitted_on, "all"), "stopping": (watched_on, "all"), "validation": (held_out, "sampled"),
    }  # fmt: skip
    data = {
        name: collect(
            model, make_examples(model, part, seed=seed), [*layers, study.n_layers],
            folder=study.folder / f"{NAME}-{name}", positions=positions,
        )
        for name, (part, positions) in parts.items()
    }  # fmt: skip
    offsets = data["rows"].examples.offsets
    counts = sentences_of(offsets, budget or [1_875, 7_500, 30_000])
    passages = passages_of(model, fitted_on, jacobian, longest)
    job = {
        **study.origin_of_weights, "layers": layers, "batches": sizes, "rounds": rounds,
        "n_tokens": [int(offsets[n]) for n in counts], "stopping": stopping,
        "passages": len(passages), "longest": longest,
        "corpora": [part.fingerprint for part in study.parts],
        "evaluations": {name: len(items) for name, items in sets.items()},
    }  # fmt: skip
    row = partial(result_row, NAME, model=model.cfg.model_name, corpus=held_out.name, target=study.n_layers)
    table: list[dict[str, Any]] = []
    with Cells.stored(study.folder / NAME, "tables of lenses by budget", job) as cells:
        before: tuple[Lens, int] | None = None
        spent = dict.fromkeys(LENSES, 0.0)
        options = {"layers": layers, "progress": False}
        for n in Bar(counts, desc="budgets", unit="budget"):
            part, lenses = data["rows"].head(n), dict[str, Lens]()
            tokens = part.n_rows
            for name in LENSES:
                fit: Any = partial(Lens.fit, model, part, method=name, seed=seed, **options)
                if name == "jacobian":
                    fit = partial(
                        fit_jacobian, model, fitted_on, passages, tokens, before, longest=longest, **options
                    )
                lenses[name] = cells.lens(f"{name}-{tokens}", model, fit)
                # Passages are computed once, for their first budget.
                earlier = spent[name] if name == "jacobian" else 0.0
                spent[name] = cells.seconds[f"{name}-{tokens}"] + earlier
            before = lenses["jacobian"], tokens
            seen = {name: seen_tokens(lens, tokens) for name, lens in lenses.items()}
            at = partial(row, tokens=tokens)
            make = partial(budget_rows, at, lenses, data["validation"], layers, sets, seen, spent)
            table += cells.rows(f"budget-{tokens}", make)
        at_last = {name: lenses[name] for name in AGAINST["tuned"]}
        others = {name: its for (_, name), its in read(at_last, data["validation"], layers[-1:]).items()}
        for size, n_rounds in zip(sizes, [rounds, *(1 for _ in sizes[1:])], strict=True):
            at = partial(row, method="tuned", layer=layers[-1], tokens=data["rows"].n_rows, batch=size)
            table += round_rows(at, cells, model, data, layers[-1], others, size, n_rounds, seed)
    results = result_table(table, *COLUMNS)
    report.write(NAME, results, job | {"seconds": cells.seconds, **cells.total}, plot_budgets(results))


def budget_rows(
    row: Row,
    lenses: Mapping[str, Lens],
    validation: Activations,
    layers: list[int],
    sets: Mapping[str, Any],
    seen: Mapping[str, int],
    spent: Mapping[str, float],
) -> Iterator[dict[str, Any]]:
    """Quality of each lens by layer, CPU seconds per layer, and pass@k on evaluation sets."""
    found = read(lenses, validation, layers)
    for (layer, name), its in found.items():
        others = {other: found[layer, other] for other in AGAINST.get(name, ())}
        yield from quality_rows(partial(row, method=name, layer=layer, seen=seen[name]), its, others)
    for name, seconds in spent.items():
        estimate = Estimate.without_interval(seconds / len(layers), len(layers))
        yield row(method=name, layer=None, metric="seconds", estimate=estimate, seen=seen[name])
    for passed in evaluate_open_sets(lenses, sets, progress=False).to_dict("records") if sets else ():
        name, estimate = passed["method"], Estimate(*(passed[each] for each in Estimate._fields))
        yield row(
            method=name, layer=None, metric="pass", k=passed["k"], estimate=estimate,
            corpus=passed["corpus"], seen=seen[name],
        )  # fmt: skip


def quality_rows(
    row: Row, its: evaluation.Evaluation, others: Mapping[str, evaluation.Evaluation]
) -> Iterator[dict[str, Any]]:
    """Metrics of a lens, and their paired differences to others: its own less theirs."""
    differences = {name: its.differences(other) for name, other in others.items()}
    for name, estimates in {"": its.estimates(), **differences}.items():
        for (metric, k), estimate in estimates.items():
            if k != 5:
                yield row(metric=metric, k=k, estimate=estimate, against=name)


def round_rows(
    row: Row,
    cells: Cells,
    model: Model,
    data: Mapping[str, Activations],
    layer: int,
    others: Mapping[str, evaluation.Evaluation],
    size: int,
    rounds: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Quality of a tuned lens after each round, CPU seconds so far, and the KL that ends the rounds."""
    losses, total, begin = list[float](), 0.0, None

    def evaluate(at: Row, lens: Lens) -> Iterator[dict[str, Any]]:
        quality, watched = (read({"tuned": lens}, data[name], [layer]) for name in ("validation", "stopping"))
        yield from quality_rows(at, quality[layer, "tuned"], others)
        kl = watched[layer, "tuned"].values()["kl", None].mean().item()
        yield at(metric="kl, stopping", estimate=Estimate.without_interval(kl, 1))

    while len(losses) < rounds and is_falling(losses):
        number = len(losses) + 1
        fit = partial(
            tune_further, model, data["rows"], layer, batch=size, seed=seed + number - 1, begin=begin
        )
        name = f"tuned-{size}-round-{number}"
        lens, at = cells.lens(name, model, fit), partial(row, seen=number * STEPS * size, round=number)
        rows = cells.rows(f"round-{size}-{number}", partial(evaluate, at, lens))
        losses.append(rows[-1]["value"])
        begin, total = lens.maps[layer], total + cells.seconds[name]
        yield from [*rows, at(metric="seconds", estimate=Estimate.without_interval(total, 1))]


if __name__ == "__main__":
    run_study(main, train=4020, val=1000)
