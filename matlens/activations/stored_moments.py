"""Moments in folders: written source by source, those of several shards joined to the whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from matlens import parallel
from matlens.errors import InputError, checked
from matlens.io.arrays import Record, check_record, check_size, check_tensor, describe_tensors
from matlens.io.bounds import parse_json
from matlens.io.files import damaged, write_bytes
from matlens.io.folders import Workplace, read_config, reading_record
from matlens.linear.least_squares import LeastSquares
from matlens.linear.pairs import by_source
from matlens.linear.sums import MomentsOfPairs, check_source
from matlens.models.identity import Provenance

HOLDS = "moments"
_SAID = "matlens"  # what the file says of its moments


def write_source(folder: Path, name: str, kept: MomentsOfPairs, source: str) -> Record:
    """Write what is kept of a source into a file, whole or not at all."""
    moments, norms = kept.moments(source), kept.norms(source)
    r, z = (factor.cpu().contiguous() for factor in moments.state)
    tensors = {"r": r, "z": z} | ({} if norms is None else {"norms": norms})
    # One entry: the order of several is another each time, and so would be the bytes.
    content = save(tensors, metadata={_SAID: json.dumps({"source": source, "n": moments.n})})
    write_bytes(folder / name, content)
    return describe_tensors(tensors, content)


def read_source(
    path: Path, record: Record, source: str, targets: Sequence[str]
) -> tuple[LeastSquares, Tensor | None]:
    """Read what `write_source` has written.

    Raises
    ------
    InputError
        The file holds something else.
    """
    check_size(path, record)
    try:
        with safe_open(path, framework="pt") as file:
            said = parse_json((file.metadata() or {}).get(_SAID, "null"), f"{path}'s metadata")
            names = set(file.keys())
            if not isinstance(said, dict) or said.get("source") != source or names - {"norms"} != {"r", "z"}:
                raise damaged(path, f"does not hold the moments of {source}")
            r, z, norms = (
                check_tensor(file.get_tensor(name), path, record, name) if name in names else None
                for name in ("r", "z", "norms")
            )
    except (SafetensorError, OSError) as error:
        raise damaged(path, f"cannot be read as safetensors ({error})") from error
    assert r is not None
    assert z is not None
    n = said.get("n")
    if type(n) is not int or n < 0:
        raise damaged(path, "does not say how many samples it is of")
    return LeastSquares.from_state(r, z, n, source=source, target=", ".join(targets)), norms


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
        folders = [Path(place) for place in (folder, *more)]
        configs = {place: read_config(place, HOLDS) for place in folders}
        shards: list[tuple[int, int, Path]] = []
        for place, config in configs.items():
            with reading_record(place):
                request = config["request"]
                number, of = request["shard"]
                shards.append((int(number), int(of), place))
        if len(configs) < len(folders):
            raise InputError("A folder of moments is given twice. Expected each shard once.")
        self._folders = [(place, configs[place]) for _, _, place in sorted(shards)]
        first, config = self._folders[0]
        for place, other in self._folders[1:]:
            _check_same_job(first, config["request"], place, other["request"])
        self.shards = _check_each_once(sorted(shards))
        with reading_record(first):
            self.request = request = config["request"]
            self.targets = by_source([(str(source), str(target)) for source, target in request["pairs"]])
            self.widths = {str(site): int(width) for site, width in request["widths"].items()}
            self.provenance = Provenance.from_json({**request["provenance"]})
            self.n_samples = sum(int(config["request"]["n_samples"]) for _, config in self._folders)

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
        for folder, config in self._folders:
            name = f"{source}.safetensors"
            record = check_record(config, folder, name)
            moments, of_shard = read_source(folder / name, record, source, self.targets[source])
            sizes = (self.widths[source], sum(self.widths[target] for target in self.targets[source]))
            if (moments.state[0].shape[1] - 1, moments.state[1].shape[1]) != sizes:
                raise damaged(folder / name, "holds moments of other widths")
            if moments.n != config["request"]["n_samples"]:
                raise damaged(folder / name, "holds another number of samples than the folder says")
            whole = moments if whole is None else whole.merge(moments)
            norms += [] if of_shard is None else [of_shard]
        assert whole is not None
        return whole, torch.cat(norms) if len(norms) == len(self._folders) else None


def _check_same_job(first: Path, ours: Mapping[str, Any], place: Path, theirs: Mapping[str, Any]) -> None:
    for key, named in (("provenance", "samples"), ("pairs", "pairs of sites"), ("widths", "widths")):
        if ours.get(key) == theirs.get(key):
            continue
        about = ""
        if key == "provenance":
            parts = [
                part for part in {**ours[key], **theirs[key]} if ours[key].get(part) != theirs[key].get(part)
            ]
            about = f" ({', '.join(parts)} differ)"
        raise InputError(
            f"{place} does not hold moments of the same job as {first}: they are of other {named}{about}. "
            "Expected shards that were made with the same model, corpus and options."
        )


def _check_each_once(shards: Sequence[tuple[int, int, Path]]) -> list[tuple[int, int]]:
    for (number, of, place), (next_number, next_of, next_place) in pairwise(shards):
        if number == next_number and of == next_of:
            raise InputError(
                f"{place} and {next_place} both hold shard {number}/{of}, so its sentences would count "
                "twice. Expected each shard once."
            )
    counts = sorted({of for _, of, _ in shards})
    if len(counts) > 1:
        raise InputError(
            f"These are shards of jobs in {' and in '.join(map(str, counts))} shards, which overlap. "
            "Expected shards of one division."
        )
    return [(number, of) for number, of, _ in shards]


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
    if parallel.is_main():
        place = Workplace(folder, HOLDS, request, only_unfinished=("batch_tokens",))
        with place.working():
            if not place.finished:
                files = {
                    f"{source}.safetensors": write_source(
                        place.folder, f"{source}.safetensors", moments, source
                    )
                    for source in moments.targets
                }
                place.finish(files)
    parallel.barrier("merged moments")
    return StoredMoments(folder)
