"""One model on one corpus: collected and fitted once, for the command line and all analyses.

The folder holds ``train/`` and ``validation/`` (activations; of all positions ``statistics/`` in place of the
first), ``maps/`` and results. What exists is not computed again, and an interrupted run resumes.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from tqdm.auto import tqdm

from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import collect
from matlens.data.corpus import Corpus
from matlens.data.examples import Examples
from matlens.data.making import make_examples
from matlens.data.readers import is_masked
from matlens.errors import InputError, NonNegative, PositiveInt, Seed, checked
from matlens.ffn.agglomeration import Linkage, method_within
from matlens.ffn.clusters import Clusters
from matlens.ffn.values import ValueVectors
from matlens.io.artifact import Artifact, is_finished
from matlens.io.files import check_writable
from matlens.linear.least_squares import are_few
from matlens.linear.mapsets import MapSet
from matlens.linear.pairs import Pairs, resolve_pairs
from matlens.linear.streaming import StoredLeastSquares, pairs_and_widths, stream_least_squares
from matlens.models.readout import Readout
from matlens.study.plan import (
    Shape,
    check_disk,
    check_fit,
    check_streaming,
    collected_bytes,
)
from matlens.study.steps import (
    HOLDS,
    MAPS,
    STATISTICS,
    TRAIN,
    VALIDATION,
    evaluate_maps,
    fit_maps,
    has_statistics,
    origin_of,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PositionsOrAuto = Positions | Literal["auto"]


@checked
@dataclass(frozen=True, kw_only=True)
class Study:
    """A model and two parts of a corpus; everything else is computed lazily.

    Attributes
    ----------
    load_model, load_parts
        Functions that return the model, and the training and the validation sentences.
    out
        The folder of activations, maps and results.
    seed
        For the sampled positions.
    positions
        With ``"all"`` maps are fitted on every token of the training part; the validation part has one
        sampled position per sentence, so that results compare. ``"auto"`` is ``"all"`` if there are fewer
        training sentences than ``2 d_model`` and all positions can be used.
    sample_special, batch_tokens
        As in `make_examples` and `collect`.
    pairs, intercept, ridge
        Which maps are fitted and how, as in `fit_maps`.
    keep_rows
        Whether the vectors of all positions are stored on disk, or only their sufficient statistics.
    """

    load_model: Callable[[], TransformerBridge]
    load_parts: Callable[[], tuple[Corpus, Corpus]]
    out: Path
    seed: Seed = 0
    positions: PositionsOrAuto = "sampled"
    sample_special: bool = True
    batch_tokens: int | None = None
    pairs: Pairs = "all"
    intercept: bool = False
    ridge: NonNegative | None = 0.0
    keep_rows: bool = True

    def __post_init__(self) -> None:
        if self.positions == "all" and not self.sample_special:
            raise InputError(
                "sample_special must be True for all positions (no --skip-special). Use sampled positions."
            )

    @cached_property
    def parts(self) -> tuple[Corpus, Corpus]:
        """The training and the validation sentences."""
        return self.load_parts()

    @cached_property
    def model(self) -> TransformerBridge:
        """The model; the corpus and the folder are checked first, since a model can take minutes."""
        self.check_job()
        return self.load_model()

    def check_job(self) -> None:
        """Refuse a folder with vectors of another job, as far as that is known without the model."""
        check_writable(self.folder)
        train, validation = self.parts
        for name, holds in HOLDS.items():
            known: dict[str, Any] = {}
            if name != MAPS:
                part = validation if name == VALIDATION else train
                data = {"seed": self.seed, "n": len(part), "corpus_fingerprint": part.fingerprint}
                known = {"data": data}
                if name != VALIDATION and self.positions != "auto":
                    known["positions"] = self.positions
            Artifact.check_possible(self.folder / name, holds, {"provenance": known})

    @property
    def n_layers(self) -> int:
        """``L``."""
        return int(self.model.cfg.n_layers)

    @property
    def folder(self) -> Path:
        """Where activations, maps and results are."""
        return self.out

    @cached_property
    def readout(self) -> Readout:
        """The model's readout."""
        return Readout(self.model)

    @cached_property
    def examples(self) -> tuple[Examples, Examples]:
        """The training and the validation sentences as the model reads them, with a sampled position each."""
        train, validation = (
            make_examples(self.model, part, seed=self.seed, sample_special=self.sample_special)
            for part in self.parts
        )
        return train, validation

    @cached_property
    def stream(self) -> tuple[Activations, Activations]:
        """The residual stream of the training and the validation sentences."""
        return self._training_vectors(keep_rows=True), self._vectors(VALIDATION, "sampled")

    @cached_property
    def validation(self) -> Activations:
        """The residual stream of the validation sentences; collects the training part as well."""
        if self.keep_rows:
            return self.stream[1]
        self._training_vectors(keep_rows=False)
        return self._vectors(VALIDATION, "sampled")

    def _training_vectors(self, *, keep_rows: bool) -> Any:
        keep_rows = keep_rows or (self.folder / TRAIN).is_dir()
        sampled = self.training_positions == "sampled"
        if keep_rows or (sampled and not has_statistics(self.folder)):
            return self._vectors(TRAIN, self.training_positions)
        return self._statistics(self.folder / STATISTICS)

    def _vectors(self, name: str, positions: Positions) -> Activations:
        examples, folder = self.examples[name == VALIDATION], self.folder / name
        if not folder.exists():  # checked when the folder was begun
            n_tokens, n_rows = len(examples.tokens), examples.at_positions(positions).n_positions
            advice = "Collect fewer sentences, or write elsewhere (--out)."
            if positions == "all":
                advice = "One sampled token of each sentence takes far less (--positions sampled)."
            needed = collected_bytes(Shape.from_model(self.model), n_rows, n_tokens, examples.n_positions)
            check_disk(needed, folder, f"Collecting {n_rows:,} vectors of each layer", advice)
        return collect(
            self.model, examples, positions=positions, folder=folder, batch_tokens=self.batch_tokens
        )

    def _statistics(self, folder: Path, part: tuple[int, int] = (1, 1)) -> StoredLeastSquares:
        examples, (requested, widths) = self.examples[0], pairs_and_widths(self.model, self.pairs)
        positions = self.training_positions
        n_rows = examples.at_positions(positions).n_positions
        check_streaming(math.ceil(n_rows / part[1]), requested, widths, folder)
        return stream_least_squares(
            self.model, examples, folder, pairs=requested, positions=positions, part=part,
            batch_tokens=self.batch_tokens,
        )  # fmt: skip

    def part_statistics(self, number: int, of: int) -> StoredLeastSquares:
        """Sufficient statistics of one of several parts of the training sentences, in the folder."""
        return self._statistics(self.folder, (number, of))

    @cached_property
    def training_positions(self) -> Positions:
        """Positions of the training sentences that maps are fitted on, where ``"auto"`` is decided."""
        positions, model, examples = self.positions, self.model, self.examples[0]
        if positions == "all" and is_masked(model):
            raise InputError(
                "positions must be 'sampled' for a masked LM, got 'all': only the sampled token of each "
                "sentence is masked, and only its output is a prediction."
            )
        if positions != "auto":
            return positions
        d_model = model.cfg.d_model
        # A penalty is the alternative for few sentences.
        if self.ridge or is_masked(model) or not self.sample_special or not are_few(len(examples), d_model):
            return "sampled"
        tqdm.write(
            f"{len(examples):,} sentences are few for {d_model:,} dimensions: the maps are fitted on all of "
            f"their {len(examples.tokens):,} tokens. --positions sampled takes one of each sentence.",
            file=sys.stderr,
        )
        return "all"

    @cached_property
    def maps(self) -> MapSet:
        """``mat`` for the pairs of layers."""
        requested = resolve_pairs(self.pairs, self.n_layers)  # before the work, not after it
        with_vectors = self.positions == "sampled" or self.keep_rows  # one sample per sentence, or more
        if with_vectors and not is_finished(self.folder / MAPS):
            check_fit(len(self.parts[0]), self.model.cfg.d_model, requested)
        _ = self.validation
        return fit_maps(self.folder, pairs=self.pairs, intercept=self.intercept, ridge=self.ridge)

    def evaluate(self) -> pd.DataFrame:
        """Evaluate the maps on the validation sentences, into ``results.csv`` of the folder."""
        _ = self.maps
        return evaluate_maps(self.model, self.folder)

    @property
    def origin(self) -> dict[str, Any]:
        """Provenance of the study's values."""
        return origin_of(self.maps, self.validation)


@checked
def slug(name: str) -> str:
    """A folder name for a model or a corpus; paths get a suffix that makes them unique."""
    if not name.strip():
        raise InputError("The names of model and corpus must not be empty.")
    path = Path(name)
    if not os.path.exists(path):
        return re.sub(r"[^\w.-]+", "-", name)
    return f"{path.resolve().name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"


@checked
def cluster_values(
    values: ValueVectors,
    out: Path,
    n_clusters: PositiveInt = 10_000,
    *,
    linkage: Linkage = "average",
    memory: NonNegative = 4.0,
) -> Clusters:
    """Clusters of a model's value vectors, in ``clusters/`` of an output folder; see `Clusters.fit`."""
    method = method_within(len(values), memory)
    kind = f"{linkage}-{method}" if linkage == "complete" else method
    folder = out / "clusters" / f"{slug(values.identity.name)}--{n_clusters}-{kind}"
    return Clusters.fit(values, n_clusters, linkage=linkage, memory=memory, folder=folder)
