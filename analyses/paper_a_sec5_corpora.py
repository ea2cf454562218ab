"""Paper A, section 5.2: maps fitted on one corpus and tested on another.

Maps onto the last layer, fitted on equally many samples of each corpus and tested on each: the precision of
every layer, and its mean over layers. Expect little loss across corpora: the paper lost 5.5% and 8% of
Precision@1 on GPT-2, relative to maps of the same corpus, and nearly nothing on BERT.

Any number of corpora can be given, of other languages and domains too; from three on they are drawn as
matrices, a row for each corpus that maps were fitted on and a column for each that they are judged on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated

import pandas as pd
import typer
from figures.paper_a import across_corpora, transfer_heatmaps
from paper_a import fit_equally_many, transfer_losses, transfer_means, transfer_quality
from rich.console import Console
from rich.table import Table
from rich.text import Text
from studies import Report, Study, run_study

from matlens.cli import PositionChoice
from matlens.data import Corpus
from matlens.errors import InputError, printable
from matlens.study import origin_of

NAME, MATRIX = "paper_a_sec5_corpora", "paper_a_sec5_matrix"
_SHARED = 0.01  # of validation sentences that may be among another corpus' training sentences
_SIDE_BY_SIDE = 2  # corpora whose layers are drawn side by side


def main(
    studies: Iterator[Study],
    report: Report,
    positions: Annotated[
        PositionChoice,
        typer.Option(
            help="A sample is one drawn token of each training sentence (drawn), or any token (all)."
        ),
    ] = "drawn",
    every: Annotated[int, typer.Option(min=1, help="From every how many layers there are maps.")] = 1,
) -> None:
    """Fit on each corpus, test on each, print the means over layers and draw all layers."""
    by_corpus = {study.corpus.name: replace(study, positions=positions) for study in studies}
    if positions != "drawn":  # apart from what others have collected at sampled positions
        by_corpus = {name: replace(study, out=study.out / positions) for name, study in by_corpus.items()}
    shared = shared_sentences({name: study.parts for name, study in by_corpus.items()})
    samples = {name: study.stream[0] for name, study in by_corpus.items()}
    maps = fit_equally_many(samples, every=every)
    validations = {name: study.validation for name, study in by_corpus.items()}
    readout = next(iter(by_corpus.values())).readout
    table = transfer_quality(readout, maps, validations)
    show(transfer_losses(table))
    origin = {
        "studies": {name: origin_of(maps[name], validations[name]) for name in maps},
        "n_fitted": min(of_corpus.n_rows for of_corpus in samples.values()),
        "positions": positions,
        "validation_sentences_fitted_on": shared,
    }
    few = len(by_corpus) <= _SIDE_BY_SIDE
    report.write(NAME, table, origin, across_corpora(table) if few else None)
    means = transfer_means(table)
    report.write(MATRIX, means, origin, None if few else transfer_heatmaps(means))


def shared_sentences(parts: Mapping[str, tuple[Corpus, Corpus]]) -> dict[str, dict[str, int]]:
    """How many validation sentences of each corpus are among those that maps of another are fitted on.

    Raises
    ------
    InputError
        They are so many that the maps would be judged on what they were fitted on.
    """
    shared: dict[str, dict[str, int]] = {}
    for fitted, (train, _) in parts.items():
        seen = set(train.sentences)
        for tested, (_, validation) in parts.items():
            n = sum(sentence in seen for sentence in validation.sentences)
            shared.setdefault(fitted, {})[tested] = n
            if n > _SHARED * len(validation):
                raise InputError(
                    f"{n:,} of the {len(validation):,} validation sentences of {printable(tested)} are "
                    f"among the training sentences of {printable(fitted)}: its maps would be judged on what "
                    "they were fitted on. Expected corpora that share next to none. Take those of one out "
                    "of the other."
                )
    return shared


def show(losses: pd.DataFrame) -> None:
    """Print Precision@1 averaged over layers, and how it differs from that of maps of the same corpus."""
    printed = Table("tested on", "maps", "Precision@1, mean over layers", "difference", "relative, mean")
    for row in losses.to_dict("records"):
        numbers = f"{row['precision']:.3f}", f"{row['difference']:+.3f}", f"{row['relative']:+.1%}"
        printed.add_row(Text(printable(row["corpus"])), row["method"], *numbers)
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, corpus=["wikipedia-sample", "news-sample"])
