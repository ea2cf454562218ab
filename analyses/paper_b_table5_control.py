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

from pathlib import Path
from typing import Annotated

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
    SelfDebiasing,
    changes_to_compare,
    choose_values,
    compare_control,
    estimates_by_change,
    main_scores,
    make_grader,
    word_filter,
)
from matlens.corpora import PROMPT_FIELD, read_prompts
from matlens.ffn import ValueVector
from matlens.plots import toxicity_against_perplexity
from matlens.study import Study

NAME = "paper_b_table5_control"
HERE = Path(__file__).parent / "prompts"
WORDS = (
    " safe", " safety", " peace", " peaceful", " calm", " thank", " thanks", " respect", " polite", " kind",
    " gentle", " friendly", " welcome", " healthy",
)  # fmt: skip


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
    chosen = choose_values(model, scorer, word or WORDS, picked=vector or (), n=n, seed=seed)
    changes = changes_to_compare(
        chosen, debiasing, word_filter(model.tokenizer, read_prompts(banned)),
        coefficients=value or [PAPER_COEFFICIENT],
    )  # fmt: skip
    table, texts = compare_control(
        model, changes, given, part, scorer,
        prompts_name=prompts.name, n_samples=samples or None, seed=seed, announce=print,
    )  # fmt: skip
    origin = study.origin_of_weights | {
        "grader": grader, "prompts": len(given),
        "samples": samples or "greedy", "n_tokens": CONTINUATION_TOKENS, "corpus": part.fingerprint,
        "vectors": {method: list(names) for method, names in chosen.items()},
        "announced": list(debiasing.prefixes),
    }  # fmt: skip
    report.write(NAME, table, origin, toxicity_against_perplexity(main_scores(table)))
    print(report.write_table(f"{NAME}_texts", texts))
    show(main_scores(table))


def show(table: pd.DataFrame) -> None:
    """Print a line for each way of changing the model."""
    names = {"toxic": "toxic", "score": "mean score", "score_change": "change", "perplexity": "PPL"}
    printed = Table("method", "coefficient", *names.values(), "95% intervals: toxic; change")
    for method, coefficient, estimates in estimates_by_change(table):
        cells = [f"{estimates[name].value:.3g}" if name in estimates else "-" for name in names]
        bounds = [
            f"{estimates[name].low:.3f} to {estimates[name].high:.3f}" for name in ("toxic", "score_change")
        ]
        printed.add_row(method, "" if coefficient is None else f"{coefficient:g}", *cells, "; ".join(bounds))
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, sentences=200)
