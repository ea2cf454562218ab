"""Memory, disk and operations of a study, and whether it fits.

Everything follows from the model's shape and from counts, without loading weights. Sizes of files are
exact up to their headers; the memory of a fit is an upper bound of its arrays at the peak, at most a third
too large.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from matlens import parallel
from matlens.activations.activations import PART, Positions
from matlens.errors import InputError, NonNegativeInt, PositiveInt, check_int, checked
from matlens.io.artifact import is_finished
from matlens.io.files import nearest_existing
from matlens.linear import fitting
from matlens.linear.fitting import chunk_size
from matlens.linear.least_squares import are_few
from matlens.linear.pairs import by_source
from matlens.linear.streaming import StoredLeastSquares
from matlens.models.inputs import is_visual
from matlens.models.layout import ModelLayout

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_BATCH_TOKENS = 2048  # of a batch on a CPU
_SENTENCE = 30  # tokens per sentence by default
_ROWS = 256  # distributions in memory while maps are evaluated
_DOUBLE, _SINGLE = 8, 4  # bytes of a value
_CONTROL_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

PairsToFit = Literal["last", "all"]
Widths = tuple[int, int]
"""Dimensions of a source, and of all of its targets side by side."""


@checked
@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model that its costs depend on.

    By default FFNs are ``4 * d_model`` wide, and the parameters are those of plain blocks of these sizes.
    """

    n_layers: PositiveInt
    d_model: PositiveInt
    d_mlp: NonNegativeInt = 0
    d_vocab: PositiveInt = 50_000
    n_parameters: NonNegativeInt = 0
    parameter_bytes: PositiveInt = 4

    def __post_init__(self) -> None:
        if not self.d_mlp:
            object.__setattr__(self, "d_mlp", 4 * self.d_model)
        if not self.n_parameters:
            of_block = 4 * self.d_model**2 + 2 * self.d_mlp * self.d_model
            object.__setattr__(self, "n_parameters", self.n_layers * of_block + self.d_vocab * self.d_model)

    @classmethod
    def from_model(cls, model: TransformerBridge) -> Shape:
        """The shape of a model that is loaded."""
        config, weights = model.cfg, list(model.original_model.parameters())
        classes = model.original_model.config.num_labels if is_visual(model) else config.d_vocab
        return cls(
            n_layers=config.n_layers, d_model=config.d_model,
            d_mlp=ModelLayout.from_model(model).d_mlp or config.d_mlp or 0,
            d_vocab=classes, n_parameters=sum(weight.numel() for weight in weights),
            parameter_bytes=max((weight.element_size() for weight in weights), default=4),
        )  # fmt: skip

    @classmethod
    def from_name(
        cls,
        name: str,
        *,
        revision: str | None = None,
        parameter_bytes: int = 4,
        trust_remote_code: bool = False,
    ) -> Shape:
        """The shape of a model from its configuration, without weights."""
        from matlens.models.sizes import read_sizes

        said: Any = read_sizes(name, revision=revision, trust_remote_code=trust_remote_code)
        absent = [key for key, value in said.items() if value is None]
        if absent:
            raise InputError(
                f"The configuration of {name!r} must have {', '.join(absent)}, got none. Give the shape: "
                "--layers, --width, --mlp and --vocab."
            )
        return cls(**said, parameter_bytes=parameter_bytes)


@dataclass(frozen=True)
class Need:
    """Bytes of memory at the peak of a step, bytes of disk with its checkpoint, floating-point operations."""

    memory: int
    disk: int
    operations: int


@dataclass(frozen=True)
class Plan:
    """The steps of a study in order, and the bytes of the sufficient statistics of all layers."""

    needs: dict[str, Need]
    statistics: int

    def __getitem__(self, step: str) -> Need:
        return self.needs[step]

    @property
    def job(self) -> tuple[int, int]:
        """Peak memory and total disk of collecting and fitting, as in ``matlens run``."""
        steps = [need for step, need in self.needs.items() if step == "collect" or step.startswith("fit")]
        return max(need.memory for need in steps), sum(need.disk for need in steps)


@checked
def plan_study(
    shape: Shape,
    n_train: PositiveInt,
    n_validation: NonNegativeInt = 0,
    *,
    positions: Positions = "sampled",
    pairs: PairsToFit = "all",
    train_tokens: int | None = None,
    keep_rows: bool = False,
) -> Plan:
    """Plan the memory, disk and operations of each step of a study.

    Parameters
    ----------
    n_train, n_validation
        Numbers of sentences.
    train_tokens
        Tokens of the training sentences, by default thirty each.
    keep_rows
        Whether the vectors of all positions are collected, as with ``--keep-rows``.
    """
    tokens = _SENTENCE * n_train if train_tokens is None else train_tokens
    check_int(tokens, "train_tokens", min=n_train)
    n_rows = n_train if positions == "sampled" else tokens
    length = tokens // n_train
    run = tokens if positions == "all" else tokens // 2 + n_train  # up to the sampled token
    validated = n_validation * (length // 2 + 1)
    rows_of_batch = min(n_rows, _BATCH_TOKENS if positions == "all" else max(2 * _BATCH_TOKENS // length, 1))
    n_layers, d, d_mlp, d_vocab = shape.n_layers, shape.d_model, shape.d_mlp, shape.d_vocab
    n_pairs = n_layers if pairs == "last" else n_layers * (n_layers + 1) // 2
    of_block = max(shape.n_parameters - d_vocab * d, 0)
    of_pass = 4 * _BATCH_TOKENS * (8 * d + 3 * d_mlp)
    sources = stream_widths(n_layers, d, pairs)
    # Each source is factorised, with its Q, and the targets are multiplied by it; the triangle is solved.
    accumulating = n_layers * (4 * n_rows * d**2) + n_pairs * (2 * n_rows * d**2)
    solving = n_pairs * d**3
    validation = (n_validation, length * n_validation, n_validation)
    on_validation = collected_bytes(shape, *validation) if n_validation else 0
    passing, maps = 2 * of_block * (run + validated), 4 * n_pairs * d * d
    collecting = of_pass + 8 * (n_layers + 1) * rows_of_batch * d

    weights = shape.n_parameters * shape.parameter_bytes
    needs = {"load the model": Need(weights, 0, 0)}
    if positions == "all" and not keep_rows:
        # Two checkpoints exist at a time, and the last one next to the result.
        written = 2 * written_statistics_bytes(n_rows, sources, norms=are_few(n_rows, d))
        fitting = streamed_fit_bytes(n_rows, sources, of_sample=(n_layers + 1) * d, widest=d, written=True)
        needs["collect"] = Need(
            weights + collecting + fitting, on_validation + written, passing + accumulating
        )
        needs["fit from sufficient statistics"] = Need(
            stored_fit_bytes(sources, n_rows=n_rows), maps, solving
        )
    else:
        on_train = collected_bytes(shape, n_rows, tokens, n_train)
        needs["collect"] = Need(weights + collecting, on_train + on_validation, passing)
        most_targets = max(d_out for _, d_out in sources) // d
        fitting = collected_fit_bytes(n_rows, d, n_sites=n_layers + 1, most_targets=most_targets)
        needs["fit from collected vectors"] = Need(fitting, maps, accumulating + solving)
    reading = n_layers * n_validation * 2 * d_vocab * d  # of all maps onto the last layer, and identities
    needs["evaluate"] = Need(
        weights + 4 * _ROWS * d_vocab * 4 + 8 * n_validation * d, 0,
        2 * n_pairs * n_validation * d * d + 2 * reading,
    )  # fmt: skip
    return Plan(needs, sum(statistics_bytes(*widths) for widths in sources))


def collected_bytes(shape: Shape, n_rows: int, n_tokens: int, n_sentences: int) -> int:
    """Bytes of the tensors in a folder of collected vectors: the rows of each site, index and examples."""
    columns = (shape.n_layers + 1) * n_rows * _SINGLE * shape.d_model
    return columns + 8 * (n_rows + n_tokens + 3 * n_sentences + 1)


# Bytes of statistics and of fits


def stream_widths(n_layers: int, width: int, pairs: PairsToFit) -> list[Widths]:
    """Widths of each layer of the residual stream and of its targets."""
    counts = [1] * n_layers if pairs == "last" else range(n_layers, 0, -1)
    return [(width, n * width) for n in counts]


def statistics_bytes(d_in: int, d_out: int, n_rows: int = 2**60) -> int:
    """Bytes of the two factors of `LeastSquares`, whose length is the width of ``x`` or the samples."""
    return _DOUBLE * min(n_rows, d_in + 1) * (d_in + 1 + d_out)


def written_statistics_bytes(n_rows: int, sources: Sequence[Widths], *, norms: bool = False) -> int:
    """Bytes of the tensors in files of statistics of all sources, with the norm of each sample or without."""
    factors = sum(statistics_bytes(*widths, n_rows) for widths in sources)
    return factors + _DOUBLE * len(sources) * (1 + n_rows * norms)  # and the number of samples


def collected_fit_bytes(n_rows: int, width: int, *, n_sites: int, most_targets: int) -> int:
    """Memory of a fit on collected vectors, source by source, excluding the vectors."""
    d_out = most_targets * width
    copies = _DOUBLE * n_rows * n_sites * width
    statistics = statistics_bytes(width, d_out, n_rows)
    solving = statistics + max(_DOUBLE * width * d_out * 2, _solve_bytes(n_rows, width, d_out))
    updating = _update_bytes(n_rows, width, d_out)
    if copies <= fitting.CONVERTED_BYTES:
        return copies + max(updating, solving)
    chunk = _SINGLE * min(n_rows, chunk_size(width)) * (width + d_out) * (n_rows > PART)
    return max(chunk + updating, solving)


def streamed_fit_bytes(
    n_rows: int, sources: Sequence[Widths], *, of_sample: int, widest: int, written: bool = False
) -> int:
    """Memory of a fit while streaming: statistics of all sources, and samples until they are a chunk.

    A sample has ``of_sample`` dimensions at all sites together. Statistics that are ``written`` into files,
    whose bytes are made before, are not solved at once.
    """
    chunk = min(n_rows, max(chunk_size(d) for d, _ in sources))
    statistics = [statistics_bytes(*widths, n_rows) for widths in sources]
    waiting = chunk * (of_sample + widest) * _SINGLE
    updating = max(
        waiting + _update_bytes(n_rows, *widths) - own
        for widths, own in zip(sources, statistics, strict=True)
    )
    ending = 2 * max(statistics) if written else max(_solve_bytes(n_rows, *widths) for widths in sources)
    return sum(statistics) + max(updating, ending)


def stored_fit_bytes(
    sources: Sequence[Widths], *, n_rows: int = 2**60, n_shards: int = 1, written: bool = False
) -> int:
    """Memory of a fit on stored statistics, read source by source, or ``written`` as one of ``n_shards``."""
    solving = max(_solve_bytes(n_rows, *widths) for widths in sources)
    statistics = max(statistics_bytes(*widths) for widths in sources)
    merging = max(_merge_bytes(*widths) for widths in sources) if n_shards > 1 else 0
    return max(statistics + (2 * statistics if written else solving), merging)


def _update_bytes(n_rows: int, d: int, d_out: int) -> int:
    """An update of `LeastSquares` by a chunk, the old and the new statistics included."""
    n, later = min(n_rows, chunk_size(d)), n_rows > chunk_size(d)
    factor, product, samples = (d + 1) ** 2, (d + 1) * d_out, n * (d + 1)
    q = samples + later * factor  # of the old factor on top of the samples
    factorising = samples + (1 + later) * q + 2 * factor
    multiplying = samples + q + 2 * factor + product + max(n * d, later * product)
    return _DOUBLE * (max(factorising, multiplying) + later * (factor + product))


def _merge_bytes(d: int, d_out: int) -> int:
    factor, product = (d + 1) ** 2, (d + 1) * d_out
    return _DOUBLE * (6 * factor + 4 * product)


def _solve_bytes(n_rows: int, d: int, d_out: int) -> int:
    """The maps of a source: a triangle is inverted and solved, or has its singular values (6.5 by LAPACK)."""
    if not are_few(n_rows, d):
        return _DOUBLE * (d * d_out + 3 * d * d)
    rank = min(n_rows, d)
    return _DOUBLE * max(13 * rank * d // 2, 2 * rank * d + (rank + d) * d_out)


def format_bytes(n_bytes: int) -> str:
    """Bytes in the largest unit, in powers of ten."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= size:
            return f"{n_bytes / size:{'.3g' if n_bytes < 1000 * size else ',.0f'}} {unit}"
    return f"{n_bytes} bytes"


# Free memory and disk


def free_memory() -> int | None:
    """Available bytes by Linux and the process's control groups; None if unknown."""
    free = []
    with contextlib.suppress(OSError):
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free.append(1024 * int(facts["MemAvailable"].split()[0]))
    with contextlib.suppress(OSError):
        group = _CONTROL_GROUPS / _OWN_GROUP.read_text().rpartition("::")[2].strip().lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such group, or no limit
                limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = int(counts["inactive_file"]) + int(counts["active_file"])  # can be reclaimed
                free.append(limit - used + cached)
    return max(min(free), 0) if free else None


def free_disk(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, or of where it would be."""
    return shutil.disk_usage(nearest_existing(folder)).free


def check_memory(needed: int, work: str, advice: str) -> None:
    """Raise InputError if some work needs more memory than is free."""
    free = free_memory()
    if free is not None:
        _check_free(needed, free, "memory", work, advice)


def check_disk(needed: int, folder: Path, work: str, advice: str) -> None:
    """Raise InputError if some work needs more space than the disk of its folder has."""
    _check_free(needed, free_disk(folder), f"disk at {folder}", work, advice)


def _check_free(needed: int, free: int, of: str, work: str, advice: str) -> None:
    if needed > free:
        raise InputError(
            f"{work} takes {format_bytes(needed)} of {of}, and {format_bytes(free)} are free. {advice}"
        )


def check_fit(n_rows: int, width: int, pairs: Sequence[tuple[str, str]]) -> None:
    """Raise InputError if memory is too small for a fit on collected vectors of this width."""
    most_targets = max(map(len, by_source(pairs).values()))
    n_sites = len({site for pair in pairs for site in pair})
    check_memory(
        collected_fit_bytes(n_rows, width, n_sites=n_sites, most_targets=most_targets),
        f"Fitting {len(pairs)} maps of {width:,} dimensions",
        "Fit maps onto the last layer alone (--pairs last), or on fewer samples (--train).",
    )


def check_streaming(
    n_rows: int, pairs: Sequence[tuple[str, str]], widths: Mapping[str, int], folder: Path
) -> None:
    """Raise InputError if memory or disk are too small for accumulating statistics in an unfinished folder.

    Each process on a machine accumulates its own.
    """
    if is_finished(folder):
        return
    work = f"Accumulating sufficient statistics for {len(pairs)} maps of {max(widths.values()):,} dimensions"
    sources, n_processes = _widths_of(pairs, widths), parallel.local_world_size()
    if parallel.local_rank() == 0:  # for all on its machine
        of_sample, widest = sum(widths.values()), max(widths.values())
        needed = streamed_fit_bytes(n_rows, sources, of_sample=of_sample, widest=widest, written=True)
        processes = f" in {n_processes} processes" if parallel.world_size() > 1 else ""
        advice = "Fit maps onto the last layer alone (--pairs last), or on a machine with more memory."
        check_memory(n_processes * needed, work + processes, advice)
    if parallel.is_main():  # a state to resume from is there until the next is written
        existing = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        needed = 2 * written_statistics_bytes(n_rows, sources) - existing
        advice = "Fit maps onto the last layer alone (--pairs last), or write elsewhere (--out)."
        check_disk(needed, folder, work, advice)


def check_merge(parts: StoredLeastSquares, folder: Path) -> None:
    """Raise InputError if memory or disk are too small for merging parts into an unfinished folder."""
    if is_finished(folder):
        return
    sources, n_parts = _widths_of(parts.pairs, parts.widths), len(parts.parts)
    work = f"Merging {n_parts} parts of {max(parts.widths.values()):,} dimensions"
    needed = stored_fit_bytes(sources, n_shards=n_parts, written=True)
    check_memory(needed, work, "Merge them on a machine with more memory.")
    check_disk(written_statistics_bytes(parts.n_samples, sources), folder, work, "Write elsewhere (--out).")


def check_solve(stored: StoredLeastSquares, pairs: Sequence[tuple[str, str]]) -> None:
    """Raise InputError if memory is too small for fitting maps on stored sufficient statistics."""
    read = [(source, target) for source in by_source(pairs) for target in stored.targets.get(source, ())]
    if read:
        sources, n_parts = _widths_of(read, stored.widths), len(stored.parts)
        needed = stored_fit_bytes(sources, n_rows=stored.n_samples, n_shards=n_parts)
        work = f"Fitting {len(pairs)} maps of {max(stored.widths.values()):,} dimensions"
        check_memory(needed, work, "Fit on a machine with more memory.")


def _widths_of(pairs: Iterable[tuple[str, str]], widths: Mapping[str, int]) -> list[Widths]:
    return [
        (widths[source], sum(widths[target] for target in targets))
        for source, targets in by_source(pairs).items()
    ]
