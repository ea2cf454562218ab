"""Moments of a corpus while it passes by: no vector is kept, and what was broken off is gone on with.

A job can be divided into shards, whose folders are made anywhere and at any time; together they hold the
moments of the whole job.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Positions
from matlens.activations.collecting import Rows, batch_counts, default_batch_tokens, hook_names, stream
from matlens.data.examples import Examples
from matlens.errors import InputError, PositiveInt, check_int, checked
from matlens.io.artifact import Artifact
from matlens.linear.least_squares import LeastSquares
from matlens.linear.pairs import Pairs, resolve_pairs
from matlens.linear.samples import Selection, are_few
from matlens.linear.stored import HOLDS, StoredMoments
from matlens.linear.sums import PairFits
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.layout import ModelLayout

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_KEPT_EVERY = 60.0  # seconds, at least, between two states that a killed run can go on from
_SHARE_OF_WRITING = 20  # and so many times as long as it takes to write one


@checked
def stream_moments(
    model: TransformerBridge,
    examples: Examples,
    folder: str | Path,
    *,
    pairs: Pairs = "last",
    positions: Positions = "all",
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    shard: tuple[int, int] = (1, 1),
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> StoredMoments:
    """Run the examples through the model once and keep, in a folder, what least squares needs of them.

    It takes ``(d + 1)(d + 1 + sum of the targets' widths)`` numbers of 8 bytes for each source, however many
    the samples are. A killed run goes on where it was; a finished folder is opened without running anything.

    Parameters
    ----------
    model, examples
        What is run on what.
    folder
        Where the moments are written.
    pairs
        As in `MapSet.fit`.
    positions
        ``"drawn"``: only at the positions of the examples. ``"all"``: at every token.
    rows, weights
        True for the samples that are kept, by default all, and how much each of all samples counts, as in
        `MapSet.fit`: of all shards together, in the order of ``collect`` at these positions.
    shard
        Which part of the examples, such as ``(3, 8)`` for the third of eight. `StoredMoments` joins them.
    batch_tokens
        Most tokens in a batch, padding counted.
    progress
        Whether to show a bar.

    Raises
    ------
    InputError
        A vector is not finite, a pair is not usable, rows or weights are not those of the samples, there is
        no such shard, or the folder is of another job.
    """
    number, of = check_shard(shard)
    identity = ModelIdentity.from_model(model)
    wanted, widths = pairs_and_widths(model, pairs)
    hooks = hook_names(ModelLayout.from_model(model), widths)
    provenance = Provenance(identity, examples.provenance, examples.fingerprint, positions, hooks=hooks)
    whole = examples.n_positions if positions == "drawn" else len(examples.tokens)
    selection = Selection.parse(rows, weights, whole)
    own, n_own = shard_of(examples, number, of), 0
    if own is not None:
        n_own = own.n_positions if positions == "drawn" else len(own.tokens)
    if selection is not None:
        provenance, whole = provenance.with_details(**selection.details), selection.n
        selection = selection.part(_rows_of_shard(examples, number, of, positions))
        n_own = selection.n
    request: dict[str, Any] = {
        "provenance": provenance.to_json(),
        "pairs": wanted,
        "widths": widths,
        "shard": [number, of],
        "n_samples": n_own,
        "batch_tokens": batch_tokens or default_batch_tokens(model),
    }
    fits = PairFits(wanted, widths, norms=are_few(whole, identity.d_model))
    parallel.check_same([request, str(folder)], "the job of moments")

    def batches(numbers: range) -> Iterator[Rows]:
        if own is None:
            return iter(())
        return stream(
            model, own, list(widths), positions=positions, batch_tokens=request["batch_tokens"],
            progress=progress, divided=True, numbers=numbers,
        )  # fmt: skip

    n_batches = 0 if own is None else len(batch_counts(model, own, positions, request["batch_tokens"]))
    with Artifact.writing(folder, HOLDS, request, only_unfinished=("batch_tokens",)) as artifact:
        if not artifact.finished:
            states = _States(artifact, fits)
            done = parallel.broadcast(states.n_batches, "batches that are done")
            left = range(done, n_batches)
            _add_all(fits, batches(left), left, selection, states)
            for source in fits.targets if parallel.is_main() else ():
                artifact.write(source, fits[source].tensors())
            states.remove()
            artifact.finish()
    return StoredMoments(folder)


@checked
def pairs_and_widths(model: TransformerBridge, pairs: Pairs) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """The pairs of sites that are meant in a model, and how many coordinates each of their sites has.

    Raises
    ------
    InputError
        A pair is not usable.
    """
    layout = ModelLayout.from_model(model)
    named = resolve_pairs(pairs, Provenance(ModelIdentity.from_model(model)))
    wanted = [(str(layout.resolve(source)), str(layout.resolve(target))) for source, target in named]
    return wanted, {site: layout.width(site) for pair in wanted for site in pair}


@checked
def check_shard(shard: Sequence[int]) -> tuple[int, int]:
    """Read which part of a job is meant: ``(3, 8)`` is the third of eight.

    Raises
    ------
    InputError
        It is no part.
    """
    if len(shard) != 2:
        raise InputError(f"The shard has {len(shard)} numbers. Expected two, such as (3, 8) for 3 of 8.")
    of = check_int(shard[1], "The number of shards", min=1, max=100_000)
    return check_int(shard[0], "The number of the shard", min=1, max=of), of


@checked
def shard_of(examples: Examples, number: int, of: int) -> Examples | None:
    """Every ``of``-th sentence from the ``number``-th on, with all of its positions; ``None`` for none."""
    number, of = check_shard((number, of))
    chosen = np.arange(number - 1, len(examples), of)
    if of == 1 or not len(chosen):
        return examples if of == 1 else None
    taken = _sentences_of_shard(examples, number, of)
    of_tokens, of_positions = np.repeat(taken, examples.lengths), taken[examples.sentences]
    offsets = _offsets(examples.lengths[chosen])
    sentences = np.searchsorted(chosen, examples.sentences[of_positions])
    sources: dict[str, np.ndarray] = {}
    if examples.has_sources:
        lengths = np.diff(examples.source_offsets)
        sources["source_tokens"] = examples.source_tokens[np.repeat(taken, lengths)]
        sources["source_offsets"] = _offsets(lengths[chosen])
    return Examples(
        examples.tokens[of_tokens], offsets, examples.positions[of_positions],
        {**examples.provenance, "shard": f"{number}/{of}"}, sentences, **sources,
        images=examples.images[chosen] if len(examples.images) else examples.images,
    )  # fmt: skip


def _sentences_of_shard(examples: Examples, number: int, of: int) -> np.ndarray:
    taken = np.zeros(len(examples), dtype=bool)
    taken[number - 1 :: of] = True
    return taken


def _rows_of_shard(
    examples: Examples, number: int, of: int, positions: Positions
) -> Bool[Tensor, " n_samples"]:
    """Which samples of the whole job are those of a shard."""
    taken = _sentences_of_shard(examples, number, of)
    of_rows = taken[examples.sentences] if positions == "drawn" else np.repeat(taken, examples.lengths)
    return torch.from_numpy(of_rows)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Where texts of these lengths start, end to end, and where the last of them ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


def _add_all(
    fits: PairFits, batches: Iterator[Rows], numbers: range, selection: Selection | None, states: _States
) -> None:
    """Add all batches; of several processes the main one has the sums of all in the end."""
    world_size = parallel.world_size()
    for start in numbers[::world_size]:  # in step: in the last one there is no batch for some processes
        batch = next(batches, None)
        if batch is not None and selection is None:
            fits.update(batch.vectors)
        elif batch is not None and selection is not None:
            vectors, weights = selection.part(batch.index).apply(batch.vectors)
            if len(next(iter(vectors.values()))):
                fits.update(vectors, weights=weights)
        # A state of samples that wait would divide them otherwise than a run that is not interrupted.
        ready = fits.settled or world_size > 1
        if parallel.broadcast(ready and states.are_due(), "whether to store a state"):
            fits.reduce()
            if parallel.is_main():
                states.write(fits, min(start + world_size, numbers.stop))
    for _ in batches:  # to its end, where it checks the model
        pass
    fits.reduce()


class _States:
    """The sums after so many batches, stored now and then, from which an interrupted run resumes."""

    def __init__(self, artifact: Artifact, fits: PairFits) -> None:
        self._artifact, self.n_batches = artifact, 0
        self._last, self._pause = time.monotonic(), _KEPT_EVERY
        existing = {*artifact.written()} if parallel.is_main() else set()
        counts = {int(name.partition("@")[2]) for name in existing if "@" in name}
        whole = [n for n in counts if {*self._names(fits, n).values()} <= existing]
        if whole:
            self.n_batches = max(whole)
            for source, name in self._names(fits, self.n_batches).items():
                targets = fits[source].targets
                fits[source] = LeastSquares.from_tensors(artifact.read_all(name), targets, source=source)

    def are_due(self) -> bool:
        """Whether it is time for the next one."""
        return parallel.is_main() and time.monotonic() - self._last > self._pause

    def write(self, fits: PairFits, n_batches: int) -> None:
        """Write a state next to the one before, and remove that."""
        began, names = time.monotonic(), self._names(fits, n_batches)
        for source, name in names.items():
            self._artifact.write(name, fits[source].tensors())
        self.remove(but={*names.values()})
        self._last = time.monotonic()
        self._pause = max(_KEPT_EVERY, _SHARE_OF_WRITING * (self._last - began))

    def remove(self, but: Collection[str] = ()) -> None:
        """Remove the states, as the main process."""
        if parallel.is_main():
            found = (path.stem for path in self._artifact.folder.glob("*@*.safetensors"))
            self._artifact.remove(*(name for name in found if name not in but))

    @staticmethod
    def _names(fits: PairFits, n_batches: int) -> dict[str, str]:
        return {source: f"{source}@{n_batches}" for source in fits.targets}
