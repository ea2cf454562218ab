"""What several analyses of one model and corpus share besides vectors and maps: made once, in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

import matlens.study
from matlens.activations import Activations, sink_rows
from matlens.activations.collecting import collect
from matlens.data.examples import Examples
from matlens.ffn import Clusters, Trace, ValueVectors
from matlens.ffn.updates import DOMINANT
from matlens.io.artifact import is_finished
from matlens.linear import LinearMap, MapSet, write_maps
from matlens.linear.fitting import fit_samples, fitting_bar
from matlens.linear.pairs import resolve_pairs
from matlens.models import ModelLayout
from matlens.models.identity import ModelIdentity
from matlens.patching.submodules import fit_submodules, submodule_pairs
from matlens.study import cluster_values
from matlens.study.output import TRAIN
from matlens.study.steps import chosen_ridge
from studies.heads import head_outputs, head_pairs

Fitted = Literal["all", "not-first", "not-sink"]


@dataclass(frozen=True, kw_only=True)
class Study(matlens.study.Study):
    """A study with maps of sub-modules and heads, a trace and clusters, each made when it is asked for."""

    @property
    def origin_of_weights(self) -> dict[str, Any]:
        """The model and the seed, for numbers that come from no map."""
        return {"model": ModelIdentity.from_model(self.model).to_json(), "seed": self.seed}

    @cached_property
    def maps_without_sinks(self) -> MapSet:
        """``mat`` for the pairs of layers, fitted on all samples but attention sinks."""
        samples = self.stream[0]
        rows, wanted = ~sink_rows(samples), resolve_pairs(self.pairs, samples.provenance)
        n, intercept = int(rows.sum()), self.intercept
        ridge = chosen_ridge(self.ridge, samples, wanted, n_fitted=n)

        def fit(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
            maps = fit_samples(samples, missing, rows=rows, intercept=intercept, ridge=ridge)
            return fitting_bar(maps, len(missing), progress=True)

        origin = samples.provenance.samples.with_details(
            n_samples=n, fitted="not-sink", intercept=intercept, ridge=ridge
        )
        return write_maps(self.folder / "maps-not-sink", wanted, fit, origin)

    @cached_property
    def submodule_samples(self) -> Activations:
        """Inputs and outputs of all sub-modules at the drawn positions of the training sentences.

        Asked for before anything else, they are collected in one pass with the stream and the heads' outputs.
        """
        layout = ModelLayout.from_model(self.model)
        ends = _sites_of(submodule_pairs(layout))
        train = self.folder / TRAIN
        if is_finished(train):
            return self._training(ends, "train-submodules")
        return collect(
            self.model, self.examples[0], [*layout.stream, *ends, *head_outputs(layout)], folder=train
        )

    def submodule_maps(self, fitted: Fitted = "all") -> MapSet:
        """Maps of all sub-modules, fitted on all samples, all but first tokens, or all but sinks."""
        samples = self.submodule_samples
        by_name: dict[str, Callable[[], torch.Tensor | None]] = {
            "all": lambda: None,
            "not-first": lambda: torch.from_numpy(samples.places > 0),
            "not-sink": lambda: ~sink_rows(self.stream[0]),
        }
        rows = by_name[fitted]()

        def fit(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
            return fit_submodules(samples, missing, rows=rows)

        maps = write_maps(
            self.folder / f"submodule-maps-{fitted}",
            submodule_pairs(ModelLayout.from_model(self.model)), fit,
            samples.provenance.samples.with_details(
                n_samples=samples.n_rows if rows is None else int(rows.sum()), fitted=fitted
            ),
        )  # fmt: skip
        return maps.in_memory(device=self.model.cfg.device)

    def stand_ins(self, *fitted: Fitted) -> dict[str, MapSet]:
        """Sets of `submodule_maps` by what each was fitted on."""
        return {name: self.submodule_maps(name) for name in fitted}

    @cached_property
    def head_samples(self) -> tuple[Activations, Activations]:
        """Inputs of attention and outputs of its heads, of the training and the validation sentences."""
        layout = ModelLayout.from_model(self.model)
        ends = _sites_of(head_pairs(layout))
        sites = [*ends, str(layout.stream[-1])]
        validation = collect(
            self.model, self.validation_examples, sites, folder=self.folder / "validation-heads"
        )
        return self._training(ends, "train-heads"), validation

    def _training(self, sites: list[str], otherwise: str) -> Activations:
        """Sites of the training sentences: in ``train/`` if it has them, else in another folder."""
        folder = self.folder / TRAIN
        existing = list(Activations.load(folder)) if is_finished(folder) else []
        if set(sites) <= set(existing):
            sites = existing
        else:
            folder = self.folder / otherwise
        return collect(self.model, self.examples[0], sites, folder=folder)

    @property
    def validation_examples(self) -> Examples:
        """The validation sentences as the model reads them, with a position drawn in each."""
        return self.examples[1]

    @cached_property
    def values(self) -> ValueVectors:
        """The model's value vectors."""
        return ValueVectors(self.model)

    def trace(self, k: int = DOMINANT) -> Trace:
        """What FFNs do to the predictions for the validation sentences, with ``k`` dominant sub-updates."""
        return Trace.run(
            self.model, self.validation_examples, k=k, seed=self.seed, folder=self._traces(f"k{k}")
        )

    def collect_validation(self, sites: Sequence[str]) -> Activations:
        """Vectors of sites at the drawn positions of the validation sentences, stored next to the traces."""
        return collect(self.model, self.validation_examples, sites, folder=self._traces("stream"))

    def clusters(self, n_clusters: int, **options: Any) -> Clusters:
        """Clusters of the model's value vectors, see `cluster_values`."""
        return cluster_values(self.values, self.out, n_clusters, **options)

    def _traces(self, what: str) -> Path:
        n_train, n_validation = self.sizes
        sizes = f"{n_validation}" if n_train == 1 else f"{n_train}+{n_validation}"
        return self.out / "traces" / f"{self.name}--{sizes}-seed{self.seed}-{what}"


def _sites_of(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return sorted({site for pair in pairs for site in pair})
