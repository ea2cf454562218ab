"""Results of a table's cells, which an interrupted run resumes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import process_time

import torch
from torch import Tensor

from matlens.io import Artifact
from matlens.study import slug


class Cells:
    """Tensors that are computed once by name, and stored if there is an artifact.

    ``seconds`` are the CPU seconds of those that an earlier run has stored.
    """

    def __init__(self, artifact: Artifact | None = None) -> None:
        self.artifact, self.seconds = artifact, 0.0
        self._known: dict[str, Mapping[str, Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        if name not in self._known and self.artifact is not None and self.artifact.written([slug(name)]):
            self._known[name] = self.artifact.read_all(slug(name))
            self.seconds += float(self._known[name]["seconds"])
        return name in self._known

    def get(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The tensors of this name, computed unless they are known."""
        if name not in self:
            began = process_time()
            made = make()
            self._known[name] = {**made, "seconds": torch.tensor(process_time() - began)}
            if self.artifact is not None:
                self.artifact.write(slug(name), self._known[name])
        return self._known[name]
