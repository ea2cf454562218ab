"""What maps are worth on the validation part: ``results.csv`` with ``results.json`` beside it, figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from matlens import plots
from matlens.activations.activations import Activations
from matlens.activations.stored_moments import StoredMoments
from matlens.errors import InputError, checked
from matlens.io.artifact import is_finished
from matlens.io.tables import COLUMNS, check_described, read_table, write_results
from matlens.lens.evaluation import FIT, PREDICTION, fit_quality, prediction_quality
from matlens.linear.mapsets import MapSet
from matlens.linear.samples import are_few
from matlens.models.families.encoder_decoders import ENCODER, stack_of
from matlens.models.identity import ModelIdentity
from matlens.models.layout import ModelLayout
from matlens.models.readout import Readout
from matlens.study.output import MAPS, MOMENTS, RESULTS, RUN, TRAIN, VALIDATION, write_list

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_PLENTY = 10  # samples per dimension from which a map worse than `id` is not for want of samples


@checked
def evaluate_maps(
    model: TransformerBridge,
    folder: str | Path,
    *,
    same_precision: bool = True,
    progress: bool = True,
) -> pd.DataFrame:
    """Evaluate ``maps/`` on ``validation/``, into ``results.csv`` and ``results.json``.

    Predictions are read from maps onto the last layer; where there are none, or the model is an encoder,
    which predicts nothing, only r2 is evaluated.

    Parameters
    ----------
    model, folder
        The model, and the folder of the maps.
    same_precision
        Whether the model must run in the precision that the maps were fitted in. With ``False`` the same
        weights may predict in another one.
    progress
        Whether to show bars.
    """
    folder = Path(folder)
    maps = MapSet.load(folder / MAPS, same_precision=same_precision)
    validation = Activations.load(folder / VALIDATION)
    validation.provenance = replace(validation.provenance, same_precision=same_precision)
    maps.provenance.check_same(ModelIdentity.from_model(model), ours="the maps")
    sources = {
        TRAIN: lambda: Activations.load(folder / TRAIN).provenance,
        MOMENTS: lambda: StoredMoments(folder / MOMENTS).provenance,
    }
    for name in [name for name in sources if is_finished(folder / name)][:1]:
        fitted, there = maps.provenance.samples.to_json(), sources[name]().samples.to_json()
        differing = [key for key in there if fitted.get(key) != there[key]]
        if differing:
            raise InputError(
                f"The maps in {folder / MAPS} were fitted on other samples than {folder / name} holds "
                f"({', '.join(differing)} differ), so they may have seen the validation sentences. Remove "
                f"{folder / MAPS} and fit again."
            )
    parts = [fit_quality(maps, validation, progress=progress)]
    last = str(ModelLayout.from_model(model).stream[-1])
    if stack_of(model) != ENCODER and any(target == last for _, target in maps):
        parts.append(prediction_quality(Readout(model), maps, validation, progress=progress))
    results = pd.concat([part.astype({"k": "Int64"}) for part in parts], ignore_index=True)
    write_results(folder, RESULTS, results, origin_of(maps, validation, results) | {"listed_in": RUN})
    write_list(folder)
    return results


@checked
def origin_of(maps: MapSet, validation: Activations, results: pd.DataFrame | None = None) -> dict[str, Any]:
    """What maps were fitted on, whether that is enough for them, and what they were tested on."""
    fit = maps.provenance.to_json()
    validated = validation.provenance.to_json("data")["data"]
    return {"maps": fit, "note": _note_on_samples(fit, results), "validation": validated}


@checked
def plot_results(folder: str | Path, *, title: str | None = None) -> list[Path]:
    """Draw ``r2`` and ``prediction`` from ``results.csv``, as PNG and PDF; returns what was written.

    Parameters
    ----------
    title
        Title of both figures, instead of their own.
    """
    results = read_results(folder)
    figures = (("r2", plots.plot_r2, FIT), ("prediction", plots.plot_layers, PREDICTION))
    written = []
    for name, draw, experiment in figures:
        part = results[results["experiment"] == experiment]
        if not part.empty:
            written += plots.save(draw(part), Path(folder) / name, title=title)
            continue
        for suffix in ("png", "pdf"):  # a figure of an earlier table
            (Path(folder) / f"{name}.{suffix}").unlink(missing_ok=True)
    write_list(Path(folder))
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
    if path.is_file() and not check_described(path):
        raise InputError(
            f"{path.with_suffix('.json')} is missing, so nothing says that {path.name} is as it was written. "
            f"Run 'matlens evaluate {folder}' again."
        )
    numbers = dict.fromkeys(("layer", "target", "n"), "int64") | dict.fromkeys(
        ("value", "low", "high"), "float64"
    )
    results = read_table(
        path, dict.fromkeys(COLUMNS, "str") | numbers | {"k": "Int64"}, what="a table of results",
        made_by="'matlens evaluate' writes it.", keep_default_na=True,
    )  # fmt: skip
    # Maps between other sites than the stream's have their sites in the name.
    methods = {method for method in results["method"] if not method.startswith("mat ")}
    if FIT not in set(results["experiment"]) or not methods <= {"mat", "id"}:
        raise InputError(
            f"{path} is not a whole table of results: expected rows of {FIT}, for the methods "
            "mat and id. 'matlens evaluate' writes it."
        )
    return results


def _note_on_samples(fit: Mapping[str, Any], results: pd.DataFrame | None = None) -> str | None:
    """A warning if maps were fitted on too few samples, from their provenance and their r2; else ``None``.

    Without a ridge that is fewer than twice as many as dimensions, or fewer than ten times as many where r2
    of a map is below that of ``id``, which fits nothing.
    """
    model = fit.get("model") or {}
    n, width, ridge = fit.get("n_samples"), model.get("d_model"), fit.get("ridge", 0)
    if n is None or width is None:
        return None
    few = f"The maps were fitted on {n:,} samples, which is few for {width:,} dimensions"
    if ridge:
        return f"{few}: a ridge of {ridge:g} limits their noise." if are_few(n, width) else None
    remedy = "Use more sentences (--train), all positions (--positions all) or a penalty (--ridge)."
    if results is not None and n < _PLENTY * width:
        r2 = results[results["metric"] == "r2"].pivot_table("value", ["layer", "target"], "method")
        worse = int((r2["mat"] < r2["id"]).sum()) if {"mat", "id"} <= {*r2} else 0
        if worse:
            return f"{few}: r2 of mat is below that of id for {worse} of {len(r2)} pairs of layers. {remedy}"
    return f"{few}: most of their error on other sentences is noise. {remedy}" if are_few(n, width) else None
