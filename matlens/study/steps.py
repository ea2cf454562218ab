"""The main job in four steps over one folder: collect, fit, evaluate, plot.

Each step reads what the one before has written and can be called again: what is collected and fitted is
not done twice, and what was broken off goes on. The folder holds ``train/`` and ``validation/``
(activations), ``maps/``, ``results.csv`` with ``results.json`` beside it, and the figures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from tqdm.auto import tqdm

from matlens import plots
from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import collect
from matlens.corpora.corpus import Corpus
from matlens.corpora.examples import is_masked, make_examples
from matlens.errors import InputError
from matlens.lens.quality import FIT, PREDICTION, fit_quality, prediction_quality
from matlens.linear.fitting import fit_samples
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet, write_maps
from matlens.linear.pairs import Pairs, require_collected, resolve_pairs
from matlens.models.anatomy import Anatomy
from matlens.models.identity import ModelIdentity
from matlens.models.readout import Readout
from matlens.signatures import checked
from matlens.storage.tables import COLUMNS, read_table, write_results

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TRAIN, VALIDATION, MAPS, RESULTS = "train", "validation", "maps", "results"


@checked
def collect_parts(
    model: TransformerBridge,
    corpus: Corpus,
    folder: str | Path,
    *,
    n_train: int,
    n_validation: int,
    seed: int = 0,
    positions: Positions = "drawn",
    draw_special: bool = True,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> tuple[Activations, Activations]:
    """Split a corpus and collect the stream on both parts, into ``train/`` and ``validation/``.

    With ``positions="all"`` maps are fitted on every token of the training part; the validation part
    keeps one drawn position a sentence, so that its numbers compare.
    """
    if positions == "all" and is_masked(model):
        raise InputError(
            "All positions of a masked-LM model cannot be used: only the drawn token of each sentence is "
            "masked, and the others are no predictions. Expected positions='drawn'."
        )
    if positions == "all" and not draw_special:
        raise InputError("All positions include the special tokens: skip them only with drawn positions.")
    train, validation = corpus.split(n_train=n_train, n_validation=n_validation, seed=seed)
    collected = []
    for name, part, where in ((TRAIN, train, positions), (VALIDATION, validation, "drawn")):
        examples = make_examples(model, part, seed=seed, draw_special=draw_special)
        if examples.n_truncated:
            tqdm.write(f"{examples.n_truncated} sentences of {part.name} were cut at the model's context.")
        collected.append(
            collect(
                model, examples, positions=where, folder=Path(folder) / name,
                batch_tokens=batch_tokens, progress=progress,
            )
        )  # fmt: skip
    return collected[0], collected[1]


@checked
def fit_maps(
    folder: str | Path,
    *,
    pairs: Pairs = "all",
    intercept: bool = False,
    ridge: float = 0.0,
    progress: bool = True,
) -> MapSet:
    """Fit maps between layers of the stream on ``train/``, into ``maps/``.

    Parameters
    ----------
    pairs
        ``"all"`` for every ``0 <= l < l' <= L``, ``"last"`` for those onto ``L``, or a list of pairs.
    intercept, ridge
        Off by default, as in the paper.
    """
    train = Activations.load(Path(folder) / TRAIN)
    if not 0 <= ridge < float("inf"):
        raise InputError(f"The ridge penalty is {ridge}. Expected 0 or more.")
    wanted = resolve_pairs(pairs, train.provenance.identity.n_layers)
    require_collected(wanted, train)
    d_model = train.provenance.identity.d_model
    if train.n_rows < 2 * d_model and not ridge:
        tqdm.write(
            f"Only {train.n_rows} samples for {d_model} dimensions: least squares follows their noise, and "
            "r2 on other sentences can be far below zero. More sentences, all positions or a ridge help.",
            file=sys.stderr,
        )
    origin = train.provenance.samples.with_details(n_samples=train.n_rows, intercept=intercept, ridge=ridge)

    def fit(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
        maps = fit_samples(train, missing, intercept=intercept, ridge=ridge)
        return tqdm(maps, total=len(missing), desc="fitting", unit="map", disable=not progress, delay=1)

    return write_maps(Path(folder) / MAPS, wanted, fit, origin)


@checked
def evaluate_maps(model: TransformerBridge, folder: str | Path, *, progress: bool = True) -> pd.DataFrame:
    """Evaluate ``maps/`` on ``validation/``, into ``results.csv`` and ``results.json``.

    Predictions are read from maps onto the last layer; where there are none, only r2 is evaluated.
    """
    folder = Path(folder)
    maps, validation = MapSet.load(folder / MAPS), Activations.load(folder / VALIDATION)
    maps.provenance.require_same(ModelIdentity.from_model(model), ours="the maps")
    if (folder / TRAIN / "config.json").is_file():
        train = Activations.load(folder / TRAIN)
        fitted, there = maps.provenance.samples.to_json(), train.provenance.samples.to_json()
        differing = [key for key in there if fitted.get(key) != there[key]]
        if differing:
            raise InputError(
                f"The maps in {folder / MAPS} were fitted on other samples than {folder / TRAIN} holds "
                f"({', '.join(differing)} differ), so they may have seen the validation sentences. Remove "
                f"{folder / MAPS} and fit again."
            )
    readout = Readout(model)
    parts = [fit_quality(maps, validation, progress=progress)]
    if any(target == str(Anatomy.from_model(model).stream[-1]) for _, target in maps):
        parts.append(prediction_quality(readout, maps, validation, progress=progress))
    results = pd.concat([part.astype({"k": "Int64"}) for part in parts], ignore_index=True)
    write_results(folder, RESULTS, results, origin_of(maps, validation))
    return results


@checked
def origin_of(maps: MapSet, validation: Activations) -> dict[str, Any]:
    """What maps were fitted on, and what they were tested on."""
    return {"maps": maps.provenance.to_json(), "validation": validation.provenance.to_json("data")["data"]}


@checked
def plot_results(folder: str | Path, *, title: str | None = None) -> list[Path]:
    """Draw ``r2`` and ``prediction`` from ``results.csv``, as PNG and PDF; returns what was written.

    Parameters
    ----------
    title
        Title of both figures, instead of their own.
    """
    results = read_results(folder)
    figures = (("r2", plots.r2_heatmaps, FIT), ("prediction", plots.prediction, PREDICTION))
    written = []
    for name, draw, experiment in figures:
        part = results[results["experiment"] == experiment]
        if not part.empty:
            written += plots.save(draw(part), folder, name, title=title)
            continue
        for suffix in ("png", "pdf"):  # a figure of an earlier table
            (Path(folder) / f"{name}.{suffix}").unlink(missing_ok=True)
    return written


@checked
def read_results(folder: str | Path) -> pd.DataFrame:
    """Read the table that `evaluate_maps` has written.

    Raises
    ------
    InputError
        There is none, or its columns are others.
    """
    path = Path(folder) / f"{RESULTS}.csv"
    numbers = dict.fromkeys(("layer", "target", "n"), "int64") | dict.fromkeys(
        ("value", "low", "high"), "float64"
    )
    results = read_table(
        path, dict.fromkeys(COLUMNS, "str") | numbers | {"k": "Int64"}, what="a table of results",
        made_by="'matlens evaluate' writes it.", keep_default_na=True,
    )  # fmt: skip
    if FIT not in set(results["experiment"]) or not set(results["method"]) <= {"mat", "id"}:
        raise InputError(
            f"{path} is not a whole table of results: expected rows of {FIT}, for the methods "
            "mat and id. 'matlens evaluate' writes it."
        )
    return results
