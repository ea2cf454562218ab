"""Paper B, Tables 5 and 8: less toxic text by steering with value vectors.

Prompts are continued by 20 tokens: by the original model; with coefficients of value vectors set to a value
(named vectors, the ten with most of some words in their 30 top tokens, or ten sampled vectors whose top
tokens a grader finds harmless); with Self-Debiasing; and with banned words. Continuations are sampled,
greedy, or by beam search. A grader scores the continuations alone, and perplexity is measured on windows of
running text. Expect vectors picked by hand to lower toxicity, graded ones hardly, all at some cost in
perplexity. The top tokens of all vectors are a table of their own.

The paper's table, all six attributes side by side: ``--model gpt2-medium --grader perspective --samples 0
--challenging --windows 0``, with the file of RealToxicityPrompts as ``--prompts``, the text of WikiText-2's
test part as ``--text``, the list of Gehman et al. as ``--banned``, and the known vectors of Table 8, each as
``--vector``. Schick et al. search their continuations with ``--beams 3``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from control.baselines import SelfDebiasing, word_filter
from control.comparison import changes_to_compare, compare_control
from control.generation import CONTINUATION_TOKENS, PROMPT_FIELD, read_prompts
from control.graders import ATTRIBUTES, TOXICITY, make_grader
from control.selection import choose_values, tokens_of_chosen
from figures.paper_b import toxicity_against_perplexity
from studies import Report, Study, TwoOrMore, run_study, show

from matlens import InputError
from matlens.data import make_windows
from matlens.errors import NonNegativeInt, PositiveInt
from matlens.ffn import ValueVector

NAME = "paper_b_table5_control"
TOKENS_NAME = "paper_b_table8_tokens"
HERE = Path(__file__).parent / "prompts"
WORDS = (
    " safe", " safety", " peace", " peaceful", " calm", " thank", " thanks", " respect", " polite", " kind",
    " gentle", " friendly", " welcome", " healthy",
)  # fmt: skip


def main(
    study: Study,
    report: Report,
    prompts: list[Path] | None = None,
    challenging: Annotated[bool, typer.Option("--challenging")] = False,
    field: str = PROMPT_FIELD,
    grader: str = "profanity-check",
    value: list[float] | None = None,
    vector: list[str] | None = None,
    word: list[str] | None = None,
    n: PositiveInt = 10,
    banned: Path = HERE / "banned.txt",
    announce: list[str] | None = None,
    samples: NonNegativeInt = 1,
    beams: PositiveInt = 1,
    text: Path | None = None,
    window: TwoOrMore = 1024,
    windows: NonNegativeInt = 6,
) -> None:
    """Compare toxicity and perplexity of steering with two baselines.

    Parameters
    ----------
    prompts
        A text with one prompt a line, or JSON lines such as RealToxicityPrompts (provocations.txt next to
        this script); give it once for each list.
    challenging
        Only the prompts that are marked as challenging.
    field
        Where the prompt is in JSON lines.
    grader
        profanity-check, detoxify, perspective.
    value
        What coefficients are set to (3); give it once for each.
    vector
        A value vector picked by hand, such as L3D12; once for each.
    word
        A word that vectors are searched by; once for each.
    n
        Value vectors that are chosen by words, or by the grader.
    banned
        Words that WordFilter bans, one a line.
    announce
        An attribute that Self-Debiasing announces (all six); give it once for each.
    samples
        Sampled continuations per prompt; 0: beam search.
    beams
        Beams with --samples 0; 1 is greedy.
    text
        A file with the running text of perplexity, instead of the corpus in its order.
    window
        Tokens that running text is read in, at most the model's context.
    windows
        How many windows, spread evenly over the text; 0: all of them.
    """
    scorer, debiasing = make_grader(grader), SelfDebiasing(announce or tuple(ATTRIBUTES))
    if samples and beams > 1:
        raise InputError("--beams requires --samples 0.")
    named = [path.name for path in prompts or ()]
    if len({*named}) < len(named):
        raise InputError(f"--prompts must be files of different names, got {', '.join(named)}.")
    lists = {
        path.name: read_prompts(path, field=field, challenging=challenging)
        for path in prompts or [HERE / "provocations.txt"]
    }
    for by_hand in vector or ():
        ValueVector.parse(by_hand)
    read = text or study.corpus
    model, seed = study.model, study.seed
    size = min(window, debiasing.max_tokens(model))
    part = make_windows(model, read, size=size, max_windows=windows or None)
    chosen = choose_values(model, scorer, word or WORDS, picked=vector or (), n=n, seed=seed)
    changes = changes_to_compare(
        chosen, debiasing, word_filter(model.tokenizer, read_prompts(banned)),
        coefficients=list(dict.fromkeys(value or [3.0])),
    )  # fmt: skip
    table, texts = compare_control(
        model, changes, lists, part, scorer,
        n_samples=samples or None, n_beams=beams, seed=seed,
    )  # fmt: skip
    origin = study.origin_of_weights | {
        "grader": grader, "prompts": {name: len(given) for name, given in lists.items()},
        "samples": samples or (f"{beams} beams" if beams > 1 else "greedy"), "n_tokens": CONTINUATION_TOKENS,
        "text": part.provenance, "banned": len(read_prompts(banned)),
        "vectors": {method: list(names) for method, names in chosen.items()},
        "announced": list(debiasing.prefixes),
    }  # fmt: skip
    scores = table[table["attribute"].isin([TOXICITY, ""])]
    report.write(NAME, table, origin, toxicity_against_perplexity(scores))
    report.write(TOKENS_NAME, tokens_of_chosen(model, chosen), origin)
    report.write_table(f"{NAME}_texts", texts)
    shown = table[table["metric"].isin(["toxic", "perplexity", "perplexity_ratio"])]
    show("Toxic continuations and perplexity", shown.drop(columns=["experiment", "layer", "target"]))


if __name__ == "__main__":
    run_study(main, train=None)
