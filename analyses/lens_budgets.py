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

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer
from figures.lenses import plot_budgets
from lenses import stored_lens
from lenses.budgets import (
    STEPS,
    fit_jacobian,
    from_tensors,
    is_falling,
    passages_of,
    seen_tokens,
    sentences_of,
    to_tensors,
    tune_further,
)
from studies import SECONDS, Report, Study, run_study

from matlens import Lens, collect, make_examples
from matlens.activations import Activations
from matlens.io import Artifact, csv_text, result_row, result_table
from matlens.lens import evaluate_open_sets, evaluation, read_evaluations
from matlens.metrics import Estimate
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

NAME = "lens_budgets"
COLUMNS = ("tokens", "seen", "batch", "round", "against")
LENSES = ("id", "mat", "affine", "scaled", "polished", "tuned", "jacobian")
CLOSED = ("mat", "affine", "scaled")
AGAINST = {"polished": CLOSED, "tuned": (*CLOSED, "polished"), "jacobian": ("id",)}
Evaluations = dict[tuple[int, str], evaluation.Evaluation]
Row = Callable[..., dict[str, Any]]


def main(
    study: Study,
    report: Report,
    layer: Annotated[list[int] | None, typer.Option(help="A layer; give it once for each.")] = None,
    budget: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens to fit on; all of them are a budget, too.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a step of rounds.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Maximum number of rounds.")] = 30,
    stopping: Annotated[
        int, typer.Option(min=1, help="Training sentences that end the rounds, and are not fitted on.")
    ] = 20,
    jacobian: Annotated[int, typer.Option(min=1, help="Passages that Jacobians are taken on.")] = 1000,
    longest: Annotated[int, typer.Option(min=1, help="Tokens that such a passage is cut to.")] = 128,
    evaluations: Annotated[Path | None, typer.Option(help="Folder of open evaluation sets.")] = None,
) -> None:
    """Fit lenses on each budget, train tuned ones further, evaluate all, and plot quality over tokens."""
    model, (training, held_out), seed = study.model, study.parts, study.seed
    layers = layer or [round(study.n_layers / 3), round(2 * study.n_layers / 3)]
    sizes = sorted(batch or [32])
    sets = None if evaluations is None else read_evaluations(evaluations)
    fitted_on, watched_on = (
        replace(training, sentences=part)
        for part in (training.sentences[:-stopping], training.sentences[-stopping:])
    )
    examples = make_examples(model, fitted_on, seed=seed)
    counts = sentences_of(examples.offsets, budget or [1_875, 7_500, 30_000])
    passages = passages_of(model, fitted_on, jacobian, longest)
    job = {
        **study.origin_of_weights, "layers": layers, "batches": sizes, "rounds": rounds,
        "n_tokens": [int(examples.offsets[n]) for n in counts], "stopping": stopping,
        "passages": len(passages), "longest": longest,
        "corpora": [part.fingerprint for part in study.parts],
        "evaluations": {name: len(items) for name, items in (sets or {}).items()},
    }  # fmt: skip

    def vectors(name: str, examples: Any, **options: Any) -> Activations:
        folder = study.folder / f"{NAME}-{name}"
        return collect(model, examples, [*layers, study.n_layers], folder=folder, **options)

    rows = vectors("rows", examples, positions="all")
    watched = vectors("stopping", make_examples(model, watched_on, seed=seed), positions="all")
    stored = Stored(model, vectors("validation", make_examples(model, held_out, seed=seed)))
    row = partial(result_row, NAME, model=model.cfg.model_name, corpus=held_out.name, target=study.n_layers)
    table: list[dict[str, Any]] = []
    with Artifact.writing(study.folder / NAME, "lenses by budget", job) as stored.artifact:
        before: tuple[Lens, int] | None = None
        spent = dict.fromkeys(LENSES, 0.0)
        for n in Bar(counts, desc="budgets", unit="budget"):
            part, lenses = rows.head(n), dict[str, Lens]()
            tokens = part.n_rows
            options = {"layers": layers, "progress": False}
            for name in LENSES:
                fit: Any = partial(Lens.fit, model, part, method=name, seed=seed, **options)
                if name == "jacobian":
                    fit = partial(
                        fit_jacobian, model, fitted_on, passages, tokens, before, longest=longest, **options
                    )
                lenses[name], seconds = stored.lens(f"{name}-{tokens}", fit)
                # Passages are computed once, for their first budget.
                spent[name] = seconds + (spent[name] if name == "jacobian" else 0.0)
            before = lenses["jacobian"], tokens
            found, record = stored.evaluate(f"budget-{tokens}", lenses, layers, partial(open_sets, sets))
            seen = {name: seen_tokens(lens, tokens) for name, lens in lenses.items()}
            table += budget_rows(partial(row, tokens=tokens), found, record, seen, spent)
        at_last = {name: found[layers[-1], name] for name in AGAINST["tuned"]}
        for size, n_rounds in zip(sizes, [rounds, *(1 for _ in sizes[1:])], strict=True):
            table += round_rows(row, stored, rows, watched, layers[-1], at_last, size, n_rounds, seed)
        if not stored.artifact.finished:
            stored.artifact.finish()
    results = result_table(table, *COLUMNS)
    origin = job | {
        "rounds": rounds,
        "seconds": stored.seconds,
        SECONDS: round(sum(stored.seconds.values()), 1),
    }
    report.write(NAME, results, origin, plot_budgets(results))


@dataclass
class Stored:
    """Lenses and evaluations of a run, each of which is computed once and stored.

    ``seconds`` are the CPU seconds of each.
    """

    model: TransformerBridge
    validation: Activations
    artifact: Any = None
    seconds: dict[str, float] = field(default_factory=dict)

    def lens(self, name: str, fit: Callable[[], Lens]) -> tuple[Lens, float]:
        """A lens, fitted or loaded, and the CPU seconds of its fit."""
        lens, self.seconds[name] = stored_lens(self.artifact, self.model, name, fit)
        return lens, self.seconds[name]

    def evaluate(
        self, name: str, lenses: Mapping[str, Lens], layers: list[int], more: Callable[..., dict[str, Any]]
    ) -> tuple[Evaluations, dict[str, Any]]:
        """The validation tokens as lenses read them, and what ``more`` finds, computed or loaded."""
        if self.artifact.read_json(name) is None:
            begun = process_time()
            found = evaluation.evaluate_layers(lenses, self.validation, layers, kl=True, progress=False)
            self.artifact.write(name, to_tensors(found))
            record = more(lenses) | {"seconds": process_time() - begun}
            self.artifact.write_json(name, record)
        record = self.artifact.read_json(name)
        self.seconds[name] = record["seconds"]
        return from_tensors(self.artifact.read_all(name)), record


def open_sets(sets: Any, lenses: Mapping[str, Lens]) -> dict[str, Any]:
    """pass@k of lenses on evaluation sets, as the text of a table."""
    return {"passed": csv_text(evaluate_open_sets(lenses, sets, progress=False))} if sets else {}


def mean_kl(watched: Activations, layer: int, lenses: Mapping[str, Lens]) -> dict[str, Any]:
    """The KL of a tuned lens on the tokens that end its rounds."""
    found = evaluation.evaluate_layers(lenses, watched, [layer], kl=True, progress=False)
    return {"kl": found[layer, "tuned"].values()["kl", None].mean().item()}


def round_rows(
    row: Row,
    stored: Stored,
    rows: Activations,
    watched: Activations,
    layer: int,
    others: Mapping[str, evaluation.Evaluation],
    size: int,
    rounds: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Quality of a tuned lens after each round, CPU seconds so far, and the KL that ends the rounds."""
    losses, total, begin = list[float](), 0.0, None
    while len(losses) < rounds and is_falling(losses):
        number = len(losses) + 1
        fit = partial(
            tune_further, stored.model, rows, layer, batch=size, seed=seed + number - 1, begin=begin
        )
        lens, seconds = stored.lens(f"tuned-{size}-round-{number}", fit)
        found, record = stored.evaluate(
            f"round-{size}-{number}", {"tuned": lens}, [layer], partial(mean_kl, watched, layer)
        )
        losses.append(record["kl"])
        begin, total = lens.maps[layer], total + seconds
        at = partial(
            row, method="tuned", layer=layer, tokens=rows.n_rows, seen=number * STEPS * size, batch=size,
            round=number,
        )  # fmt: skip
        yield from quality_rows(at, found[layer, "tuned"], others)
        for metric, value in (("kl, stopping", record["kl"]), ("seconds", total)):
            yield at(metric=metric, estimate=Estimate.without_interval(value, 1))


def budget_rows(
    row: Row,
    found: Evaluations,
    record: Mapping[str, Any],
    seen: Mapping[str, int],
    spent: Mapping[str, float],
) -> Iterator[dict[str, Any]]:
    """Quality of each lens by layer, CPU seconds per layer, and pass@k."""
    n_layers = len({layer for layer, _ in found})
    for (layer, name), its in found.items():
        others = {other: found[layer, other] for other in AGAINST.get(name, ())}
        yield from quality_rows(partial(row, method=name, layer=layer, seen=seen[name]), its, others)
    for name, seconds in spent.items():
        estimate = Estimate.without_interval(seconds / n_layers, n_layers)
        yield row(method=name, layer=None, metric="seconds", estimate=estimate, seen=seen[name])
    if "passed" in record:
        for passed in pd.read_csv(io.StringIO(record["passed"])).to_dict("records"):
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


if __name__ == "__main__":
    run_study(main, train=4020, val=1000)
