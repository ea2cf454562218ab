"""Least-squares state in folders: stored by source, and joined from the parts of a job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matlens import parallel
from matlens.errors import InputError, checked
from matlens.io.artifact import Artifact
from matlens.io.files import damaged
from matlens.linear.least_squares import LeastSquares
from matlens.linear.pairs import by_source
from matlens.models.identity import Provenance

HOLDS = "moments"


@checked
class StoredMoments:
    """Sufficient statistics of pairs of sites in finished folders, each read when it is asked for.

    ``moments["h.3"]`` is the `LeastSquares` of a source and its targets. Those of several folders, which are
    the parts of one job, are merged in the order of their numbers, whatever the order of the folders.

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

    def __getitem__(self, source: str) -> LeastSquares:
        """The sufficient statistics of a source and all of its targets, of all folders together."""
        targets = {target: self.widths[target] for target in self.targets[source]}
        whole: LeastSquares | None = None
        for artifact in self._artifacts:
            fit = LeastSquares.from_tensors(artifact.read_all(source), targets, source=source)
            if fit.n != artifact.request["n_samples"]:
                raise damaged(artifact.folder / source, "is of another number of samples than the folder")
            whole = fit if whole is None else whole.merge(fit)
        assert whole is not None
        return whole


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
                artifact.write(source, moments[source].tensors())
            artifact.finish()
    return StoredMoments(folder)
