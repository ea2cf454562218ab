"""Paper A, section 5.2: maps fitted on one corpus and tested on another.

Maps onto the last layer, fitted on equally many sentences of each corpus and tested on each: the precision
of every layer, and its mean over layers. Expect little loss across corpora: the paper lost 5.5% and 8% of
Precision@1 on GPT-2, relative to maps of the same corpus, and nearly nothing on BERT.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from matlens import MapSet, load, load_corpus, plots
from matlens.cli import options, report, run_script
from matlens.lens import prediction_quality
from matlens.linear import fit_samples
from matlens.study import Study, workflow

NAME = "paper_a_sec5_corpora"


def main(
    model: options.Model = "smollm2-135m",
    corpus: options.Corpora = ["wikipedia-sample", "news-sample"],  # noqa: B006
    train: options.Train = 9000,
    val: options.Val = 3000,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: options.Out = Path("out"),
) -> None:
    """Fit on each corpus, test on each, print the means over layers and draw all layers."""
    sizes = {name: len(load_corpus(name)) for name in corpus}
    loaded = load(model, device=device)
    studies = {}
    for name, size in sizes.items():  # a corpus that is too small is split in the same proportion
        share = min(1, size / (train + val))
        n_train, n_validation = int(train * share), int(val * share)
        studies[name] = Study.load(loaded, name, out, n_train=n_train, n_validation=n_validation, seed=seed)
    equal = min(study.n_train for study in studies.values())
    last = loaded.cfg.n_layers
    pairs = [(layer, last) for layer in range(last)]
    maps = {name: MapSet(fit_samples(study.stream[0].head(equal), pairs)) for name, study in studies.items()}
    tables = []
    for fitted, tested in product(maps, studies):
        study = studies[tested]
        own = prediction_quality(study.readout, maps[fitted], study.validation, methods=["mat"])
        own = own[own["layer"] < last]
        tables.append(own.assign(experiment=NAME, corpus=tested, method=f"mat of {fitted}"))
    table = pd.concat(tables, ignore_index=True)
    origins = {name: workflow.origin_of(maps[name], study.validation) for name, study in studies.items()}
    show(table)
    report(out, NAME, table, {"studies": origins, "n_fitted": equal}, plots.across_corpora(table))


def show(table: pd.DataFrame) -> None:
    """Print Precision@1 averaged over layers, and how it differs from that of maps of the same corpus."""
    wide = table[table["k"] == 1].pivot_table(index="layer", columns=["corpus", "method"], values="value")
    printed = Table("tested on", "maps", "Precision@1, mean over layers", "difference", "relative, mean")
    for corpus, method in map(tuple, wide.columns):
        own, here = wide[corpus, f"mat of {corpus}"], wide[corpus, method]
        relative = f"{((here - own) / own).mean():+.1%}"
        printed.add_row(corpus, method, f"{here.mean():.3f}", f"{(here - own).mean():+.3f}", relative)
    Console().print(printed)


if __name__ == "__main__":
    run_script(main)
