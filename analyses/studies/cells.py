"""Results of a long analysis, which an interrupted run resumes with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any

import pandas as pd
from torch import Tensor

from matlens import Lens
from matlens.io import Artifact
from matlens.study import slug
from studies.scripts import SECONDS
from studies.study import Model


class Cells:
    """Results that are computed once by name, and stored in an artifact if there is one.

    ``seconds`` are the CPU seconds of each, also of those that an earlier run has stored.
    """

    def __init__(self, artifact: Artifact | None = None) -> None:
        self.artifact, self.seconds = artifact, dict[str, float]()
        self._known: dict[str, dict[str, Any]] = {}

    @classmethod
    @contextmanager
    def stored(cls, folder: Path, holds: str, job: Mapping[str, Any]) -> Iterator[Cells]:
        """Results in a folder, which those of another job are refused in."""
        with Artifact.writing(folder, holds, job) as artifact:
            yield cls(artifact)

    @property
    def total(self) -> dict[str, float]:
        """The CPU seconds of all results, for the JSON next to a table."""
        return {SECONDS: round(sum(self.seconds.values()), 1)}

    def rows(self, name: str, make: Callable[[], Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Rows of a table of results, computed unless they are known."""
        made = self.get(name, lambda: {"rows": [{**row, "k": _plain(row["k"])} for row in make()]})
        return [row | {"k": pd.NA if row["k"] is None else row["k"]} for row in made["rows"]]

    def get(self, name: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Tensors and values of JSON by their names, computed unless they are known."""
        if not self._is_known(name):
            self._store(name, self._timed(name, make))
        return self._known[name]

    def lens(self, name: str, model: Model, fit: Callable[[], Lens]) -> Lens:
        """A lens, fitted unless it is known; there must be an artifact."""
        assert self.artifact is not None
        folder = self.artifact.folder / f"lens-{name}"
        if not self._is_known(name):
            self._timed(name, fit).save(folder)
            self._store(name, {})
        return Lens.load(folder, model)

    def _timed(self, name: str, make: Callable[[], Any]) -> Any:
        begun = process_time()
        made = make()
        self.seconds[name] = process_time() - begun
        return made

    def _store(self, name: str, made: Mapping[str, Any]) -> None:
        self._known[name] = {**made}
        if self.artifact is not None:
            tensors = {key: value for key, value in made.items() if isinstance(value, Tensor)}
            if tensors:
                self.artifact.write(slug(name), tensors)
            others = {key: value for key, value in made.items() if key not in tensors}
            # Last, since a result is known by its record.
            self.artifact.write_json(slug(name), others | {"seconds": self.seconds[name]})

    def _is_known(self, name: str) -> bool:
        """Whether a result was computed by this run, or by an earlier one that has stored it."""
        record = None
        if name not in self._known and self.artifact is not None:
            record = self.artifact.read_json(slug(name))
        if record is not None and self.artifact is not None:
            tensors = self.artifact.read_all(slug(name)) if self.artifact.written([slug(name)]) else {}
            self.seconds[name] = record.pop("seconds")
            self._known[name] = record | tensors
        return name in self._known


def _plain(k: Any) -> Any:
    """A value of the column ``k`` that JSON has."""
    return None if pd.isna(k) else k
