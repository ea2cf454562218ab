"""The atlas: how linear each part of a model is, and the cost of replacing it.

One pass over training text gives the statistics for the maps and most scores. The other scores are from
held-out text, where every part is replaced and removed in passes that start at the changed block.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import metrics, parallel
from matlens.activations.collecting import collect, stream
from matlens.activations.sinks import find_sinks
from matlens.data.examples import Examples
from matlens.data.overlap import fitted_on, warn_of_overlap
from matlens.errors import InputError, PositiveInt, checked
from matlens.ffn.perplexity import TextLosses, warn_of_few
from matlens.io.artifact import Artifact
from matlens.io.tables import result_row, result_table
from matlens.linear.maps import LinearMap
from matlens.linearity.parts import JUMPS, Part, model_parts
from matlens.linearity.ranking import AGREEMENT, GROUPS, LOSS_INCREASE, Tokens, first_parts
from matlens.linearity.scores import PartSums, held_out_scores
from matlens.metrics import Estimate
from matlens.models.hooks import run_of_functions
from matlens.models.identity import Provenance
from matlens.models.layout import ModelLayout
from matlens.models.readout import Readout
from matlens.models.sites import STREAM
from matlens.parallel import Bar
from matlens.patching.replacements import Replacement, Where
from matlens.patching.variants import Variant, run_variants

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

ATLAS = "linearity"  # the experiment
MAP, REMOVED = "map", "removed"
ALL: Tokens = "all"
NO_SINKS: Tokens = "no sinks"
TOGETHER = "together"
_HOLDS, _SCORES = "atlas of linearity", "scores"
_NOTES = "rows and seconds of every step"
_TO_FIT = "whether there is something to fit"
_PLACES = 256  # rows per readout
Row = dict[str, Any]


@checked
def linearity_atlas(
    model: TransformerBridge,
    fitted: Examples,
    evaluated: Examples,
    *,
    folder: str | Path | None = None,
    jumps: Sequence[int] = JUMPS,
    every: PositiveInt = 1,
    progress: bool = True,
) -> pd.DataFrame:
    """Score every part of a model, replace it by its map, and remove it.

    A row per part and value, with the columns ``kind``, ``tokens`` and ``parts``. Scores have the method
    ``map``: ``r2`` and ``r2 of the variance`` on the text to evaluate on; ``procrustes``, ``rotation`` and
    ``nbl bound`` on the text to fit on. ``loss increase``, in nats per token with a 95% interval over texts,
    and ``agreement`` of the top token with the model's have the methods ``map`` and ``removed``. ``tokens``
    is ``all``, or ``no sinks`` where maps are fitted, evaluated and used at all tokens but attention sinks.
    Rows of the kind ``together`` are of the three cheapest parts of a group, replaced together. Several
    processes divide the training text, and all return the table.

    Parameters
    ----------
    fitted, evaluated
        Training text, with several times as many tokens as ``d_model``, and other text to evaluate on, see
        `matlens.data.make_windows` with ``targets=True``.
    folder
        Where finished layers are stored, by default nowhere. An interrupted call resumes there.
    jumps
        Numbers of blocks that a jump skips.
    every
        Use every n-th block, starting with the first.
    """
    if not len(evaluated.targets):
        raise InputError("evaluated must have targets. Use matlens.data.make_windows(..., targets=True).")
    warn_of_few(len(evaluated))
    readout = Readout(model)
    provenance = Provenance.from_model(model, data=fitted.provenance, examples=fitted.fingerprint)
    warn_of_overlap([provenance.with_details(**fitted_on(fitted))], evaluated, "The maps")
    request = {
        "provenance": provenance.to_json(),
        "run_of_functions": run_of_functions(model),
        "evaluated": {**evaluated.provenance, "examples": evaluated.fingerprint},
        "jumps": list(jumps),
        "every": every,
        "notes": _NOTES,
    }
    parts = [
        part for part in model_parts(ModelLayout.from_model(model), jumps=jumps) if part.layer % every == 0
    ]
    parallel.check_same([request, None if folder is None else str(folder)], "the job of the atlas")
    rows: list[Row] = []
    if not parallel.is_main():
        if parallel.broadcast(None, _TO_FIT):
            sum_parts(model, fitted, parts, progress=progress)
        return _table(parallel.broadcast(rows, "rows of the atlas"))
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(TemporaryDirectory()), "atlas")
        with parallel.alone():
            artifact = stack.enter_context(Artifact.writing(place, _HOLDS, request))
        names = [_SCORES, *(f"layer-{layer}" for layer in sorted({part.layer for part in parts})), TOGETHER]
        steps = {name: artifact.read_json(name) for name in names}
        missing = [] if artifact.finished else [name for name in names if steps[name] is None]
        if parallel.broadcast(bool(missing), _TO_FIT):
            begun = time.process_time()
            sums = sum_parts(model, fitted, parts, progress=progress)
            with parallel.alone():
                atlas = _Atlas(model, readout, evaluated, parts, sums, provenance)
                for name in Bar(missing, desc="replacing", unit="step", disable=not progress):
                    known = [row for step in steps.values() if step is not None for row in step["rows"]]
                    made, now = atlas.rows_of(name, known), time.process_time()
                    step = {"rows": made, "seconds": round(now - begun, 3)}
                    artifact.write_json(name, step)
                    steps[name], begun = step, now
        if not artifact.finished:
            with parallel.alone():
                artifact.finish()
        rows = [row for step in steps.values() if step is not None for row in step["rows"]]
    return _table(parallel.broadcast(rows, "rows of the atlas"))


def _table(rows: list[Row]) -> pd.DataFrame:
    return result_table(rows, "kind", "tokens", "parts")


@checked
def atlas_seconds(folder: str | Path) -> float:
    """CPU seconds of the atlas in a folder over all steps and calls, in the main process."""
    artifact = Artifact.open(folder, _HOLDS)
    steps = [artifact.read_json(name.removesuffix(".json")) or {} for name in artifact.files]
    return round(sum(float(step["seconds"]) for step in steps), 3)


@checked
def sum_parts(
    model: TransformerBridge, examples: Examples, parts: Sequence[Part], *, progress: bool = True
) -> PartSums:
    """Sums of all parts from one pass; `solve` gives their maps with and without attention sinks.

    The pass is divided over processes; the sums are complete in the main one.
    """
    layout = ModelLayout.from_model(model)
    sums = PartSums(parts, layout.d_model, same_sites(layout))
    sinks = _flat(find_sinks(model, examples, progress=progress), examples)
    for rows in stream(model, examples, sums.sites, positions="all", progress=progress, divided=True):
        sums.update(rows.vectors, sinks[torch.from_numpy(rows.index)])
    sums.gather()
    return sums


class _Atlas:
    """The maps and scores of all parts, and the original model's losses on the text to evaluate on."""

    def __init__(
        self, model: TransformerBridge, readout: Readout, evaluated: Examples, parts: Sequence[Part],
        sums: PartSums, provenance: Provenance,
    ) -> None:  # fmt: skip
        self._model, self._readout, self._evaluated, self._parts = model, readout, evaluated, parts
        self._name = provenance.model_name
        self._sinks = find_sinks(model, evaluated, progress=False)
        self._modes: list[Tokens] = [ALL, NO_SINKS] if bool(self._sinks.any()) else [ALL]
        last = str(ModelLayout.from_model(model).stream[-1])
        self._losses, self._top = self._read(collect(model, evaluated, [last], progress=False)[last])
        self._solved: dict[tuple[Part, str], tuple[LinearMap, dict[str, float]]] = {
            (part, ALL if with_sinks else NO_SINKS): (linear, scores)
            for part, with_sinks, linear, scores in sums.solve(replace(provenance, positions="all"))
        }

    def rows_of(self, step: str, known: Sequence[Row]) -> list[Row]:
        """The rows of a step; ``known`` are those of the steps before."""
        if step == _SCORES:
            return self._score_rows()
        if step == TOGETHER:
            return self._together_rows(pd.DataFrame(known))
        return self._cost_rows([part for part in self._parts if step == f"layer-{part.layer}"])

    def _score_rows(self) -> list[Row]:
        examples, sites = self._evaluated, {site for part in self._parts for site in part.ends}
        samples = collect(self._model, examples, sorted(sites), positions="all", progress=False)
        sinks = _flat(self._sinks, examples)
        rows = []
        for part, mode in itertools.product(self._parts, self._modes):
            chosen = torch.ones_like(sinks) if mode == ALL else ~sinks
            x, y = samples[part.source][chosen], samples[part.target][chosen]
            linear, scores = self._solved[part, mode]
            rows += [
                self._row(part, MAP, mode, metric, Estimate.without_interval(value, len(y)))
                for metric, value in (held_out_scores(linear(x), y) | scores).items()
            ]
        return rows

    def _cost_rows(self, parts: Sequence[Part]) -> list[Row]:
        """Loss increase and agreement with each part replaced or removed."""
        ways = [*((MAP, mode) for mode in self._modes), (REMOVED, ALL)]
        cases = {f"{i}": (part, *way) for i, (part, way) in enumerate(itertools.product(parts, ways))}
        variants = {
            name: self._variant([part], method, tokens) for name, (part, method, tokens) in cases.items()
        }
        vectors = run_variants(self._model, self._evaluated, variants, progress=False)
        return [
            self._row(*case, metric, estimate)
            for name, case in cases.items()
            for metric, estimate in self._costs(vectors[name]).items()
        ]

    def _together_rows(self, table: pd.DataFrame) -> list[Row]:
        """The parts that cost least alone, replaced together."""
        by_key = {(part.kind, part.layer): part for part in self._parts}
        rows = []
        for group, mode in itertools.product(GROUPS, self._modes):
            chosen = [by_key[key] for key in first_parts(table, group=group, tokens=mode)]
            if len(chosen) < 2:
                continue
            variants = {"0": self._variant(chosen, MAP, mode)}
            vectors = run_variants(self._model, self._evaluated, variants, progress=False)["0"]
            more = {
                "layer": None, "target": None, "kind": f"{TOGETHER}: {group}",
                "parts": ", ".join(part.name for part in chosen),
            }  # fmt: skip
            for metric, estimate in self._costs(vectors).items():
                rows.append(self._row(chosen[0], MAP, mode, metric, estimate) | more)
        return rows

    def _variant(self, parts: Sequence[Part], method: str, tokens: str) -> Variant:
        where: Where = "all" if tokens == ALL else ~self._sinks
        replacements = [
            part.removed(where)
            if method == REMOVED
            else Replacement.from_map(self._solved[part, tokens][0], where=where)
            for part in parts
        ]
        return Variant(min(part.layer for part in parts), replacements)

    @torch.no_grad()
    def _read(self, h: Float[Tensor, "n d_model"]) -> tuple[np.ndarray, np.ndarray]:
        """``-ln p`` of the target and the top token at each position; infinite if ``h`` is."""
        losses, top = np.full(len(h), np.inf), np.full(len(h), -1)
        truth = torch.from_numpy(self._evaluated.targets)
        for part in torch.arange(len(h)).split(_PLACES):
            part = part[h[part].isfinite().all(1)]
            if len(part):
                log_p = self._readout.log_probs(h[part])
                of_truth = log_p.gather(1, truth[part, None].to(log_p.device))[:, 0]
                losses[part.numpy()] = -of_truth.cpu().double().numpy()
                top[part.numpy()] = log_p.argmax(1).cpu().numpy()
        return losses, top

    def _costs(self, h: Float[Tensor, "n d_model"]) -> dict[str, Estimate]:
        losses, top = self._read(h)
        return {
            LOSS_INCREASE: loss_increase(losses, self._losses, self._evaluated.sentences),
            AGREEMENT: metrics.proportion(torch.from_numpy(top == self._top)),
        }

    def _row(self, part: Part, method: str, tokens: str, metric: str, estimate: Estimate) -> Row:
        corpus = str(self._evaluated.provenance.get("corpus", "unnamed"))
        row = result_row(
            ATLAS, model=self._name, corpus=corpus, method=method, layer=part.layer, target=part.end,
            metric=metric, estimate=estimate, kind=part.kind, tokens=tokens, parts="",
        )  # fmt: skip
        return row | {"k": None}


def loss_increase(losses: np.ndarray, whole: np.ndarray, texts: np.ndarray) -> Estimate:
    """Mean difference of the losses of all tokens, in nats, with its 95% interval over texts."""
    text_ids, index, counts = np.unique(texts, return_inverse=True, return_counts=True)
    if not np.isfinite(losses).all():
        return Estimate.without_interval(np.inf, len(text_ids))
    ours, theirs = (TextLosses(np.bincount(index, weights=each), counts) for each in (losses, whole))
    value, low, high = (float(np.log(each)) for each in ours.ratio(theirs)[:3])
    return Estimate(value, low, high, len(text_ids))


def same_sites(layout: ModelLayout) -> dict[str, str]:
    """Sites with the same vectors as another, from sums of the wiring with one term."""
    return {
        f"{total}.{layer}": f"{terms[0]}.{layer}"
        for total, terms in layout.wiring.sums
        if len(terms) == 1 and total in layout.kinds and terms[0] in (STREAM, *layout.kinds)
        for layer in range(layout.n_layers)
    }


def _flat(of_places: Bool[Tensor, "n longest"], examples: Examples) -> Bool[Tensor, " n_tokens"]:
    """A mask by sentence and position, flattened over tokens."""
    tokens = examples.at_positions("all")
    return of_places[torch.from_numpy(tokens.sentences), torch.from_numpy(tokens.positions)]
