"""Paper A, section 5.2: maps fitted on one corpus and tested on another.

Maps to the last layer, fitted on equal numbers of samples of each corpus and tested on each: the precision of
every layer, and its mean over layers. Expect little loss across corpora: the paper lost 5.5% and 8% of
Precision@1 on GPT-2, relative to maps of the same corpus, and nearly nothing on BERT.

Give any number of corpora, also of other languages and domains; three or more are plotted as matrices, with a
row per training corpus and a column per test corpus.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pandas as pd
import torch
from figures.paper_a import across_corpora, transfer_heatmaps
from studies import Report, Study, run_study, show

from matlens import InputError, MapSet, Readout
from matlens.activations import Activations
from matlens.cli import options
from matlens.data import Corpus
from matlens.errors import PositiveInt, printable
from matlens.lens import fit_quality, prediction_quality
from matlens.linear import fit_samples, resolve_pairs
from matlens.study import origin_of

NAME, MATRIX = "paper_a_sec5_corpora", "paper_a_sec5_matrix"
_SHARED = 0.01  # max share of validation sentences in another corpus' training sentences
_SIDE_BY_SIDE = 2  # max corpora plotted by layer


def main(
    studies: Iterator[Study],
    report: Report,
    positions: options.PositionChoice = "sampled",
    every: PositiveInt = 1,
) -> None:
    """Fit on each corpus, test on each, print the means over layers and draw all layers.

    Parameters
    ----------
    positions
        Fit on one sampled token per training sentence, or on all tokens.
    every
        Fit maps from every n-th layer.
    """
    by_corpus = {study.corpus.name: replace(study, positions=positions) for study in studies}
    if positions != "sampled":  # separate from vectors at sampled positions
        by_corpus = {name: replace(study, out=study.out / positions) for name, study in by_corpus.items()}
    shared = shared_sentences({name: study.parts for name, study in by_corpus.items()})
    samples = {name: study.stream[0] for name, study in by_corpus.items()}
    maps = fit_equally_many(samples, every=every)
    validations = {name: study.validation for name, study in by_corpus.items()}
    readout = next(iter(by_corpus.values())).readout
    table = transfer_quality(readout, maps, validations)
    show("Precision@1, means over layers", transfer_losses(table), relative="{:+.1%}")
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
    """Number of validation sentences of each corpus in another's training sentences.

    Raises
    ------
    InputError
        If they are more than 1% of the validation sentences.
    """
    shared: dict[str, dict[str, int]] = {}
    for fitted, (train, _) in parts.items():
        seen = set(train.sentences)
        for tested, (_, validation) in parts.items():
            n = sum(sentence in seen for sentence in validation.sentences)
            shared.setdefault(fitted, {})[tested] = n
            if n > _SHARED * len(validation):
                raise InputError(
                    f"corpora must not share sentences, got {n:,} of the {len(validation):,} validation "
                    f"sentences of {printable(tested)} in the training sentences of {printable(fitted)}."
                )
    return shared


def fit_equally_many(samples: Mapping[str, Activations], *, every: int = 1) -> dict[str, MapSet]:
    """Maps of each corpus to the last layer, on equal numbers of samples."""
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

    ``corpus`` is the one they are tested on, and the method, ``mat of <corpus>``, the one they were
    fitted on. The last layer is excluded.
    """
    tables = []
    for fitted, fits in maps.items():
        for tested, validation in validations.items():
            predicted = prediction_quality(readout, fits, validation, methods=["mat"])
            predicted = predicted[predicted["layer"] < validation.provenance.identity.n_layers]
            fit = fit_quality(fits, validation, progress=False)
            for quality in (predicted, fit[fit["method"] == "mat"]):
                named = {"experiment": NAME, "corpus": tested, "method": f"mat of {fitted}"}
                tables.append(quality.assign(**named))
    return pd.concat(tables, ignore_index=True)


def transfer_means(table: pd.DataFrame) -> pd.DataFrame:
    """Means over layers of `transfer_quality`, one row per pair of corpora and metric.

    The columns are the same, without a layer.
    """
    named = ["experiment", "model", "corpus", "method", "target", "metric", "k"]
    groups = table.groupby(named, sort=False, dropna=False)
    means = groups.agg(value=("value", lambda values: values.mean()), n=("n", "first"))
    return means.reset_index().assign(layer=None, low=math.nan, high=math.nan)[list(table.columns)]


def transfer_losses(table: pd.DataFrame) -> pd.DataFrame:
    """Mean Precision@1, relative to the maps of the tested corpus itself.

    Columns are ``corpus, method, precision, difference, relative``; ``relative`` is the mean over layers of
    the difference, relative to the maps of the same corpus.
    """
    best = table[(table["metric"] == "precision") & (table["k"] == 1)]
    wide = best.pivot_table(index="layer", columns=["corpus", "method"], values="value")
    rows = []
    for corpus, method in map(tuple, wide.columns):
        same, here = wide[corpus, f"mat of {corpus}"], wide[corpus, method]
        relative = ((here - same) / same).mean()
        rows.append((corpus, method, here.mean(), (here - same).mean(), relative))
    return pd.DataFrame(rows, columns=["corpus", "method", "precision", "difference", "relative"])


if __name__ == "__main__":
    run_study(main, corpus=["wikipedia-sample", "news-sample"])
