"""Whether there is room for a job, in memory and on disk, asked before it begins."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matlens import parallel
from matlens.activations.stored_moments import StoredMoments
from matlens.errors import InputError, checked
from matlens.io.artifact import is_finished
from matlens.io.files import nearest_existing, system_errors
from matlens.linear.needs import (
    Widths,
    collected_fit_bytes,
    stored_fit_bytes,
    streamed_fit_bytes,
    written_moments_bytes,
)
from matlens.linear.pairs import by_source

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Files of a group's limit and of what it has taken, and how its counts begin that include groups inside.
_SECOND_VERSION = "memory.max", "memory.current", ""
_FIRST_VERSION = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"


@checked
def in_words(n_bytes: int) -> str:
    """Bytes as people read them, in powers of ten."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= size:
            return (
                f"{n_bytes / size:.3g} {unit}" if n_bytes < 1000 * size else f"{n_bytes / size:,.0f} {unit}"
            )
    return f"{n_bytes} bytes"


@checked
def free_memory() -> int | None:
    """Bytes that this machine has left, as Linux counts them and as the limits of the process's groups say.

    What is kept of files goes when memory is needed, and counts as left. ``None`` where nothing is known.
    """
    left = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left.append(1024 * int(line.split()[1]))
    with contextlib.suppress(OSError, ValueError):
        left.extend(_left_in_groups())
    return max(min(left), 0) if left else None


def _left_in_groups() -> Iterator[int]:
    """What each of the groups leaves that the process is in, one inside the other: a container, a job."""
    for line in _OWN_GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, used, prefix = _FIRST_VERSION if controllers else _SECOND_VERSION
        top = _GROUPS / "memory" if controllers else _GROUPS
        place = top / path.lstrip("/")
        for folder in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError):  # no such group here, or no limit
                most = int((folder / limit).read_text())
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                of_files = sum(int(counts.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
                yield most - int((folder / used).read_text()) + of_files
            if folder == top:
                break


@checked
def free_disk(folder: str | Path) -> int:
    """Bytes that the disk of a folder, or of where it would be, has left.

    Raises
    ------
    InputError
        The disk cannot be asked.
    """
    with system_errors(Path(folder)):
        return shutil.disk_usage(nearest_existing(Path(folder))).free


@checked
def check_memory(needed: int, what: str, ways: str) -> None:
    """Refuse a step for which this machine has too little memory left.

    Parameters
    ----------
    needed
        Bytes that the step takes.
    what, ways
        The step and what takes less, for the message.

    Raises
    ------
    InputError
        Less is free.
    """
    free = free_memory()
    if free is not None and needed > free:
        raise InputError(f"{what} takes {in_words(needed)} of memory, and {in_words(free)} are free. {ways}")


@checked
def check_disk(needed: int, folder: str | Path, what: str, ways: str) -> None:
    """Refuse a step for which the disk of a folder has too little room.

    Raises
    ------
    InputError
        Less is free.
    """
    if needed > (free := free_disk(folder)):
        raise InputError(
            f"{what} takes {in_words(needed)} of disk at {folder}, and {in_words(free)} are free. {ways}"
        )


@checked
def check_room_for_fit(n_rows: int, model: Any, pairs: Iterable[tuple[str, str]]) -> None:
    """Refuse a fit on collected vectors that has no room in memory, before it begins.

    Parameters
    ----------
    n_rows, model
        Samples, and what has a ``d_model``.
    pairs
        Sites of the maps.

    Raises
    ------
    InputError
        Too little is free; the message says what maps onto the last layer alone would take.
    """
    wanted, width = list(pairs), int(model.d_model)
    targets = [len(of_source) for of_source in by_source(wanted).values()]
    n_sites = len({site for pair in wanted for site in pair})
    needed, last = (
        collected_fit_bytes(n_rows, width, n_sites=n_sites, most_targets=most) for most in (max(targets), 1)
    )
    ways = "Fit on fewer samples (--train), or on a machine with more memory."
    if max(targets) > 1:
        ways = f"Maps onto the last layer alone take {in_words(last)} (--pairs last)."
    check_memory(needed, f"Fitting {sum(targets)} maps of {width:,} dimensions", ways)


@checked
def moments_on_disk(n_rows: int, pairs: Iterable[tuple[str, str]], widths: Mapping[str, int]) -> int:
    """Bytes of the files of moments of so many samples, of sites of these widths."""
    return written_moments_bytes(n_rows, _widths_of(pairs, widths))


@checked
def check_room_for_moments(
    n_rows: int, pairs: Sequence[tuple[str, str]], widths: Mapping[str, int], folder: str | Path
) -> None:
    """Refuse to begin moments, kept while vectors pass by, that memory or disk have no room for.

    Moments that are finished are not asked about. Of several processes on a machine each keeps moments.

    Parameters
    ----------
    n_rows, pairs, widths
        Samples, sites of the maps, and the coordinates of each site.
    folder
        Where the moments are written; a state of before is there until the next is written.

    Raises
    ------
    InputError
        Too little is free; the message says what maps onto the last layer alone would take.
    """
    folder = Path(folder)
    if is_finished(folder):
        return
    what = f"Keeping moments for {len(pairs)} maps of {max(widths.values()):,} dimensions"
    if parallel.world_size() > 1:
        what += f" in {parallel.local_world_size()} processes"
    onto_last = [(source, targets[-1]) for source, targets in by_source(pairs).items()]

    def memory(wanted: Sequence[tuple[str, str]]) -> int:
        return parallel.local_world_size() * streamed_fit_bytes(
            n_rows, _widths_of(wanted, widths), of_sample=sum(widths.values()), widest=max(widths.values()),
            written=True,
        )  # fmt: skip

    def disk(wanted: Sequence[tuple[str, str]]) -> int:
        return 2 * moments_on_disk(n_rows, wanted, widths)

    def ways(otherwise: str, needed: int) -> str:
        if len(onto_last) == len(pairs):
            return otherwise
        return f"Maps onto the last layer alone take {in_words(needed)} (--pairs last)."

    if parallel.local_rank() == 0:  # for all on its machine
        otherwise = "Fit on a machine with more memory, or fewer maps (--pairs)."
        check_memory(memory(pairs), what, ways(otherwise, memory(onto_last)))
    if parallel.is_main():
        there = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        otherwise = "Write elsewhere (--out), or fit fewer maps (--pairs)."
        check_disk(max(disk(pairs) - there, 0), folder, what, ways(otherwise, disk(onto_last)))


@checked
def check_room_to_merge(moments: StoredMoments, folder: str | Path) -> None:
    """Refuse to begin to join shards, into a folder of moments, for which memory or disk have no room.

    Raises
    ------
    InputError
        Too little is free.
    """
    folder = Path(folder)
    if is_finished(folder) or not parallel.is_main():
        return
    pairs = [(source, target) for source, targets in moments.targets.items() for target in targets]
    sources, n_shards = _widths_of(pairs, moments.widths), len(moments.shards)
    what = f"Joining {n_shards} shards of moments of {max(moments.widths.values()):,} dimensions"
    needed = stored_fit_bytes(sources, n_shards=n_shards, written=True)
    check_memory(needed, what, "Join them on a machine with more memory.")
    on_disk = moments_on_disk(moments.n_samples, pairs, moments.widths)
    check_disk(on_disk, folder, what, "Write elsewhere (--out).")


@checked
def check_room_to_solve(moments: StoredMoments, pairs: Sequence[tuple[str, str]]) -> None:
    """Refuse a fit on moments in folders that has no room in memory, before it begins.

    Raises
    ------
    InputError
        Too little is free.
    """
    kept = [(source, target) for source in by_source(pairs) for target in moments.targets.get(source, ())]
    if not kept or not parallel.is_main():
        return
    needed = stored_fit_bytes(
        _widths_of(kept, moments.widths), n_rows=moments.n_samples, n_shards=len(moments.shards)
    )
    what = f"Fitting {len(pairs)} maps of {max(moments.widths.values()):,} dimensions"
    check_memory(needed, what, "Fit on a machine with more memory.")


def _widths_of(pairs: Iterable[tuple[str, str]], widths: Mapping[str, int]) -> list[Widths]:
    return [
        (widths[source], sum(widths[target] for target in targets))
        for source, targets in by_source(pairs).items()
    ]
