"""Collected vectors by site, with the examples that they were collected on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from matlens import parallel
from matlens.data.examples import Examples, check_examples
from matlens.errors import InputError, checked
from matlens.io.artifact import CONFIG
from matlens.io.files import damaged
from matlens.io.rows import StoredRows, read_rows
from matlens.models.identity import Provenance
from matlens.models.sites import Site

Positions = Literal["sampled", "all"]
HOLDS = "activations"
PART = 1024  # rows of vectors in memory that are yielded at a time, and that processes divide


@dataclass(frozen=True)
class Rows:
    """Vectors of one batch by site, in float32.

    Row ``i`` of every site belongs to row ``index[i]`` of the collection; ``places`` says which token of its
    sentence it is, from 0. If the stream is ``divided``, other processes have the other batches. ``examples``
    are all that are read, at the positions of the collection.
    """

    index: Int[np.ndarray, " n"]
    places: Int[np.ndarray, " n"]
    vectors: dict[str, Float[Tensor, "n d"]]
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    divided: bool = False
    examples: Examples | None = field(default=None, repr=False)


@checked
class Activations(Mapping[str, Float[Tensor, "n d"]]):
    """Vectors by site, ``[n, d]``: ``activations["h.5"]``, or ``activations[5]`` for a layer.

    Attributes
    ----------
    examples
        The examples they were collected on.
    positions
        ``"sampled"``: a row for each position of the examples, sentence after sentence. ``"all"``: a row for
        every token, sentence after sentence.
    provenance
        The model, the corpus, the seed and the software.
    places
        Which token of its sentence each row is, from 0.
    """

    def __init__(
        self,
        vectors: Mapping[str, Any],  # tensors; those of a folder would be read to check them
        examples: Examples,
        positions: Positions,
        provenance: Provenance,
    ) -> None:
        check_examples(examples, provenance.examples, "the vectors")
        self._vectors = vectors
        self.examples, self.positions, self.provenance = examples, positions, provenance
        self.places: Int[np.ndarray, " n"] = self.at_rows.positions
        for site, given in () if isinstance(vectors, StoredRows) else vectors.items():
            if len(given) != self.n_rows:
                raise InputError(
                    f"vectors of {site} must be {self.n_rows}, one per position, got {len(given)}."
                )

    def __getitem__(self, site: str | int | Site) -> Float[Tensor, "n d"]:
        try:
            name = str(self.resolve(site))
        except InputError as error:
            raise KeyError(f"{error} There are {', '.join(self)}.") from None
        if name not in self._vectors:
            raise KeyError(f"{name} was not collected; there are {', '.join(self)}")
        return self._vectors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def __repr__(self) -> str:
        sites, model = list(self._vectors), self.provenance.model
        named = f"{sites[0]} .. {sites[-1]}" if len(sites) > 1 else sites[0]
        of = "unknown model" if model is None else repr(model.name)
        return f"Activations({named}, {self.n_rows:,} rows, {of})"

    def resolve(self, site: str | int | Site) -> Site:
        """The site of this model, by any of its names; a negative layer counts from the end."""
        return self.provenance.resolve(site)

    def width(self, site: str) -> int:
        """The dimensions of a site's vectors, which are not read."""
        if isinstance(self._vectors, StoredRows) and site in self._vectors:
            return self._vectors.columns[site].width
        return self[site].shape[1]

    def shards(self, sites: Sequence[str | int | Site], *, divided: bool = False) -> Iterator[Rows]:
        """Yield the vectors of some sites part by part, as `stream` does, without reading them all.

        Those of a folder are read shard by shard, in the order in which they were computed. With ``divided``,
        each of several processes is given parts of its own.
        """
        names = [str(self.resolve(site)) for site in sites]
        several = divided and parallel.world_size() > 1
        first, step = (parallel.rank(), parallel.world_size()) if several else (0, 1)
        read = self.at_rows
        for index, vectors in itertools.islice(self._parts(names), first, None, step):
            yield Rows(index, self.places[index], vectors, self.provenance, several, read)

    def _parts(self, names: Sequence[str]) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        if isinstance(self._vectors, StoredRows):
            yield from self._vectors.shards(names)
            return
        for start in range(0, self.n_rows, PART):
            part = slice(start, start + PART)
            yield np.arange(self.n_rows)[part], {name: self[name][part] for name in names}

    @property
    def at_rows(self) -> Examples:
        """The examples, with a position for each row."""
        return self.examples.at_positions(self.positions)

    @property
    def n_rows(self) -> int:
        """Number of vectors of each site."""
        return len(self.places)

    def head(self, n: int) -> Activations:
        """The rows of the first ``n`` sentences."""
        examples = self.examples.head(n)
        n_rows = examples.at_positions(self.positions).n_positions
        vectors = {site: vectors[:n_rows] for site, vectors in self._vectors.items()}
        provenance = replace(self.provenance, data=examples.provenance, examples=examples.fingerprint)
        return Activations(vectors, examples, self.positions, provenance)

    @classmethod
    def load(cls, folder: str | Path) -> Activations:
        """Open a finished folder of `collect`; rows are read from the disk when they are used."""
        config, arrays, vectors = read_rows(folder, HOLDS)
        provenance = Provenance.from_config(config)
        examples = Examples.from_arrays(arrays, provenance.data)
        if provenance.examples not in (None, examples.fingerprint):
            raise damaged(Path(folder) / CONFIG, "does not belong to the tokens and positions next to it")
        return cls(vectors, examples, "all" if provenance.positions == "all" else "sampled", provenance)
