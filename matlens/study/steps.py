"""The folder of a study, listed in ``run.json``, and the steps after collecting: fit, evaluate and plot."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from matlens import parallel, plots
from matlens.activations.activations import Activations
from matlens.data.overlap import OverlapWarning, fitted_on
from matlens.errors import InputError, InputWarning, NonNegative, checked
from matlens.io.artifact import is_finished, make_config, software_versions
from matlens.io.files import checksummed, content_hash, describe_file, read_json, write_files
from matlens.io.tables import COLUMNS, check_described, read_table, write_results
from matlens.io.verification import RUN_RECORD
from matlens.lens.evaluation import FIT, PREDICTION, fit_quality, prediction_quality
from matlens.linear.fitting import fit_samples, fitting_bar
from matlens.linear.least_squares import are_few, warn_if_few
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet, write_maps
from matlens.linear.pairs import Pairs, check_collected, resolve_pairs
from matlens.linear.streaming import StoredLeastSquares
from matlens.models.identity import ModelIdentity
from matlens.models.inputs import ENCODER, stack_of
from matlens.models.layout import ModelLayout
from matlens.models.readout import Readout
from matlens.study.plan import check_fit, check_solve

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TRAIN, VALIDATION, MAPS, RESULTS = "train", "validation", "maps", "results"
STATISTICS = "statistics"  # in place of TRAIN, where no vectors are stored
HOLDS = {TRAIN: "activations", VALIDATION: "activations", STATISTICS: "sufficient statistics", MAPS: "maps"}
FIGURES = tuple(f"{name}.{suffix}" for name in ("r2", "prediction") for suffix in ("png", "pdf"))
_PLENTY = 10  # samples per dimension above which a map worse than `id` does not lack samples


def has_statistics(folder: Path) -> bool:
    """Whether the training part of a study exists as sufficient statistics, and not as vectors."""
    return is_finished(folder / STATISTICS) and not (folder / TRAIN).is_dir()


def write_list(folder: Path) -> None:
    """List the results in a folder with their hashes, and its finished folders."""
    names = [name for name in (f"{RESULTS}.csv", f"{RESULTS}.json", *FIGURES) if (folder / name).is_file()]
    files = {name: describe_file(folder / name) for name in names}
    config = make_config("results", {"folders": [name for name in HOLDS if is_finished(folder / name)]})
    write_files({folder / RUN_RECORD: checksummed({**config, "finished": True, "files": files})})


@checked
def fit_maps(
    folder: str | Path,
    *,
    pairs: Pairs = "all",
    intercept: bool = False,
    ridge: NonNegative | None = 0.0,
    progress: bool = True,
) -> MapSet:
    """Fit maps between layers of the stream on ``train/`` or ``statistics/``, into ``maps/``.

    Parameters
    ----------
    pairs
        ``"all"`` for every ``0 <= l < l' <= L``, or all with sufficient statistics; ``"last"`` for those onto
        ``L``; or a list of pairs.
    intercept, ridge
        Off by default, as in the paper. With ``ridge=None`` the penalty is 0 where samples are at least twice
        as many as the width of the model, and else what `typical_penalty` gives.
    """
    folder = Path(folder)
    samples = _training_samples(folder)
    provenance, width = samples.provenance, samples.provenance.identity.d_model
    if isinstance(samples, Activations):
        n, requested, provenance = samples.n_rows, resolve_pairs(pairs, provenance), provenance.samples
        check_collected(requested, samples)
    else:
        samples.check_complete()
        n, requested = samples.n_samples, samples.pairs
        if pairs != "all":
            requested = resolve_pairs(pairs, provenance)
    few, penalty = are_few(n, width), ridge
    if penalty is None:
        penalty = typical_penalty(samples, (source for source, _ in requested)) if few else 0.0
    if isinstance(samples, Activations):  # statistics have theirs
        provenance = provenance.with_details(**fitted_on(samples.examples))
    origin = provenance.with_details(n_samples=n, intercept=intercept, ridge=penalty)

    def fit(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
        if not missing:
            return ()
        if isinstance(samples, Activations):
            check_fit(n, width, missing)
            maps = fit_samples(samples, missing, intercept=intercept, ridge=penalty)
        elif parallel.is_main():
            check_solve(samples, missing)
            if not penalty:
                warn_if_few(n, width)
            maps = samples.solve(missing, intercept=intercept, ridge=penalty, provenance=origin)
        else:
            return ()
        return fitting_bar(maps, len(missing), progress=progress)

    return write_maps(folder / MAPS, requested, fit, origin)


def _training_samples(folder: Path) -> Activations | StoredLeastSquares:
    """What maps of a study are fitted on."""
    if has_statistics(folder):
        return StoredLeastSquares(folder / STATISTICS)
    return Activations.load(folder / TRAIN)


def typical_penalty(samples: Activations | StoredLeastSquares, sources: Iterable[str]) -> float:
    """A ridge for few samples: the squared norm of a typical sample.

    The median over samples, then over sources, to two digits. So one sample in a direction counts no more
    than the penalty.
    """
    medians = []
    for source in dict.fromkeys(sources):
        vectors: Any = samples[source]
        if isinstance(samples, Activations):
            medians.append(vectors.double().square().sum(1).median())
        else:  # which have norms where samples are few
            medians.append(vectors.norms.median())
    return float(f"{float(torch.stack(medians).median()):.1e}")


@checked
def evaluate_maps(
    model: TransformerBridge, folder: str | Path, *, strict: bool = True, progress: bool = True
) -> pd.DataFrame:
    """Evaluate ``maps/`` on ``validation/``, into ``results.csv`` and ``results.json``.

    Prediction metrics are of maps onto the last layer; without such maps, or for an encoder, only r2 is
    evaluated. Results of exactly these maps, vectors, model and software are not computed again. With
    ``strict=False`` the model may differ from the one that was collected from, as in another precision.
    """
    folder = Path(folder)
    fitted = MapSet.load(folder / MAPS)
    _check_fitted_here(fitted, folder)
    maps = fitted.on(model, strict=strict)
    validation = Activations.load(folder / VALIDATION)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputWarning)  # the maps have warned
        validation.provenance = validation.provenance.on(
            maps.provenance.identity, ours="the activations", strict=strict
        )
    evaluation = _evaluation_digest(model, folder)
    if (existing := _existing_results(folder, evaluation)) is not None:
        return existing
    parts = [fit_quality(maps, validation, progress=progress)]
    last = str(ModelLayout.from_model(model).stream[-1])
    if stack_of(model) != ENCODER and any(target == last for _, target in maps):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OverlapWarning)  # fit_quality has warned
            parts.append(prediction_quality(Readout(model), maps, validation, progress=progress))
    results = pd.concat([part.astype({"k": "Int64"}) for part in parts], ignore_index=True)
    origin = origin_of(maps, validation, results)
    write_results(folder, RESULTS, results, origin | {"evaluation": evaluation})
    write_list(folder)
    return results


def _existing_results(folder: Path, evaluation: str) -> pd.DataFrame | None:
    """The results of an equal evaluation; None if there are none, or damaged ones."""
    try:
        described = read_json(folder / f"{RESULTS}.json")
        if isinstance(described, dict) and described.get("evaluation") == evaluation:
            return read_results(folder)
    except (OSError, InputError):
        pass
    return None


def _evaluation_digest(model: TransformerBridge, folder: Path) -> str:
    """A digest of everything an evaluation depends on, from the configs of folders."""
    configs = {name: describe_file(folder / name / "config.json") for name in (MAPS, VALIDATION)}
    identity = ModelIdentity.from_model(model).to_json()
    return content_hash({**configs, "model": identity, "software": software_versions()})


def _check_fitted_here(maps: MapSet, folder: Path) -> None:
    """Refuse maps of other training samples, which may have seen the validation sentences."""
    if not has_statistics(folder) and not is_finished(folder / TRAIN):
        return
    fitted = maps.provenance.samples.to_json()
    stored = _training_samples(folder).provenance.samples.to_json()
    differing = [key for key in stored if fitted.get(key) != stored[key]]
    if differing:
        raise InputError(
            f"The maps in {folder / MAPS} were fitted on other samples than those in {folder} "
            f"({', '.join(differing)} differ), so they may have seen the validation sentences. Remove "
            f"{folder / MAPS} and fit again."
        )


@checked
def origin_of(maps: MapSet, validation: Activations, results: pd.DataFrame | None = None) -> dict[str, Any]:
    """Training samples of maps, whether they are sufficient, and the validation samples."""
    fit = maps.provenance.to_json()
    validated = validation.provenance.to_json("data")["data"]
    return {"maps": fit, "note": _note_on_samples(fit, results), "validation": validated}


@checked
def plot_results(folder: str | Path) -> list[Path]:
    """Draw ``r2`` and ``prediction`` from ``results.csv``, as PNG and PDF; returns their paths."""
    results = read_results(folder)
    figures = (("r2", plots.plot_r2, FIT), ("prediction", plots.plot_layers, PREDICTION))
    written = []
    for name, draw, experiment in figures:
        part = results[results["experiment"] == experiment]
        if not part.empty:
            written += plots.save(draw(part), Path(folder) / name)
            continue
        for suffix in ("png", "pdf"):  # a figure of an earlier table
            (Path(folder) / f"{name}.{suffix}").unlink(missing_ok=True)
    write_list(Path(folder))
    return written


@checked
def read_results(folder: str | Path) -> pd.DataFrame:
    """Read the table that `evaluate_maps` has written."""
    path = Path(folder) / f"{RESULTS}.csv"
    if path.is_file() and not check_described(path):
        raise InputError(
            f"{path.with_suffix('.json')} is missing, so {path.name} cannot be verified. Run 'matlens "
            f"evaluate {folder}' again."
        )
    dtypes = dict.fromkeys(("layer", "target", "n"), "int64") | dict.fromkeys(
        ("value", "low", "high"), "float64"
    )
    return read_table(
        path, dict.fromkeys(COLUMNS, "str") | dtypes | {"k": "Int64"}, what="a table of results",
        made_by="'matlens evaluate' writes it.", keep_default_na=True,
    )  # fmt: skip


def _note_on_samples(fit: Mapping[str, Any], results: pd.DataFrame | None = None) -> str | None:
    """A warning if maps were fitted on too few samples, from their provenance and their r2; else ``None``.

    Without a ridge that is fewer than twice as many as dimensions, or fewer than ten times as many where r2
    of a map is below that of ``id``, which fits nothing.
    """
    n, width, ridge = fit.get("n_samples"), (fit.get("model") or {}).get("d_model"), fit.get("ridge", 0)
    if n is None or width is None:
        return None
    few = f"The maps were fitted on {n:,} samples, which is few for {width:,} dimensions"
    if ridge:
        return f"{few}: a ridge of {ridge:g} limits their noise." if are_few(n, width) else None
    remedy = "Use more sentences (--train) or a penalty (--ridge)."
    if results is not None and n < _PLENTY * width:
        r2 = results[results["metric"] == "r2"].pivot_table("value", ["layer", "target"], "method")
        worse = int((r2["mat"] < r2["id"]).sum()) if {"mat", "id"} <= {*r2} else 0
        if worse:
            return f"{few}: r2 of mat is below that of id for {worse} of {len(r2)} pairs of layers. {remedy}"
    return f"{few}: most of their error on other sentences is noise. {remedy}" if are_few(n, width) else None
