"""Maps of several corpora evaluated on each of them (paper A, section 5.2).

Corpora can be of other languages and domains, as many as one likes: each set of maps is judged on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch

from matlens.activations.activations import Activations
from matlens.io.tables import result_row, result_table
from matlens.lens.evaluation import fit_quality, prediction_quality
from matlens.linear.fitting import fit_samples
from matlens.linear.mapsets import MapSet
from matlens.linear.pairs import resolve_pairs
from matlens.metrics import Estimate
from matlens.models.readout import Readout

ACROSS_CORPORA = "paper_a_sec5_corpora"  # the experiment


def fit_equally_many(samples: Mapping[str, Activations], *, every: int = 1) -> dict[str, MapSet]:
    """Maps of each corpus onto the last layer, fitted on as many samples as the corpus with fewest has."""
    equal = min(of_corpus.n_rows for of_corpus in samples.values())
    maps = {}
    for name, of_corpus in samples.items():
        pairs = resolve_pairs("last", of_corpus.provenance)[::every]
        if of_corpus.positions == "all":
            chosen = torch.arange(of_corpus.n_rows) < equal
            maps[name] = MapSet(fit_samples(of_corpus, pairs, rows=chosen))
        else:
            maps[name] = MapSet(fit_samples(of_corpus.head(equal), pairs))
    return maps


def transfer_quality(
    readout: Readout, maps: Mapping[str, MapSet], validations: Mapping[str, Activations]
) -> pd.DataFrame:
    """Precision, surprisal and r2 of the maps of each corpus, tested on each (section 5.2).

    ``corpus`` says which one they are tested on, and the method, ``mat of <corpus>``, which they were fitted
    on. The last layer, where there is no map, is left out.
    """
    tables = []
    for fitted, fits in maps.items():
        for tested, validation in validations.items():
            predicted = prediction_quality(readout, fits, validation, methods=["mat"])
            predicted = predicted[predicted["layer"] < validation.provenance.identity.n_layers]
            fit = fit_quality(fits, validation, progress=False)
            for quality in (predicted, fit[fit["method"] == "mat"]):
                named = {"experiment": ACROSS_CORPORA, "corpus": tested, "method": f"mat of {fitted}"}
                tables.append(quality.assign(**named))
    return pd.concat(tables, ignore_index=True)


def transfer_means(table: pd.DataFrame) -> pd.DataFrame:
    """Means over layers of what `transfer_quality` gives: a row for each two corpora and each number.

    The columns are the same, without a layer; `matlens.plots.transfer_heatmaps` draws them as matrices.
    """
    named = ["experiment", "model", "corpus", "method", "target", "metric", "k"]
    rows = []
    for names, part in table.groupby(named, sort=False, dropna=False):
        cells: dict[str, Any] = dict(zip(named, names, strict=True))
        mean = Estimate.without_interval(float(part["value"].mean()), int(part["n"].iloc[0]))
        k = None if pd.isna(cells["k"]) else cells["k"]
        rows.append(result_row(**cells | {"k": k}, layer=None, estimate=mean))
    return result_table(rows)


def transfer_losses(table: pd.DataFrame) -> pd.DataFrame:
    """Precision@1 averaged over layers, compared with that of the maps of the tested corpus itself.

    Columns are ``corpus, method, precision, difference, relative``; ``relative`` is the mean over layers of
    the difference as a share of what the maps of the same corpus have.
    """
    best = table[(table["metric"] == "precision") & (table["k"] == 1)]
    wide = best.pivot_table(index="layer", columns=["corpus", "method"], values="value")
    rows = []
    for corpus, method in map(tuple, wide.columns):
        same, here = wide[corpus, f"mat of {corpus}"], wide[corpus, method]
        relative = ((here - same) / same).mean()
        rows.append((corpus, method, here.mean(), (here - same).mean(), relative))
    return pd.DataFrame(rows, columns=["corpus", "method", "precision", "difference", "relative"])
