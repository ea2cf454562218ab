"""Paper A, section 4.2: whether the tokens that layers predict fit into the sentence.

Without ``--sheet`` it writes ``plausibility_sheet.csv``, in which a person marks every token 1 or 0; it
shows neither the layer nor the method of a token. With ``--sheet`` it turns the filled sheet into the
paper's rates. The paper, with 50 sentences and all 25 layers of BERT, found 85.4% of ``mat`` against 52.8% of
``id``, and more plausible tokens by ``id`` than by ``mat`` in less than 4.3% of the instances.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from annotation import (
    make_plausibility_sheet,
    plausibility_rates,
    read_plausibility_sheet,
    write_sheet,
)
from paper_a import read_predictions, top_predictions
from rich.console import Console
from rich.table import Table
from studies import Report, Study, run_study

from matlens import InputError, collect, load_corpus, make_examples

NAME = "plausibility"


def main(
    study: Study,
    report: Report,
    sheet: Annotated[Path | None, typer.Option(help="The filled sheet.")] = None,
    sentences: Annotated[int, typer.Option(min=1, help="Sentences in the sheet.")] = 50,
    sentences_from: Annotated[
        str | None, typer.Option(help="A corpus for them; by default the validation part of --corpus.")
    ] = None,
) -> None:
    """Write a sheet to be filled in, or turn a filled one into rates."""
    if sheet is not None:
        marks = read_plausibility_sheet(sheet)
        rates = plausibility_rates(read_predictions(report.path(NAME)), marks)
        report.write_table(f"{NAME}_rates", rates)
        show(rates[rates["layer"].isna()])
        return
    _ = study.model  # what is not there is told first
    if sentences_from:
        chosen, _ = load_corpus(sentences_from).split(n_train=sentences, n_validation=2, seed=study.seed)
    else:
        _, chosen = study.parts
        if sentences > len(chosen):
            raise InputError(
                f"{sentences} sentences for the sheet are more than the {len(chosen)} that maps are not "
                "fitted on. Expected a larger --val, fewer --sentences, or --sentences-from."
            )
    examples = make_examples(study.model, chosen, seed=study.seed, draw_special=False).head(sentences)
    read = collect(study.model, examples)
    table = top_predictions(study.readout, study.maps, read, range(study.n_layers + 1))
    path = report.out / f"{NAME}_sheet.csv"
    write_sheet(path, make_plausibility_sheet(table, seed=study.seed))
    report.write(NAME, table, study.origin)
    print(f"{path}: mark every token 1 or 0 in the column 'plausible', then: --sheet {path}")


def show(rates: pd.DataFrame) -> None:
    """Print the rates over all layers."""
    printed = Table("method", "rate", "value", "95% interval", "n")
    for row in rates.itertuples():
        interval = f"{row.low:.1%} to {row.high:.1%}"
        printed.add_row(str(row.method), str(row.metric), f"{row.value:.1%}", interval, str(row.n))
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, figures=False)
