"""The atlas: how linear each part of a model is, and the cost of replacing it.

One pass over training text gives the statistics for the maps and most scores; the rest of the
scores is of held-out text, where every part is replaced and removed in passes that begin where
they differ from the model's own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import metrics, parallel
from matlens.activations.collecting import collect, stream
from matlens.activations.sinks import find_sinks
from matlens.data.examples import Examples
from matlens.errors import InputError, PositiveInt, checked
from matlens.ffn.perplexity import TextLosses
from matlens.io.artifact import Artifact
from matlens.io.tables import result_row, result_table
from matlens.linear.maps import LinearMap
from matlens.linearity.parts import JUMPS, Part, model_parts
from matlens.linearity.ranking import GROUPS, Tokens, first_parts
from matlens.linearity.scores import PartSums, held_out_scores
from matlens.metrics import Estimate
from matlens.models.identity import ModelIdentity, Provenance
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
LOSS_INCREASE, AGREEMENT = "loss increase", "agreement"
ALL: Tokens = "all"
NO_SINKS: Tokens = "no sinks"
TOGETHER = "together"
_HOLDS, _SCORES = "atlas of linearity", "scores"
_NOTES = "rows and seconds of every step"
_TO_FIT = "whether there is something to fit"
_PLACES = 256  # whose distributions are made at once
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
    ``nbl bound`` on the text to fit on. ``loss increase`` is the change of the mean negative log likelihood
    of the right token, in nats, with a 95% interval over texts; ``agreement`` how often the top token
    is that of the model; both for the methods ``map`` and ``removed``. ``tokens`` is ``all``, or ``no sinks``
    where maps are fitted, evaluated and put at all tokens but attention sinks, if there are any. Parts are
    removed at all tokens. Rows of the kind ``together`` are of the three parts of a group that cost least
    alone, replaced together. Several processes divide the text to fit on, and all get the table.

    Parameters
    ----------
    model
        A model with a readout.
    fitted, evaluated
        Text to fit on, several times as many tokens as vectors have coordinates; and other text, see
        `matlens.data.make_windows` with ``targets=True``.
    folder
        Folder of finished layers, to resume an interrupted call. By default nothing is stored.
    jumps
        Over how many blocks jumps go.
    every
        Use the parts of every n-th block, from the first.
    progress
        Whether to show bars.

    Raises
    ------
    InputError
        The text is too short or another model's, or the folder is of another job.
    """
    if not len(evaluated.targets):
        raise InputError("evaluated must have targets. Use matlens.data.make_windows(..., targets=True).")
    readout = Readout(model)
    identity = ModelIdentity.from_model(model)
    request = {
        "provenance": Provenance(identity, fitted.provenance, fitted.fingerprint).to_json(),
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
    if parallel.is_main():
        with TemporaryDirectory() as temporary:
            place = Path(temporary) / "atlas" if folder is None else Path(folder)
            rows = _fill(place, request, model, readout, fitted, evaluated, parts, progress)
    elif parallel.broadcast(None, _TO_FIT):
        _sum_up(model, fitted, parts, progress)
    return result_table(parallel.broadcast(rows, "rows of the atlas"), "kind", "tokens", "parts")


@checked
def atlas_seconds(folder: str | Path) -> float:
    """CPU seconds of all steps of an atlas, over all calls.

    Of several processes that share the work, they are those of the first one.

    Parameters
    ----------
    folder
        The folder that was given to `linearity_atlas`.

    Raises
    ------
    InputError
        The folder does not hold a finished atlas, or it is damaged.
    """
    artifact = Artifact.open(folder, _HOLDS)
    steps = [artifact.read_json(name.removesuffix(".json")) or {} for name in artifact.files]
    return round(sum(float(step["seconds"]) for step in steps), 3)


def _fill(
    folder: Path, request: Mapping[str, Any], model: TransformerBridge, readout: Readout, fitted: Examples,
    evaluated: Examples, parts: Sequence[Part], progress: bool,
) -> list[Row]:  # fmt: skip
    """Fill the folder, as the main process; the others sum up with it, and wait."""
    layers = sorted({part.layer for part in parts})
    names = [_SCORES, *(f"layer-{layer}" for layer in layers), TOGETHER]
    with ExitStack() as stack:
        with parallel.alone():
            artifact = stack.enter_context(Artifact.writing(folder, _HOLDS, request))
        steps = _Steps(artifact, names)
        if parallel.broadcast(not artifact.finished and bool(steps.missing), _TO_FIT):
            sums = _sum_up(model, fitted, parts, progress)
            with parallel.alone():
                work = _Atlas(model, readout, evaluated)
                work.fit(sums, fitted, parts, progress)
                if _SCORES in steps.missing:
                    steps.add(_SCORES, work.score_rows(parts))
                left = [layer for layer in layers if f"layer-{layer}" in steps.missing]
                with Bar(total=len(layers), initial=len(layers) - len(left), desc="replacing", unit="layer",
                         disable=not progress) as bar:  # fmt: skip
                    for layer in left:
                        of_layer = [part for part in parts if part.layer == layer]
                        steps.add(f"layer-{layer}", work.cost_rows(layer, of_layer))
                        bar.update(1)
                if TOGETHER in steps.missing:
                    steps.add(TOGETHER, work.together_rows(steps.rows, parts))
        if not artifact.finished:
            with parallel.alone():
                artifact.finish()
        return steps.rows


def _sum_up(model: TransformerBridge, examples: Examples, parts: Sequence[Part], progress: bool) -> PartSums:
    """Sufficient statistics of all parts from one distributed pass; the main process has the total."""
    layout = ModelLayout.from_model(model)
    sums = PartSums(parts, layout.d_model, same_sites(layout))
    sinks = _flat(find_sinks(model, examples, progress=progress), examples)
    for rows in stream(model, examples, sums.sites, positions="all", progress=progress, divided=True):
        sums.update(rows.vectors, sinks[torch.from_numpy(rows.index)])
    sums.gather()
    return sums


class _Steps:
    """Steps in their order, each stored with its rows and the seconds since the one before."""

    def __init__(self, artifact: Artifact, names: Sequence[str]) -> None:
        self._artifact, self._begun = artifact, time.process_time()
        self._done = {name: artifact.read_json(name) for name in names}

    @property
    def missing(self) -> list[str]:
        return [name for name, step in self._done.items() if step is None]

    @property
    def rows(self) -> list[Row]:
        return [row for step in self._done.values() if step is not None for row in step["rows"]]

    def add(self, name: str, rows: Sequence[Row]) -> None:
        now = time.process_time()
        step = {"rows": list(rows), "seconds": round(now - self._begun, 3)}
        self._artifact.write_json(name, step)
        self._done[name], self._begun = step, now


class _Case(NamedTuple):
    """A way of doing without a part."""

    part: Part
    method: str
    tokens: str


class _Atlas:
    """Everything that is worked out once: maps, scores, and the whole model on the evaluated text."""

    def __init__(self, model: TransformerBridge, readout: Readout, evaluated: Examples) -> None:
        self._model, self._readout, self._evaluated = model, readout, evaluated
        self._name = ModelIdentity.from_model(model).name
        self._sinks = find_sinks(model, evaluated, progress=False)
        self._modes: list[Tokens] = [ALL, NO_SINKS] if bool(self._sinks.any()) else [ALL]
        last = str(ModelLayout.from_model(model).stream[-1])
        self._whole = collect(model, evaluated, [last], progress=False)[last]
        self._losses, self._likeliest = self._read(self._whole)
        self._maps: dict[tuple[Part, str], LinearMap] = {}
        self._scores: dict[tuple[Part, str], dict[str, float]] = {}

    def fit(self, sums: PartSums, examples: Examples, parts: Sequence[Part], progress: bool) -> None:
        """Fit all maps, of moments of the examples."""
        provenance = Provenance(
            ModelIdentity.from_model(self._model), examples.provenance, examples.fingerprint, "all"
        )
        with Bar(total=2 * len(parts), desc="solving", unit="map", disable=not progress) as bar:
            for part, with_sinks, linear, scores in sums.solve(provenance):
                mode = ALL if with_sinks else NO_SINKS
                self._maps[part, mode], self._scores[part, mode] = linear, scores
                bar.update(1)

    def score_rows(self, parts: Sequence[Part]) -> list[Row]:
        """All scores, those of the evaluated text included."""
        examples = self._evaluated
        samples = collect(self._model, examples, _sites(parts), positions="all", progress=False)
        sinks = _flat(self._sinks, examples)
        rows = []
        for part, mode in itertools.product(parts, self._modes):
            chosen = torch.ones_like(sinks) if mode == ALL else ~sinks
            x, y = samples[part.source][chosen], samples[part.target][chosen]
            scores = held_out_scores(self._maps[part, mode](x), y) | self._scores[part, mode]
            rows += [
                self._row(part, MAP, mode, metric, Estimate.without_interval(value, len(y)))
                for metric, value in scores.items()
            ]
        return rows

    def cost_rows(self, layer: int, parts: Sequence[Part]) -> list[Row]:
        """Loss increase when each part of a layer is replaced or removed."""
        ways = [*((MAP, mode) for mode in self._modes), (REMOVED, ALL)]
        cases = [_Case(part, *way) for part, way in itertools.product(parts, ways)]
        variants = {str(i): self._variant(layer, [case]) for i, case in enumerate(cases)}
        vectors = run_variants(self._model, self._evaluated, variants, progress=False)
        return [
            self._row(case.part, case.method, case.tokens, metric, estimate)
            for i, case in enumerate(cases)
            for metric, estimate in self._costs(vectors[str(i)]).items()
        ]

    def together_rows(self, rows: Iterable[Row], parts: Sequence[Part]) -> list[Row]:
        """The parts that cost least alone, replaced together."""
        table, by_key = pd.DataFrame(list(rows)), {(part.kind, part.layer): part for part in parts}
        joint = []
        for group, mode in itertools.product(GROUPS, self._modes):
            first = first_parts(table, group=group, tokens=mode)
            chosen = [by_key[kind, layer] for kind, layer in first]
            if len(chosen) < 2:
                continue
            layer = min(part.layer for part in chosen)
            variant = self._variant(layer, [_Case(part, MAP, mode) for part in chosen])
            vectors = run_variants(self._model, self._evaluated, {"0": variant}, progress=False)["0"]
            names = ", ".join(part.name for part in chosen)
            for metric, estimate in self._costs(vectors).items():
                row = self._row(chosen[0], MAP, mode, metric, estimate)
                joint.append(row | {"layer": None, "target": None, "kind": f"{TOGETHER}: {group}",
                                    "parts": names})  # fmt: skip
        return joint

    def _variant(self, layer: int, cases: Iterable[_Case]) -> Variant:
        replacements = []
        for case in cases:
            where: Where = "all" if case.tokens == ALL else ~self._sinks
            if case.method == REMOVED:
                replacements.append(case.part.removed(where))
            else:
                linear = self._maps[case.part, case.tokens]
                replacements.append(Replacement.from_map(linear, where=where))
        return Variant(layer, replacements)

    @torch.inference_mode()
    def _read(self, h: Float[Tensor, "n d_model"]) -> tuple[np.ndarray, np.ndarray]:
        """``-ln p`` of the right token and the likeliest token at each position; infinite where ``h`` is."""
        losses, likeliest = np.full(len(h), np.inf), np.full(len(h), -1)
        truth = torch.from_numpy(self._evaluated.targets)
        for part in torch.arange(len(h)).split(_PLACES):
            part = part[h[part].isfinite().all(1)]
            if len(part):
                log_p = self._readout.log_probs(h[part])
                of_truth = log_p.gather(1, truth[part, None].to(log_p.device))[:, 0]
                losses[part.numpy()] = -of_truth.cpu().double().numpy()
                likeliest[part.numpy()] = log_p.argmax(1).cpu().numpy()
        return losses, likeliest

    def _costs(self, h: Float[Tensor, "n d_model"]) -> dict[str, Estimate]:
        losses, likeliest = self._read(h)
        same = torch.from_numpy(likeliest == self._likeliest)
        return {
            LOSS_INCREASE: loss_increase(losses, self._losses, self._evaluated.sentences),
            AGREEMENT: metrics.proportion(same),
        }

    def _row(self, part: Part, method: str, tokens: str, metric: str, estimate: Estimate) -> Row:
        corpus = str(self._evaluated.provenance.get("corpus", "unnamed"))
        row = result_row(
            ATLAS, model=self._name, corpus=corpus, method=method, layer=part.layer,
            target=part.blocks[-1] + 1, metric=metric, estimate=estimate, kind=part.kind, tokens=tokens,
            parts="",
        )  # fmt: skip
        return row | {"k": None}


def loss_increase(losses: np.ndarray, whole: np.ndarray, texts: np.ndarray) -> Estimate:
    """Mean difference of the losses of all tokens, in nats, with its 95% interval over texts."""
    if not np.isfinite(losses).all():
        return Estimate.without_interval(np.inf, len(np.unique(texts)))
    numbers, index = np.unique(texts, return_inverse=True)
    counts = np.bincount(index)
    ours, theirs = (
        TextLosses(np.bincount(index, weights=of_tokens), counts) for of_tokens in (losses, whole)
    )
    ratio = ours.ratio(theirs)
    value, low, high = (float(np.log(each)) for each in ratio[:3])
    return Estimate(value, low, high, len(numbers))


def same_sites(layout: ModelLayout) -> dict[str, str]:
    """Sites that carry what another does, by the sums of a family that have one term."""
    return {
        f"{total}.{layer}": f"{terms[0]}.{layer}"
        for total, terms in layout.wiring.sums
        if len(terms) == 1 and total in layout.kinds and terms[0] in (STREAM, *layout.kinds)
        for layer in range(layout.n_layers)
    }


def _sites(parts: Iterable[Part]) -> list[str]:
    return list(dict.fromkeys(site for part in parts for site in (part.source, part.target)))


def _flat(of_places: Bool[Tensor, "n longest"], examples: Examples) -> Bool[Tensor, " n_tokens"]:
    """Losses and predictions at each token of each sentence."""
    sentence = np.repeat(np.arange(len(examples)), examples.lengths)
    return of_places[torch.from_numpy(sentence), torch.from_numpy(examples.places)]
