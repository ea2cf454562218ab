"""One model on one corpus: what all analyses of the pair share, collected and fitted once.

The folder ``studies/<model>--<corpus>/`` of an output folder holds ``train/``, ``validation/`` and sets of
maps; every script that is given the same output folder finds there what another has left.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from matlens.activations.activations import Activations
from matlens.activations.collecting import collect
from matlens.activations.sinks import sink_rows
from matlens.corpora.corpus import Corpus, load_corpus
from matlens.corpora.examples import make_examples
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet, write_maps
from matlens.models.anatomy import Anatomy
from matlens.models.loading import load
from matlens.models.readout import Readout
from matlens.patching.submodules import fit_submodules, submodule_pairs
from matlens.study import workflow

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Fitted = Literal["all", "not-first", "not-sink"]


@dataclass(frozen=True)
class Study:
    """A model, a corpus and sizes; everything else is made when it is first asked for.

    Attributes
    ----------
    model, corpus
        Loaded.
    folder
        Where activations and maps are.
    n_train, n_validation, seed
        As in `Corpus.split`.
    """

    model: TransformerBridge
    corpus: Corpus
    folder: Path
    n_train: int
    n_validation: int
    seed: int = 0

    @classmethod
    def load(
        cls,
        model: str | TransformerBridge,
        corpus: str,
        out: Path,
        *,
        n_train: int,
        n_validation: int,
        seed: int = 0,
        device: str | None = None,
    ) -> Study:
        """Load what is named; the corpus first, which takes seconds where a model can take minutes."""
        sentences = load_corpus(corpus)
        sentences.split(n_train=n_train, n_validation=n_validation, seed=seed)
        loaded = load(model, device=device) if isinstance(model, str) else model
        folder = out / "studies" / f"{slug(loaded.cfg.model_name)}--{slug(corpus)}"
        return cls(loaded, sentences, folder, n_train, n_validation, seed)

    @cached_property
    def stream(self) -> tuple[Activations, Activations]:
        """The stream at the drawn positions of the training and of the validation sentences."""
        return workflow.collect_parts(
            self.model, self.corpus, self.folder,
            n_train=self.n_train, n_validation=self.n_validation, seed=self.seed,
        )  # fmt: skip

    @property
    def validation(self) -> Activations:
        """The stream of the validation sentences."""
        return self.stream[1]

    @cached_property
    def maps(self) -> MapSet:
        """``mat`` for every pair of layers."""
        _ = self.stream
        return workflow.fit_maps(self.folder)

    @cached_property
    def readout(self) -> Readout:
        """The model's read-out."""
        return Readout(self.model)

    @property
    def n_layers(self) -> int:
        """``L``."""
        return int(self.model.cfg.n_layers)

    @cached_property
    def samples_of_submodules(self) -> Activations:
        """Inputs and outputs of all sub-modules at the drawn positions of the training sentences.

        Asked for before anything else, they are collected in one pass with the stream.
        """
        found = Anatomy.from_model(self.model)
        ends = sorted({site for pair in submodule_pairs(found) for site in pair})
        examples = make_examples(self.model, self._train, seed=self.seed)
        train = self.folder / workflow.TRAIN
        if (train / "config.json").is_file():
            there = Activations.load(train)
            if set(ends) <= set(there):
                return collect(self.model, examples, list(there), folder=train)
            return collect(self.model, examples, ends, folder=self.folder / "train-submodules")
        return collect(self.model, examples, [*found.stream, *ends], folder=train)

    def submodule_maps(self, fitted: Fitted = "all") -> MapSet:
        """Stand-ins for all sub-modules, fitted on all samples, all but first tokens, or all but sinks."""
        samples = self.samples_of_submodules
        rows = {
            "all": lambda: None,
            "not-first": lambda: torch.from_numpy(samples.places > 0),
            "not-sink": lambda: ~sink_rows(self.stream[0]),
        }[fitted]()

        def fit(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
            return fit_submodules(samples, missing, rows=rows)

        maps = write_maps(
            self.folder / f"submodule-maps-{fitted}", submodule_pairs(Anatomy.from_model(self.model)), fit,
            samples.provenance.samples.with_details(n_samples=samples.n_rows, fitted=fitted),
        )  # fmt: skip
        return maps.held(device=self.model.cfg.device)

    @property
    def origin(self) -> dict[str, Any]:
        """What the study's numbers come from."""
        return workflow.origin_of(self.maps, self.validation)

    @property
    def _train(self) -> Corpus:
        return self.corpus.split(n_train=self.n_train, n_validation=self.n_validation, seed=self.seed)[0]


def slug(name: str) -> str:
    """Name a folder after a model or a corpus; files of one name in different folders get different ones."""
    path = Path(name)
    if not path.exists():
        return re.sub(r"[^\w.-]+", "-", name)
    return f"{path.resolve().name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
