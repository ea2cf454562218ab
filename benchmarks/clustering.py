"""What exact clusters cost where their distances are kept on the disk: time, memory and room, by the vectors.

Random vectors in groups, each number of them in a process of its own, since a peak never goes back. The
distances take time and room as the square of the number, and so do the merges while the system can keep the
file in memory; past that the disk's speed counts, of which every merge reads about four rows.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer


def main(
    vectors: Annotated[
        list[int] | None, typer.Option(help="How many vectors; give it once for each.")
    ] = None,
    width: Annotated[int, typer.Option(help="Their width.")] = 1024,
    linkage: Annotated[str, typer.Option(help="average or complete.")] = "complete",
    folder: Annotated[Path, typer.Option(help="Where the distances are kept.")] = Path("out"),
    alone: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Print a line for each number of vectors."""
    if alone:
        _measure((vectors or [0])[0], width, linkage, folder)
        return
    for n in vectors or (6000, 12000, 24000):
        command = [sys.executable, __file__, "--alone", "--vectors", str(n), "--width", str(width)]
        command += ["--linkage", linkage, "--folder", str(folder)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True)


def _measure(n: int, width: int, linkage: str, folder: Path) -> None:
    import matlens.numerics.agglomeration as agglomeration

    generator = np.random.default_rng(0)
    vectors = (
        generator.normal(size=(n, width)) + generator.normal(size=(n // 20 + 1, width))[np.arange(n) // 20]
    )
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    marks = [(time.perf_counter(), time.process_time())]
    follow = agglomeration._follow_chains

    def followed(*arguments: object) -> np.ndarray:
        marks.append((time.perf_counter(), time.process_time()))
        return follow(*arguments)  # type: ignore[arg-type]

    agglomeration._follow_chains = followed  # type: ignore[assignment]
    agglomeration.merges_on_disk(vectors, linkage, folder, progress=False)  # type: ignore[arg-type]
    marks.append((time.perf_counter(), time.process_time()))
    distances, merges = (f"{wall:.0f} s ({busy:.0f} of a core)" for wall, busy in np.diff(marks, axis=0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{n:,} vectors of {width:,} numbers, {linkage} linkage: {distances} for the distances, {merges} for "
        f"the merges, {agglomeration.gib_on_disk(n):.2f} GiB on the disk, peak memory {peak:.2f} GiB"
    )


if __name__ == "__main__":
    typer.run(main)
