"""What was collected: vectors by site, with what they were collected on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from matlens.data.examples import ARRAYS, OTHERS, Examples
from matlens.errors import InputError, checked
from matlens.io.files import damaged
from matlens.io.folders import CONFIG, reading_record
from matlens.io.rows import read_rows
from matlens.models.identity import Provenance
from matlens.models.sites import Site

Positions = Literal["drawn", "all"]
HOLDS = "activations"


@checked
class Activations(Mapping[str, Float[Tensor, "n d"]]):
    """Vectors by site: ``activations["h.5"]``, or ``activations[5]`` for the stream, is ``[n, d]``.

    Attributes
    ----------
    examples
        What they were collected on.
    positions
        ``"drawn"``: a row for each position of the examples, sentence after sentence, so one a sentence where
        one was drawn. ``"all"``: a row for every token, sentence after sentence.
    provenance
        The model, the corpus, the seed and the software.
    """

    def __init__(
        self,
        vectors: Mapping[str, Float[Tensor, "n d"]],
        examples: Examples,
        positions: Positions,
        provenance: Provenance,
    ) -> None:
        self._vectors = vectors
        self.examples, self.positions, self.provenance = examples, positions, provenance

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

    @property
    def n_rows(self) -> int:
        """Number of vectors of each site."""
        return len(next(iter(self._vectors.values())))

    @property
    def places(self) -> Int[np.ndarray, " n"]:
        """Which token of its sentence each row is, from 0."""
        return self.examples.positions if self.positions == "drawn" else self.examples.places

    def head(self, n: int) -> Activations:
        """The rows of the first ``n`` sentences."""
        examples = self.examples.head(n)
        rows = examples.n_positions if self.positions == "drawn" else len(examples.tokens)
        vectors = {site: vectors[:rows] for site, vectors in self._vectors.items()}
        provenance = replace(self.provenance, data=examples.provenance, examples=examples.fingerprint)
        return Activations(vectors, examples, self.positions, provenance)

    @classmethod
    def load(cls, folder: str | Path) -> Activations:
        """Open a finished folder of `collect`; rows are read from the disk when they are used.

        Raises
        ------
        InputError
            The folder holds no finished collection.
        """
        config, arrays, vectors = read_rows(folder, HOLDS, ARRAYS, optional=OTHERS)
        with reading_record(folder):
            provenance = Provenance.from_config(config)
            examples = Examples.from_arrays(arrays, provenance.data)
            if provenance.examples not in (None, examples.fingerprint):
                raise damaged(Path(folder) / CONFIG, "does not belong to the tokens and positions beside it")
            return cls(vectors, examples, "all" if provenance.positions == "all" else "drawn", provenance)
