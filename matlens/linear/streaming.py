"""Sufficient statistics of a corpus, summed while it is streamed: no vector is stored.

A job can be divided into parts, which are computed anywhere and at any time and merged afterwards.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matlens import parallel
from matlens.activations.activations import Positions
from matlens.activations.collecting import Rows, batch_counts, default_batch_tokens, provenance_of, stream
from matlens.data.examples import Examples
from matlens.data.overlap import fitted_on
from matlens.errors import InputError, NonNegative, PositiveInt, checked
from matlens.io.artifact import Artifact
from matlens.io.rows import consecutive
from matlens.linear.fitting import chunk_size, joined, least_squares_of, update
from matlens.linear.least_squares import LeastSquares, are_few
from matlens.linear.maps import LinearMap
from matlens.linear.pairs import Pairs, by_source, resolve_pairs
from matlens.models.identity import Provenance
from matlens.models.layout import ModelLayout

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

HOLDS = "sufficient statistics"
_STATE_EVERY = 60.0  # seconds, at least, between two states that a killed run can resume from
_SHARE_OF_WRITING = 20  # and this multiple of the time to write one


@checked
class StoredLeastSquares:
    """`LeastSquares` of stored pairs of sites: ``stored["h.3"]`` reads one source.

    Several folders, the parts of one job, are merged in the order of their numbers, regardless of the
    order in which they are given. ``parts`` are ``(number, of how many)`` of each.
    """

    def __init__(self, folder: str | Path, *more: str | Path) -> None:
        artifacts = [Artifact.open(place, HOLDS) for place in (folder, *more)]
        self._artifacts = sorted(artifacts, key=lambda artifact: tuple(artifact.request["part"]))
        requests = [artifact.request for artifact in self._artifacts]
        self.request = requests[0]
        self.provenance = Provenance.from_json(self.request["provenance"])
        for other in requests[1:]:
            differing = [key for key in ("provenance", "pairs", "widths") if other[key] != self.request[key]]
            if differing:
                raise InputError(
                    f"The folders must be parts of one job, and their {' and '.join(differing)} differ. Make "
                    "all parts with the same model, corpus and options."
                )
        self.parts = [tuple(request["part"]) for request in requests]
        if len({*self.parts}) < len(self.parts) or len({of for _, of in self.parts}) > 1:
            found = ", ".join(f"{number}/{of}" for number, of in self.parts)
            raise InputError(
                f"The folders must be different parts of one division of a job, got the parts {found}: "
                "sentences would count twice."
            )
        self.pairs = [(source, target) for source, target in self.request["pairs"]]
        self.targets = by_source(self.pairs)
        self.widths: dict[str, int] = self.request["widths"]
        self.n_samples = sum(request["n_samples"] for request in requests)

    def check_complete(self) -> None:
        """Raise InputError if parts of the job are missing."""
        of = self.parts[0][1]
        missing = sorted({*range(1, of + 1)} - {number for number, _ in self.parts})
        if missing:
            names = ", ".join(f"{number}/{of}" for number in missing[:6]) + (", ..." if missing[6:] else "")
            raise InputError(f"The folders of all parts of the job must be given; missing are {names}.")

    def __getitem__(self, source: str) -> LeastSquares:
        targets = {target: self.widths[target] for target in self.targets[source]}
        fits = (
            LeastSquares.from_tensors(artifact.read_all(source), targets, source=source)
            for artifact in self._artifacts
        )
        return functools.reduce(LeastSquares.merge, fits)

    def solve(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        intercept: bool = False,
        ridge: NonNegative = 0.0,
        provenance: Provenance | None = None,
    ) -> Iterator[LinearMap]:
        """Maps of some of the pairs, source by source; see `LeastSquares.solve`."""
        self.check_pairs(pairs)
        for source, targets in by_source(pairs).items():
            maps = self[source].solve(intercept=intercept, ridge=ridge, provenance=provenance)
            yield from (maps.pop(target) for target in targets)

    def check_pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Raise InputError for pairs without sufficient statistics."""
        for source, target in pairs:
            if target not in self.targets.get(source, ()):
                raise InputError(
                    f"Sufficient statistics of {source} -> {target} are missing. Collect or "
                    "stream again with these pairs."
                )

    def merge(self, folder: str | Path) -> StoredLeastSquares:
        """Merge the statistics of all parts of a job into a folder."""
        self.check_complete()
        request = {**self.request, "part": [1, 1], "n_samples": self.n_samples}
        with Artifact.writing(folder, HOLDS, request) as artifact:
            if not artifact.finished:
                for source in self.targets if parallel.is_main() else ():
                    artifact.write(source, self[source].tensors())
                artifact.finish()
        return StoredLeastSquares(folder)


@checked
def stream_least_squares(
    model: TransformerBridge,
    examples: Examples,
    folder: str | Path,
    *,
    pairs: Pairs = "last",
    positions: Positions = "all",
    part: tuple[PositiveInt, PositiveInt] = (1, 1),
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> StoredLeastSquares:
    """Run the examples through the model once and store what least squares needs of them.

    Each source takes ``8 (d + 1)(d + 1 + sum of the targets' widths)`` bytes, for any number of samples. A
    killed run resumes; a finished folder is opened without running anything.

    Parameters
    ----------
    pairs
        As in `MapSet.fit`.
    positions
        ``"sampled"``: only at the positions of the examples. ``"all"``: at every token.
    part
        Which part of the sentences, such as ``(3, 8)`` for the third of eight; `StoredLeastSquares` merges
        them.
    batch_tokens
        Maximum number of tokens in a batch, padding included.
    """
    number, of = part
    if number > of:
        raise InputError(f"part must be one of {of}, such as (1, {of}), got {part}.")
    requested, widths = pairs_and_widths(model, pairs)
    provenance = provenance_of(model, ModelLayout.from_model(model), examples, positions, widths)
    provenance = provenance.with_details(**fitted_on(examples))
    norms = are_few(examples.at_positions(positions).n_positions, model.cfg.d_model)
    own = examples
    if of > 1:
        own = examples.select(np.arange(number - 1, len(examples), of), part=f"{number}/{of}")
    if batch_tokens is None:
        longest, width = int(examples.lengths.max()), sum(widths.values())
        batch_tokens = default_batch_tokens(model, width, longest=longest, folder=folder)
        batch_tokens = int(parallel.broadcast(batch_tokens, "choosing the size of batches"))
    request: dict[str, Any] = {
        "provenance": provenance.to_json(),
        "pairs": requested,
        "widths": widths,
        "part": [number, of],
        "n_samples": own.at_positions(positions).n_positions,
        "batch_tokens": batch_tokens,
    }
    parallel.check_same([request, str(folder)], "streaming into least squares")
    with Artifact.writing(folder, HOLDS, request) as artifact:
        if not artifact.finished:
            fits = {fit.source: fit for fit in least_squares_of(requested, widths, norms=norms)}
            states = _States(artifact, fits)
            if len(own):
                counts = batch_counts(model, own, positions, request["batch_tokens"])
                batches = stream(
                    model, own, list(widths), positions=positions, batch_tokens=request["batch_tokens"],
                    progress=progress, divided=True, batch_indices=range(states.n_batches, len(counts)),
                )  # fmt: skip
                _add_all(fits, states, batches, counts, chunk_size(widths[requested[0][0]]))
            if parallel.is_main():
                for source, fit in fits.items():
                    artifact.write(source, fit.tensors())
                states.remove()
            artifact.finish()
    return StoredLeastSquares(folder)


@checked
def pairs_and_widths(model: TransformerBridge, pairs: Pairs) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Names of the sites of each pair in a model, and the width of each site."""
    layout = ModelLayout.from_model(model)
    named = resolve_pairs(pairs, layout.n_layers)
    requested = [(str(layout.resolve(source)), str(layout.resolve(target))) for source, target in named]
    return requested, {site: layout.width(site) for pair in requested for site in pair}


def _add_all(
    fits: dict[str, LeastSquares],
    states: _States,
    batches: Iterator[Rows],
    counts: Sequence[int],
    size: int,
) -> None:
    """Add batches in chunks; ``counts`` are the samples of all batches, those in the state included.

    Processes are in step, so that a state has the same batches of each of them.
    """
    world_size, done = parallel.world_size(), states.n_batches
    steps = [sum(counts[start : start + world_size]) for start in range(done, len(counts), world_size)]
    for run in consecutive(steps, world_size * size):
        parts = [batch.vectors for batch in itertools.islice(batches, len(run))]
        if parts:  # in the last step, some processes have no batch
            update(fits.values(), joined(parts))
        if parallel.broadcast(states.are_due(), "whether to store a state"):
            _reduce(fits)
            states.write(min(done + world_size * run.stop, len(counts)))
    for _ in batches:  # to its end, where it checks the model
        pass
    _reduce(fits)


def _reduce(fits: dict[str, LeastSquares]) -> None:
    """Merge the samples of all processes in the main one; the others have none then."""
    for source, fit in fits.items():
        fits[source] = fit.reduce()


class _States:
    """Periodic checkpoints of the statistics, to resume an interrupted run."""

    def __init__(self, artifact: Artifact, fits: dict[str, LeastSquares]) -> None:
        self._artifact, self._fits = artifact, fits
        self._last, self._pause = time.monotonic(), _STATE_EVERY
        existing = {*artifact.written()} if parallel.is_main() else set()
        counts = {int(name.partition("@")[2]) for name in existing if "@" in name}
        complete = [n for n in counts if {*self._names(n).values()} <= existing]
        self.n_batches = parallel.broadcast(max(complete, default=0), "batches that are done")
        if complete:
            for source, name in self._names(self.n_batches).items():
                targets = fits[source].targets
                fits[source] = LeastSquares.from_tensors(artifact.read_all(name), targets, source=source)

    def are_due(self) -> bool:
        """Whether it is time for the next one."""
        return parallel.is_main() and time.monotonic() - self._last > self._pause

    def write(self, n_batches: int) -> None:
        """Write a state next to the one before, as the main process, and remove that."""
        if not parallel.is_main():
            return
        began, names = time.monotonic(), self._names(n_batches)
        for source, name in names.items():
            self._artifact.write(name, self._fits[source].tensors())
        self.remove(but={*names.values()})
        self._last = time.monotonic()
        self._pause = max(_STATE_EVERY, _SHARE_OF_WRITING * (self._last - began))

    def remove(self, but: Collection[str] = ()) -> None:
        """Remove the states."""
        found = (path.stem for path in self._artifact.folder.glob("*@*.safetensors"))
        self._artifact.remove(*(name for name in found if name not in but))

    def _names(self, n_batches: int) -> dict[str, str]:
        return {source: f"{source}@{n_batches}" for source in self._fits}
