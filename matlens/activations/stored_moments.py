"""Least-squares state in folders: stored by source, and joined from the parts of a job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from matlens import parallel
from matlens.errors import InputError, checked
from matlens.io.artifact import Artifact
from matlens.io.files import damaged
from matlens.linear.least_squares import LeastSquares
from matlens.linear.pairs import by_source
from matlens.linear.sums import MomentsOfPairs, check_source
from matlens.models.identity import Provenance

HOLDS = "moments"
_NORMS = "norms"


def write_source(artifact: Artifact, name: str, kept: MomentsOfPairs, source: str) -> None:
    """Write the state of a source into a file."""
    norms = kept.norms(source)
    artifact.write(name, kept.moments(source).tensors() | ({} if norms is None else {_NORMS: norms}))


def read_source(
    artifact: Artifact, name: str, source: str, targets: Sequence[str]
) -> tuple[LeastSquares, Tensor | None]:
    """Read what `write_source` has written."""
    tensors = artifact.read_all(name)
    return LeastSquares.from_tensors(tensors, source, ", ".join(targets)), tensors.get(_NORMS)


@checked
class StoredMoments:
    """Moments of pairs of sites in finished folders, each read when it is asked for.

    Those of several folders count as one: of the shards of one job, in the order of their numbers, whatever
    the order of the folders, so that the maps are the same bytes.

    Attributes
    ----------
    targets, widths
        The targets of each source, and the width of each site.
    provenance
        The model, the examples and the positions, of all shards together.
    n_samples
        How many samples there are in all.
    shards
        ``(number, of how many)`` of each folder, in their order.
    request
        What the first of the folders was asked for.
    """

    def __init__(self, folder: str | Path, *more: str | Path) -> None:
        artifacts = [Artifact.open(place, HOLDS) for place in dict.fromkeys(map(Path, (folder, *more)))]
        if len(artifacts) < 1 + len(more):
            raise InputError("A folder of moments is given twice. Expected each shard once.")
        self._artifacts = sorted(artifacts, key=lambda artifact: tuple(artifact.request["shard"]))
        first = self._artifacts[0]
        for other in self._artifacts[1:]:
            _check_same_job(first, other)
        self.shards = _check_each_once(self._artifacts)
        self.request = first.request
        self.targets = by_source([(source, target) for source, target in self.request["pairs"]])
        self.widths: dict[str, int] = self.request["widths"]
        self.provenance = Provenance.from_json(self.request["provenance"])
        self.n_samples = sum(artifact.request["n_samples"] for artifact in self._artifacts)

    @property
    def complete(self) -> bool:
        """Whether all shards of the job are there."""
        return len(self.shards) == self.shards[0][1]

    def check_complete(self) -> None:
        """Refuse shards of which some are missing.

        Raises
        ------
        InputError
            Some are; the message says which.
        """
        of = self.shards[0][1]
        absent = sorted({*range(1, of + 1)} - {number for number, _ in self.shards})
        if absent:
            names = ", ".join(f"{number}/{of}" for number in absent[:6]) + (", ..." if absent[6:] else "")
            raise InputError(
                f"{'Shards' if absent[1:] else 'Shard'} {names} of the job {'are' if absent[1:] else 'is'} "
                "missing. Expected the folders of all shards."
            )

    def moments(self, source: str) -> LeastSquares:
        """What is kept of a source and all of its targets, in all folders."""
        return self._read(source)[0]

    def norms(self, source: str) -> Float[Tensor, " n"] | None:
        """Squared norms of the samples of a source, where they were kept."""
        return self._read(source)[1]

    def _read(self, source: str) -> tuple[LeastSquares, Tensor | None]:
        check_source(source, self.targets)
        whole: LeastSquares | None = None
        norms: list[Tensor] = []
        for artifact in self._artifacts:
            moments, of_shard = read_source(artifact, source, source, self.targets[source])
            if moments.n != artifact.request["n_samples"]:
                raise damaged(artifact.folder / source, "is of another number of samples than the folder")
            whole = moments if whole is None else whole.merge(moments)
            norms += [] if of_shard is None else [of_shard]
        assert whole is not None
        return whole, torch.cat(norms) if len(norms) == len(self._artifacts) else None


def _check_same_job(first: Artifact, other: Artifact) -> None:
    ours, theirs = first.request, other.request
    for key, named in (("provenance", "samples"), ("pairs", "pairs of sites"), ("widths", "widths")):
        if ours[key] == theirs[key]:
            continue
        about = ""
        if key == "provenance":
            parts = [
                part for part in {**ours[key], **theirs[key]} if ours[key].get(part) != theirs[key].get(part)
            ]
            about = f" ({', '.join(parts)} differ)"
        raise InputError(
            f"{other.folder} does not hold moments of the same job as {first.folder}: they are of other "
            f"{named}{about}. Expected shards that were made with the same model, corpus and options."
        )


def _check_each_once(artifacts: Sequence[Artifact]) -> list[tuple[int, int]]:
    shards = [(int(number), int(of)) for number, of in (artifact.request["shard"] for artifact in artifacts)]
    for (shard, first), (next_shard, second) in pairwise(zip(shards, artifacts, strict=True)):
        if shard == next_shard:
            raise InputError(
                f"{first.folder} and {second.folder} both hold shard {shard[0]}/{shard[1]}, so its sentences "
                "would count twice. Expected each shard once."
            )
    counts = sorted({of for _, of in shards})
    if len(counts) > 1:
        raise InputError(
            f"These are shards of jobs in {' and in '.join(map(str, counts))} shards, which overlap. "
            "Expected shards of one division."
        )
    return shards


@checked
def merge_moments(moments: StoredMoments, folder: str | Path) -> StoredMoments:
    """Write the moments of all shards of a job as one, as an undivided job would have written them.

    Raises
    ------
    InputError
        A shard is missing, or the folder holds something else.
    """
    moments.check_complete()
    request = {**moments.request, "shard": [1, 1], "n_samples": moments.n_samples}
    with Artifact.writing(folder, HOLDS, request, only_unfinished=("batch_tokens",)) as artifact:
        if not artifact.finished:
            for source in moments.targets if parallel.is_main() else ():
                write_source(artifact, source, moments, source)
            artifact.finish()
    return StoredMoments(folder)
