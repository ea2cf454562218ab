"""Vectors as Parquet: one row per vector, one column per site."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import HOLDS, Activations
from matlens.data.examples import Examples
from matlens.errors import InputError, checked
from matlens.io.files import damaged
from matlens.io.rows import Column, check_complete, writing_rows
from matlens.models.identity import Provenance
from matlens.models.sites import Site
from matlens.numerics import check_finite
from matlens.parallel import Bar

if TYPE_CHECKING:
    import pyarrow

EXAMPLES, VECTORS = "examples.parquet", "vectors-*.parquet"
_FACTS = b"matlens"  # key of the schema's metadata
_ROW_GROUP = 4096


@checked
def write_parquet(
    activations: Activations,
    folder: str | Path,
    sites: Sequence[str | int | Site] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    progress: bool = True,
) -> None:
    """Write vectors as Parquet shards, which `datasets` and pandas read and stream.

    One row per vector: its ``row`` in the collection, its ``sentence``, its ``position`` in the sentence, the
    ``token`` there, and a list of floats for each site. A folder is written shard by shard.

    Parameters
    ----------
    activations
        Result of `collect` or `Activations.load`.
    folder
        An empty folder, or that of an interrupted export.
    sites
        By default all.
    dtype
        ``torch.float32``, or ``torch.bfloat16`` for half the size, written as uint16 since Parquet has no
        bfloat16.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise InputError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype}.")
    if activations.examples.images.size:
        raise InputError("activations must be of tokens, got activations of images.")
    names = [str(activations.resolve(site)) for site in (activations if sites is None else sites)]
    if parallel.is_main():
        _write_folder(activations, Path(folder), names, dtype, progress)
    parallel.barrier("the Parquet export")


def _write_folder(
    activations: Activations, folder: Path, names: Sequence[str], dtype: torch.dtype, progress: bool
) -> None:
    """Write the shards, and at the end the examples, without which the folder is not finished."""
    import pyarrow as pa

    _prepare(folder)
    examples = activations.examples
    facts: dict[str, Any] = {
        "provenance": activations.provenance.to_json(), "examples": examples.fingerprint, "sites": names,
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    places = examples.at_positions(activations.positions)
    tokens = examples.tokens[examples.offsets[places.sentences] + places.positions]
    with Bar(total=activations.n_rows, unit="row", desc="writing", disable=not progress) as bar:
        for number, rows in enumerate(activations.shards(names)):
            columns: dict[str, Any] = {
                "row": rows.index, "sentence": places.sentences[rows.index], "position": rows.places,
                "token": tokens[rows.index],
            }  # fmt: skip
            columns |= {site: _to_arrow(vectors, dtype) for site, vectors in rows.vectors.items()}
            path = folder / VECTORS.replace("*", f"{number:05d}")
            _write(pa.table(columns), {**facts, "shard": number}, path, dtype)
            bar.update(len(rows.index))
    arrays = pa.table({name: pa.array([values]) for name, values in examples.arrays.items()})
    _write(arrays, {**facts, "n_shards": number + 1}, folder / EXAMPLES, dtype)


@checked
def read_parquet(
    source: str | Path, *, folder: str | Path | None = None, progress: bool = True
) -> Activations:
    """Read what `write_parquet` has written, with its provenance; vectors are float32.

    With a ``folder``, shards are copied into it one by one, and read from there when they are used.

    Raises
    ------
    InputError
        A file is missing, damaged, or belongs to another export.
    """
    source = Path(source)
    if not (source / EXAMPLES).is_file():
        raise InputError(f"{source} has no {EXAMPLES}: it is not a finished export. Rerun write_parquet.")
    of_examples, facts = _open(source / EXAMPLES)
    provenance = Provenance.from_json(facts["provenance"])
    with _intact(source / EXAMPLES):
        table = of_examples.read()
        arrays = {name: table[name][0].values.to_numpy().copy() for name in table.column_names}
    examples = Examples.from_arrays(arrays, provenance.data)
    paths = [source / VECTORS.replace("*", f"{number:05d}") for number in range(facts["n_shards"])]
    files, index = [], []
    shared = {key: value for key, value in facts.items() if key != "n_shards"}
    for number, path in enumerate(paths):
        file, of_shard = _open(path)
        if of_shard != {**shared, "shard": number} or facts["examples"] != examples.fingerprint:
            raise InputError(f"{path} and {source / EXAMPLES} must be from the same export.")
        files.append(file)
        with _intact(path):
            index.append(file.read(["row"])["row"].to_numpy())
    positions: Any = "all" if provenance.positions == "all" else "sampled"
    check_complete(index, examples.at_positions(positions).n_positions, source / EXAMPLES)
    counts = [file.metadata.num_rows for file in files]
    columns = {site: Column(files[0].schema_arrow.field(site).type.list_size) for site in facts["sites"]}

    request = {
        "provenance": provenance.to_json(), "parquet": facts["examples"], "dtype": facts["dtype"],
        "counts": counts,
    }  # fmt: skip
    with (
        writing_rows(HOLDS, request, columns, counts, folder=folder, arrays=examples.arrays) as writer,
        Bar(total=sum(counts), unit="row", desc="reading", disable=not progress) as bar,
    ):
        for number in writer.missing:
            with _intact(paths[number]):
                table = files[number].read()
                vectors = {
                    site: _from_arrow(table[site], column.width, facts["dtype"])
                    for site, column in columns.items()
                }
            for site, of_site in vectors.items():
                check_finite(of_site, site)
            writer.add(table["row"].to_numpy().copy(), vectors)
            bar.update(table.num_rows)
    return Activations(writer.rows, examples, positions, Provenance.from_config(writer.config))


def _prepare(folder: Path) -> None:
    """An empty folder; the files of an interrupted export are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = [path for path in folder.iterdir() if path.match(VECTORS) or path.suffix == ".part"]
    if (folder / EXAMPLES).exists() or len(unfinished) < len(list(folder.iterdir())):
        raise InputError(f"{folder} must be empty. Choose another folder.")
    for path in unfinished:
        path.unlink()


def _write(table: pyarrow.Table, facts: dict[str, Any], path: Path, dtype: torch.dtype) -> None:
    import pyarrow.parquet as pq

    part = path.with_suffix(".part")
    # Parquet stores uint16 in four bytes, whose zeros compress; the random mantissas of float32 do not.
    pq.write_table(
        table.replace_schema_metadata({_FACTS: json.dumps(facts)}), part, row_group_size=_ROW_GROUP,
        compression="zstd" if dtype is torch.bfloat16 else "none", use_dictionary=False,
        write_page_checksum=True,
    )  # fmt: skip
    os.replace(part, path)


def _open(path: Path) -> tuple[Any, dict[str, Any]]:
    """A Parquet file, and what it was written with."""
    import pyarrow.parquet as pq

    with _intact(path):
        file = pq.ParquetFile(path, page_checksum_verification=True)
        return file, json.loads(file.schema_arrow.metadata[_FACTS])


@contextlib.contextmanager
def _intact(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise damaged(path, f"cannot be read ({error})") from None


def _to_arrow(vectors: Tensor, dtype: torch.dtype) -> pyarrow.Array:
    """Lists of fixed size; bfloat16, which Parquet lacks, is written as uint16."""
    import pyarrow as pa

    values = vectors.to(dtype)
    bits = values.view(torch.uint16) if dtype == torch.bfloat16 else values
    return pa.FixedSizeListArray.from_arrays(
        pa.array(bits.contiguous().numpy().reshape(-1)), vectors.shape[1]
    )


def _from_arrow(column: pyarrow.ChunkedArray, width: int, dtype: str) -> Tensor:
    values = torch.from_numpy(column.combine_chunks().flatten().to_numpy(zero_copy_only=False).copy())
    if dtype == "bfloat16":
        values = values.view(torch.bfloat16)
    return values.reshape(-1, width).float()
