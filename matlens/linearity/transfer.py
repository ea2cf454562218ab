"""Maps of several fits judged on the same examples: other positions, other corpora (paper A, section 5.2).

Corpora can be of other languages and domains, as many as one likes: each set of maps is judged on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from matlens.activations.activations import Activations
from matlens.activations.collecting import stream
from matlens.data.examples import Examples
from matlens.data.readers import is_masked
from matlens.errors import InputError, NonNegativeInt, PositiveInt, checked
from matlens.io.tables import COLUMNS, check_columns, result_row, result_table
from matlens.lens.quality import fit_quality, prediction_quality
from matlens.linear.fitting import fit_rows, fit_samples, fit_stream
from matlens.linear.mapsets import MapSet
from matlens.linear.pairs import resolve_pairs
from matlens.metrics import Estimate
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.layout import ModelLayout
from matlens.models.readout import Readout

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

ACROSS_CORPORA = "paper_a_sec5_corpora"  # the experiment
_NEEDED = ("method", "layer", "metric", "k", "value")  # columns that tables for people are made of


@checked
def fit_drawn_and_all(
    model: TransformerBridge, examples: Examples, *, progress: bool = True
) -> dict[str, MapSet]:
    """Maps onto the last layer from one pass, fitted on the ``drawn`` positions and on ``all`` positions.

    The drawn vectors are held, the others are streamed.

    Raises
    ------
    InputError
        The model is a masked-LM model, which predicts nothing at the positions that are not masked.
    """
    if is_masked(model):
        raise InputError(
            f"{model.cfg.model_name} is a masked-LM model: only the drawn token of each sentence is masked, "
            "and the others are no predictions. Expected a decoder."
        )
    sites = list(map(str, ModelLayout.from_model(model).stream))
    last = len(sites) - 1
    pairs = [(layer, last) for layer in range(last)]
    starts = examples.offsets[examples.sentences]
    number_of = {int(row): i for i, row in enumerate(starts + examples.positions)}
    drawn = {site: torch.empty(examples.n_positions, model.cfg.d_model) for site in sites}

    def all_vectors() -> Iterator[dict[str, torch.Tensor]]:
        for rows in stream(model, examples, sites, positions="all", progress=progress):
            kept = [(i, number_of[int(row)]) for i, row in enumerate(rows.index) if int(row) in number_of]
            here, there = map(list, zip(*kept, strict=True))
            for site, vectors in rows.vectors.items():
                drawn[site][there] = vectors[here]
            yield rows.vectors

    origin = Provenance(ModelIdentity.from_model(model), examples.provenance)
    of_all = MapSet(fit_stream(all_vectors(), pairs, provenance=replace(origin, positions="all")))
    of_drawn = MapSet(fit_samples(drawn, pairs, provenance=replace(origin, positions="drawn")))
    return {"drawn": of_drawn, "all": of_all}


@checked
def compare_fits(readout: Readout, maps: Mapping[str, MapSet], validation: Activations) -> pd.DataFrame:
    """r2 and prediction quality of ``mat`` of each fit; the methods are called ``mat, <fit>``.

    Parameters
    ----------
    readout
        The read-out of the model.
    maps
        Maps onto the last layer, by the name of their fit.
    validation
        The stream at the positions of the validation examples.
    """
    _check_some(maps, "maps")
    tables = []
    for name, fits in maps.items():
        table = pd.concat([fit_quality(fits, validation), prediction_quality(readout, fits, validation)])
        tables.append(table[table["method"] == "mat"].assign(method=f"mat, {name}"))
    return pd.concat(tables, ignore_index=True)


@checked
def fit_quality_by_size(
    train: Activations, validation: Activations, *, halvings: NonNegativeInt = 3, progress: bool = True
) -> pd.DataFrame:
    """r2 onto the last layer of maps fitted on all training sentences, on the first half of them, and so on.

    A table with one more column, ``n_fitted``.

    Parameters
    ----------
    train, validation
        The stream of the training and of the validation sentences.
    halvings
        How often the number is halved.
    progress
        Whether to show bars.

    Raises
    ------
    InputError
        No sentence would be left.
    """
    sizes = [len(train.examples) >> i for i in range(halvings + 1)]
    if sizes[-1] < 1:
        raise InputError(f"{sizes[0]} sentences cannot be halved {halvings} times. Expected fewer halvings.")
    tables = []
    for size in sizes:
        maps = MapSet.fit(train.head(size), pairs="last", progress=progress)
        table = fit_quality(maps, validation, progress=progress)
        tables.append(table[table["method"] == "mat"].assign(n_fitted=size))
    return pd.concat(tables, ignore_index=True)


@checked
def fits_side_by_side(table: pd.DataFrame) -> pd.DataFrame:
    """A table of `compare_fits` for people, a row for each layer: ``r2 <method>`` and ``P@1 <method>``."""
    check_columns(table, _NEEDED, what="the table of linearity.compare_fits")
    chosen = table[(table["metric"] == "r2") | ((table["metric"] == "precision") & (table["k"] == 1))]
    wide = chosen.pivot_table(index="layer", columns=["metric", "method"], values="value")
    wide.columns = [" ".join(column).replace("precision", "P@1") for column in wide.columns.to_list()]
    return wide


@checked
def fit_equally_many(samples: Mapping[str, Activations], *, every: PositiveInt = 1) -> dict[str, MapSet]:
    """Maps of each corpus onto the last layer, fitted on as many samples as the corpus with fewest has.

    Parameters
    ----------
    samples
        The stream on training sentences, by their corpus; at all positions a sample is a token.
    every
        From every how many layers, from the embeddings on.
    """
    _check_some(samples, "samples")
    equal = min(of_corpus.n_rows for of_corpus in samples.values())
    maps = {}
    for name, of_corpus in samples.items():
        pairs = resolve_pairs("last", of_corpus.provenance)[::every]
        if of_corpus.positions == "all":
            chosen = torch.arange(of_corpus.n_rows) < equal
            maps[name] = MapSet(fit_rows(of_corpus, pairs, rows=chosen))
        else:
            maps[name] = MapSet(fit_samples(of_corpus.head(equal), pairs))
    return maps


@checked
def transfer_quality(
    readout: Readout, maps: Mapping[str, MapSet], validations: Mapping[str, Activations]
) -> pd.DataFrame:
    """Precision, surprisal and r2 of the maps of each corpus, tested on each (section 5.2).

    ``corpus`` says which one they are tested on, and the method, ``mat of <corpus>``, which they were fitted
    on. The last layer, where there is no map, is left out.

    Parameters
    ----------
    readout
        The read-out of the model.
    maps
        Maps onto the last layer, by the corpus that they were fitted on.
    validations
        The stream on validation sentences, by their corpus.
    """
    _check_some(maps, "maps")
    _check_some(validations, "validation vectors")
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


@checked
def transfer_means(table: pd.DataFrame) -> pd.DataFrame:
    """Means over layers of what `transfer_quality` gives: a row for each two corpora and each number.

    The columns are the same, without a layer; `matlens.plots.transfer_heatmaps` draws them as matrices.

    Parameters
    ----------
    table
        A table of `transfer_quality`.
    """
    check_columns(table, COLUMNS, what="the table of linearity.transfer_quality")
    named = ["experiment", "model", "corpus", "method", "target", "metric", "k"]
    rows = []
    for names, part in table.groupby(named, sort=False, dropna=False):
        cells: dict[str, Any] = dict(zip(named, names, strict=True))
        mean = Estimate.without_interval(float(part["value"].mean()), int(part["n"].iloc[0]))
        k = None if pd.isna(cells["k"]) else cells["k"]
        rows.append(result_row(**cells | {"k": k}, layer=None, estimate=mean))
    return result_table(rows)


@checked
def transfer_losses(table: pd.DataFrame) -> pd.DataFrame:
    """Precision@1 averaged over layers, beside that of the maps of the tested corpus itself.

    Columns are ``corpus, method, precision, difference, relative``; ``relative`` is the mean over layers of
    the difference as a share of what the maps of the same corpus have.

    Parameters
    ----------
    table
        A table of `transfer_quality`.
    """
    check_columns(table, ("corpus", *_NEEDED), what="the table of linearity.transfer_quality")
    best = table[(table["metric"] == "precision") & (table["k"] == 1)]
    wide = best.pivot_table(index="layer", columns=["corpus", "method"], values="value")
    rows = []
    for corpus, method in map(tuple, wide.columns):
        same, here = wide[corpus, f"mat of {corpus}"], wide[corpus, method]
        relative = ((here - same) / same).mean()
        rows.append((corpus, method, here.mean(), (here - same).mean(), relative))
    return pd.DataFrame(rows, columns=["corpus", "method", "precision", "difference", "relative"])


def _check_some(given: Mapping[str, object], what: str) -> None:
    if not given:
        raise InputError(f"There are no {what}. Expected some, each under its name.")
