"""Paper A, section 5.2: maps fitted on one corpus and tested on another.

Maps onto the last layer, fitted on equally many sentences of each corpus and tested on each: the precision
of every layer, and its mean over layers. Expect little loss across corpora: the paper lost 5.5% and 8% of
Precision@1 on GPT-2, relative to maps of the same corpus, and nearly nothing on BERT.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from matlens import plots
from matlens.cli import Report, run_study
from matlens.errors import printable
from matlens.linearity import fit_equally_many, transfer_losses, transfer_quality
from matlens.study import Study, origin_of

NAME = "paper_a_sec5_corpora"


def main(studies: Iterator[Study], report: Report) -> None:
    """Fit on each corpus, test on each, print the means over layers and draw all layers."""
    # A corpus that has too few sentences is split in the same proportion.
    by_corpus = {study.corpus.name: replace(study, adjustable=("train", "validation")) for study in studies}
    maps = fit_equally_many({name: study.stream[0] for name, study in by_corpus.items()})
    validations = {name: study.validation for name, study in by_corpus.items()}
    readout = next(iter(by_corpus.values())).readout
    table = transfer_quality(readout, maps, validations)
    origins = {name: origin_of(maps[name], validations[name]) for name in maps}
    n_fitted = min(study.sizes[0] for study in by_corpus.values())
    show(transfer_losses(table))
    report.write(NAME, table, {"studies": origins, "n_fitted": n_fitted}, plots.across_corpora(table))


def show(losses: pd.DataFrame) -> None:
    """Print Precision@1 averaged over layers, and how it differs from that of maps of the same corpus."""
    printed = Table("tested on", "maps", "Precision@1, mean over layers", "difference", "relative, mean")
    for row in losses.to_dict("records"):
        numbers = f"{row['precision']:.3f}", f"{row['difference']:+.3f}", f"{row['relative']:+.1%}"
        printed.add_row(Text(printable(row["corpus"])), row["method"], *numbers)
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, corpus=["wikipedia-sample", "news-sample"])
