"""Compare the quality and cost of lenses fitted on the same tokens."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from matlens.activations.activations import Positions
from matlens.activations.collecting import collect
from matlens.activations.sinks import SinkWarning, sink_rows
from matlens.data.corpus import Corpus
from matlens.data.making import make_examples
from matlens.data.overlap import OverlapWarning, fitted_on, warn_of_overlap
from matlens.data.readers import is_masked
from matlens.errors import InputError, PositiveInt, Seed, checked, short
from matlens.io.tables import check_columns, check_one
from matlens.lens import trained
from matlens.lens.closed_forms import layers_read, resolve_layers
from matlens.lens.config import LensConfig, Method, parse_methods
from matlens.lens.early_exit import exit_sweep, savings
from matlens.lens.evaluation import AGAINST, evaluate_lenses
from matlens.lens.lens import Lens
from matlens.lens.open_sets import EvaluationItem, evaluate_open_sets
from matlens.models.identity import Provenance
from matlens.models.readout import Readout

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
def default_methods(model: TransformerBridge) -> list[Method]:
    """Default methods; ``tuned`` and ``jacobian`` take minutes per layer and are excluded."""
    standardised = [LensConfig(standardise=True), LensConfig(standardise=True, intercept=True)]
    if not trained.best_start(model).standardise:  # the head does not start with a norm
        standardised = []
    penalised = LensConfig(ridge="loo", toward="identity")
    return [
        "id", "mat", "affine", penalised, LensConfig(weighted=True), *standardised, "scaled", "polished"
    ]  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Tables of `evaluate_lenses`, `exit_sweep` and `evaluate_open_sets`, and the lenses by name."""

    report: pd.DataFrame
    exits: pd.DataFrame
    evaluations: pd.DataFrame | None
    lenses: Mapping[str, Lens]
    origin: Mapping[str, Any] = field(repr=False)


@checked
def compare_lenses(
    model: TransformerBridge,
    parts: tuple[Corpus, Corpus],
    folder: str | Path,
    *,
    methods: Sequence[Method] | None = None,
    fitted: Mapping[str, tuple[Lens, float]] | None = None,
    layers: Sequence[int] | None = None,
    against: str | None = None,
    n_prompts: PositiveInt = trained.PROMPTS,
    longest: PositiveInt = trained.LONGEST,
    evaluations: Mapping[str, Sequence[EvaluationItem]] | None = None,
    seed: Seed = 0,
    progress: bool = True,
) -> Comparison:
    """Fit lenses on one part of a corpus, and evaluate all on the same tokens of the other.

    Lenses are fitted at every token of the training sentences, or at their masks, and evaluated at one
    sampled token of each validation sentence, so that tokens are independent.

    Parameters
    ----------
    parts
        The training and the validation sentences, as `Corpus.split` gives them.
    folder
        Folder of the vectors, which can be removed afterwards; an interrupted run resumes there.
    methods
        See `Lens.fit`; by default `default_methods` of the model.
    fitted
        More lenses by name, on the model, each with the CPU seconds of its fit.
    layers
        By default a sixth, a third, a half, two thirds and five sixths of the way.
    against
        The reference lens of paired differences, by default ``mat`` if present.
    n_prompts, longest, seed
        See `Lens.fit`.
    evaluations
        Open sets to evaluate as well, see `read_evaluations`; decoders only.
    """
    configs = parse_methods(default_methods(model) if methods is None else methods)
    if repeated := [name for name in fitted or () if name in configs]:
        raise InputError(f"fitted must have names other than the methods, got {short(repeated)}.")
    names = [*configs, *(fitted or {})]
    if against is None:
        against = "mat" if "mat" in names else None
    elif against not in names:
        raise InputError(f"against must be one of {short(names)}, got {short(against)}.")
    masked, last = is_masked(model), int(model.cfg.n_layers)
    if masked and "jacobian" in configs:
        raise InputError("methods must not have 'jacobian' for a masked-LM model.")
    if layers is None:
        chosen = sorted({max(1, round(last * share / 6)) for share in range(1, 6)} - {last}) or [0]
    else:
        chosen = list(resolve_layers(layers, last))
    sites = layers_read([config for config in configs.values() if config is not None], chosen, last)
    place: Positions = "sampled" if masked else "all"
    fitting, evaluated = (make_examples(model, part, seed=seed) for part in parts)
    fits = [Provenance(details=fitted_on(fitting)), *(lens.provenance for lens, _ in (fitted or {}).values())]
    warn_of_overlap(fits, evaluated, "The lenses")
    train = collect(
        model, fitting, sites, positions=place,
        folder=Path(folder) / f"lens-rows-{'all' if len(sites) > last else '-'.join(map(str, chosen))}",
        progress=progress,
    )  # fmt: skip
    validation = collect(
        model, evaluated, folder=Path(folder) / "lens-validation",
        progress=progress,
    )  # fmt: skip
    readout, made = Readout(model), dict(fitted or {})
    for name, config in configs.items():
        begin = time.process_time()
        lens = Lens.fit(
            model, parts[0] if name == "jacobian" else train, method=config or name, layers=chosen, seed=seed,
            n_prompts=n_prompts, longest=longest, progress=progress,
        )  # fmt: skip
        seconds = 0.0 if name == "id" else time.process_time() - begin
        made[name] = replace(lens, readout=readout), seconds
    lenses = {name: made[name][0] for name in names}
    evaluated_at = [layer for layer in chosen if all(layer in lens.layers for lens in lenses.values())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SinkWarning)
        sinks = sink_rows(validation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverlapWarning)  # all lenses were compared above
        report = evaluate_lenses(
            lenses, validation, layers=evaluated_at, sinks=sinks, against=against,
            seconds={name: made[name][1] for name in names}, progress=progress,
        )  # fmt: skip
        exits = exit_sweep(lenses, validation, layers=evaluated_at, progress=progress)
    read = None
    if evaluations is not None:
        read = evaluate_open_sets(lenses, evaluations, layers=evaluated_at, progress=progress)
    details = {name: lens.provenance.details for name, lens in lenses.items()}
    transfers = {name: lens.provenance.transfer for name, lens in lenses.items()}
    origin = {
        **validation.provenance.to_json("model", "data"),
        "train": train.provenance.to_json("data", "positions"), "n_rows": train.n_rows,
        "strengths": {name: its["strengths"] for name, its in details.items() if "strengths" in its},
        "layers": chosen, "methods": names, "seed": seed, "n_sinks": int(sinks.sum()),
    }  # fmt: skip
    if moved := {name: its["transferred_from"] for name, its in transfers.items() if its}:
        origin["transferred_from"] = moved
    if jacobian_details := details.get("jacobian"):
        origin |= {
            "n_prompts": jacobian_details["n_fitted"], "n_prompt_tokens": jacobian_details["n_tokens"]
        }  # fmt: skip
    return Comparison(report, exits, read, lenses, origin)


@checked
def summarize(report: pd.DataFrame, exits: pd.DataFrame) -> pd.DataFrame:
    """One row per lens: metrics averaged over layers, layers saved at 95%, and costs."""
    columns = ["method", "layer", "metric", "k", "value", AGAINST]
    check_columns(report, columns, what="the table of lens.evaluate_lenses")
    check_one(report, exits)
    plain = report[report[AGAINST].fillna("") == ""]
    names = [m if pd.isna(k) else f"P@{int(k)}" for m, k in zip(plain["metric"], plain["k"], strict=True)]
    wide = plain.assign(name=names).pivot_table(
        index="method", columns="name", values="value", aggfunc="mean", sort=False
    )
    order = (
        "P@1", "P@5", "P@10", "surprisal", "kl", "r2", "r2 without sinks", "saved", "seconds", "parameters"
    )  # fmt: skip
    wide = wide.join(savings(exits).set_index("method")["saved"])
    return wide[[name for name in order if name in wide]]
