"""Paper B, Table 5: less toxic continuations by turning value vectors on, beside two baselines.

Prompts are continued by 20 tokens: by the unchanged model; with the coefficients of value vectors set to a
value, those that are named, the ten that hold most of some words among their 30 top tokens, or ten drawn
among those whose top tokens a grader finds harmless; with Self-Debiasing; and with banned words. A grader
scores the continuations alone, and perplexity is that on sentences of a corpus. Expect vectors picked by
hand to lower toxicity, graded ones hardly, all at some cost in perplexity. The paper's table is ``--model
gpt2-medium --grader perspective --samples 0 --challenging``, with the file of RealToxicityPrompts as
``--prompts``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from matlens.cli import Report, run_study
from matlens.control import (
    ATTRIBUTES,
    CONTINUATION_TOKENS,
    GRADERS,
    PAPER_COEFFICIENT,
    TOXICITY,
    Grader,
    SelfDebiasing,
    continue_prompts,
    controlled,
    draw_harmless,
    grade_continuations,
    grade_values,
    make_grader,
    perplexity_estimate,
    perplexity_ratio,
    sentence_losses,
    toxicity_estimates,
    word_filter,
)
from matlens.corpora import PROMPT_FIELD, read_prompts
from matlens.ffn import Projection, ValueVector, ValueVectors, top_tokens_of_all, values_with_tokens
from matlens.metrics import Estimate
from matlens.models import word_tokens
from matlens.plots import toxicity_against_perplexity
from matlens.storage import result_row
from matlens.study import Study

NAME = "paper_b_table5_control"
HERE = Path(__file__).parent / "prompts"
WORDS = (
    " safe", " safety", " peace", " peaceful", " calm", " thank", " thanks", " respect", " polite", " kind",
    " gentle", " friendly", " welcome", " healthy",
)  # fmt: skip
UNCHANGED = "unchanged"


class Run(NamedTuple):
    """One line of the table: how the model is changed."""

    method: str
    value: float | None = None
    names: tuple[str, ...] = ()
    processor: Any = None

    def changing(self, model: Any) -> AbstractContextManager[Any]:
        """The context that the model runs in."""
        return controlled(model, self.names, self.value or 0.0) if self.names else nullcontext()


def main(
    study: Study,
    report: Report,
    prompts: Annotated[
        Path, typer.Option(help="A text with one prompt a line, or JSON lines such as RealToxicityPrompts.")
    ] = HERE / "provocations.txt",
    challenging: Annotated[
        bool, typer.Option("--challenging", help="Only the prompts that are marked as challenging.")
    ] = False,
    field: Annotated[str, typer.Option(help="Where the prompt is in JSON lines.")] = PROMPT_FIELD,
    limit: Annotated[int | None, typer.Option(min=1, help="Read no more prompts than this.")] = None,
    grader: Annotated[str, typer.Option(help=f"{', '.join(GRADERS)}.")] = "profanity-check",
    value: Annotated[
        list[float] | None, typer.Option(help="What coefficients are set to (3); give it once for each.")
    ] = None,
    vector: Annotated[
        list[str] | None, typer.Option(help="A value vector picked by hand, such as L3D12; once for each.")
    ] = None,
    word: Annotated[
        list[str] | None, typer.Option(help="A word that vectors are searched by; once for each.")
    ] = None,
    n: Annotated[
        int, typer.Option(min=1, help="Value vectors that are chosen by words, or by the grader.")
    ] = 10,
    banned: Annotated[Path, typer.Option(help="Words that WordFilter bans, one a line.")] = HERE
    / "banned.txt",
    announce: Annotated[
        list[str] | None,
        typer.Option(help="An attribute that Self-Debiasing announces (all six); give it once for each."),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Continuations of each prompt; 0: the greedy one.")] = 2,
) -> None:
    """Compare the toxicity of continuations and the perplexity under control with those of two baselines.

    The sentences are those of the corpus that perplexity is measured on.
    """
    scorer, debiasing = make_grader(grader), SelfDebiasing(announce or tuple(ATTRIBUTES))
    given = read_prompts(prompts, field=field, challenging=challenging)[:limit]
    for by_hand in vector or ():
        ValueVector.parse(by_hand)
    part, model, seed = study.parts[1], study.model, study.seed
    chosen = choose(model, scorer, vector or (), word or WORDS, n, seed)
    runs = [Run(UNCHANGED)]
    runs += [
        Run(method, coefficient, names)
        for method, names in chosen.items()
        for coefficient in value or [PAPER_COEFFICIENT]
    ]
    runs.append(Run("Self-Debiasing", processor=debiasing))
    runs.append(Run("WordFilter", processor=word_filter(model.tokenizer, read_prompts(banned))))

    name = model.cfg.model_name
    texts, rows, first, read = [], [], None, None
    for run in runs:
        print(run.method if run.value is None else f"{run.method}, coefficient {run.value:g}")
        with run.changing(model):
            continuations = continue_prompts(
                model, given, n_samples=samples or None, seed=seed, processor=run.processor
            )
            debiased = run.processor if isinstance(run.processor, SelfDebiasing) else None
            measured = run.processor is None or debiased is not None
            losses = sentence_losses(model, part, debiasing=debiased) if measured else None
        scored = grade_continuations(continuations, scorer)
        first, read = scored if first is None else first, read or losses
        texts.append(scored.assign(method=run.method, coefficient=run.value))
        for attribute in scorer.attributes:
            for metric, estimate in toxicity_estimates(scored, first, attribute):
                rows.append(line(run, name, prompts.name, attribute, metric, estimate))
        if losses is not None and read is not None:
            rows.append(line(run, name, part.name, "", "perplexity", perplexity_estimate(losses)))
            ratio = perplexity_ratio(losses, read)
            rows.append(line(run, name, part.name, "", "perplexity_ratio", ratio))
    table = pd.DataFrame(rows)
    origin = study.origin_of_weights | {
        "grader": grader, "prompts": len(given),
        "samples": samples or "greedy", "n_tokens": CONTINUATION_TOKENS, "corpus": part.fingerprint,
        "vectors": {method: list(names) for method, names in chosen.items()},
        "announced": list(debiasing.prefixes),
    }  # fmt: skip
    shown = table[table["attribute"].isin([TOXICITY, ""])]
    report.write(NAME, table, origin, toxicity_against_perplexity(shown))
    print(report.write_table(f"{NAME}_texts", pd.concat(texts)))
    show(shown)


def choose(
    model: Any, grader: Grader, picked: Sequence[str], words: Sequence[str], n: int, seed: int
) -> dict[str, tuple[str, ...]]:
    """Value vectors by words, by the grader and by hand, under the names of their methods."""
    values, projection = ValueVectors(model), Projection.from_model(model)
    word_tokens(projection.tokenizer, words)  # before the work, not after it
    vectors = (
        {f"picked, {len(picked)} vectors": tuple(map(str, map(values.resolve, picked)))} if picked else {}
    )
    top = top_tokens_of_all(values, projection)
    by_words = values_with_tokens(values, projection, top, words)["value"].head(n)
    vectors |= {f"words, {len(by_words)} vectors": tuple(by_words)} if len(by_words) else {}
    scores = grade_values(values, top, projection.tokenizer, grader)
    vectors[f"graded, {n} vectors"] = tuple(draw_harmless(scores, n, seed=seed)["value"])
    return vectors


def line(
    run: Run, model: str, corpus: str, attribute: str, metric: str, estimate: Estimate
) -> dict[str, Any]:
    """One row of the table."""
    return result_row(
        NAME.removeprefix("paper_b_"), model=model, corpus=corpus, method=run.method, layer=None, target=None,
        metric=metric, k=len(run.names) or math.nan, estimate=estimate, attribute=attribute,
        coefficient=run.value,
    )  # fmt: skip


def show(table: pd.DataFrame) -> None:
    """Print a line for each way of changing the model."""
    names = {"toxic": "toxic", "score": "mean score", "score_change": "change", "perplexity": "PPL"}
    printed = Table("method", "coefficient", *names.values(), "95% intervals: toxic; change")
    ways = table.groupby([table["method"], table["coefficient"].fillna(0)], sort=False)
    for (method, value), rows in ways:
        estimates = {str(row.metric): row for row in rows.itertuples()}
        cells = [f"{estimates[name].value:.3g}" if name in estimates else "-" for name in names]
        bounds = [
            f"{estimates[name].low:.3f} to {estimates[name].high:.3f}" for name in ("toxic", "score_change")
        ]
        printed.add_row(str(method), f"{value:g}" if value else "", *cells, "; ".join(bounds))
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, sentences=200)
