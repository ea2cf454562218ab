"""Paper A, section 5.2: maps fitted on one corpus and tested on another.

Maps onto the last layer, fitted on equally many sentences of each corpus and tested on each: the precision
of every layer, and its mean over layers. Expect little loss across corpora: the paper lost 5.5% and 8% of
Precision@1 on GPT-2, relative to maps of the same corpus, and nearly nothing on BERT.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pandas as pd
from rich.console import Console
from rich.table import Table

from matlens import MapSet, plots
from matlens.cli import Report, run_study
from matlens.lens import prediction_quality
from matlens.linear import fit_samples
from matlens.study import Study, origin_of

NAME = "paper_a_sec5_corpora"


def main(studies: Iterator[Study], report: Report) -> None:
    """Fit on each corpus, test on each, print the means over layers and draw all layers."""
    by_corpus = {study.corpus.name: in_proportion(study) for study in studies}
    equal = min(study.n_train for study in by_corpus.values())
    last = next(iter(by_corpus.values())).n_layers
    pairs = [(layer, last) for layer in range(last)]
    maps = {
        name: MapSet(fit_samples(study.stream[0].head(equal), pairs)) for name, study in by_corpus.items()
    }
    tables = []
    for fitted, (tested, study) in product(maps, by_corpus.items()):
        quality = prediction_quality(study.readout, maps[fitted], study.validation, methods=["mat"])
        quality = quality[quality["layer"] < last]
        tables.append(quality.assign(experiment=NAME, corpus=tested, method=f"mat of {fitted}"))
    table = pd.concat(tables, ignore_index=True)
    origins = {name: origin_of(maps[name], study.validation) for name, study in by_corpus.items()}
    show(table)
    report.write(NAME, table, {"studies": origins, "n_fitted": equal}, plots.across_corpora(table))


def in_proportion(study: Study) -> Study:
    """The study itself, or one that splits a corpus which is too small in the same proportion."""
    if study.n_validation is None:  # whatever is left is for validation
        return study
    share = min(1, len(study.corpus) / (study.n_train + study.n_validation))
    n_train, n_validation = int(study.n_train * share), int(study.n_validation * share)
    return replace(study, n_train=n_train, n_validation=n_validation)


def show(table: pd.DataFrame) -> None:
    """Print Precision@1 averaged over layers, and how it differs from that of maps of the same corpus."""
    wide = table[table["k"] == 1].pivot_table(index="layer", columns=["corpus", "method"], values="value")
    printed = Table("tested on", "maps", "Precision@1, mean over layers", "difference", "relative, mean")
    for corpus, method in map(tuple, wide.columns):
        same, here = wide[corpus, f"mat of {corpus}"], wide[corpus, method]
        relative = f"{((here - same) / same).mean():+.1%}"
        printed.add_row(corpus, method, f"{here.mean():.3f}", f"{(here - same).mean():+.3f}", relative)
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, corpus=["wikipedia-sample", "news-sample"])
