"""A study of one model and corpus, shared by analyses in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import matlens.study
from matlens import InputError, MapSet, collect
from matlens.activations import Activations, sink_counts, sink_rows
from matlens.data import Corpus, Examples
from matlens.ffn import Clusters, Trace, ValueVectors
from matlens.linear import fit_samples, resolve_pairs, write_maps
from matlens.models import ModelIdentity, ModelLayout
from matlens.patching import fit_submodules, submodule_pairs
from matlens.study import cluster_values, slug

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge as Model
else:
    Model = Any  # its import takes seconds


def absent() -> Any:
    """Raise InputError: the analysis has no such option."""
    raise InputError("This analysis takes no such model or corpus.")


@dataclass(frozen=True, kw_only=True)
class Study(matlens.study.Study):
    """A study with lazily computed maps of sub-modules and heads, traces and clusters.

    It is in the folder ``studies/<model>--<corpus>/`` of ``out``.
    """

    load_parts: Callable[[], tuple[Corpus, Corpus]] = absent
    load_corpus: Callable[[], Corpus] = absent

    @cached_property
    def corpus(self) -> Corpus:
        """All sentences."""
        return self.load_corpus()

    def check_job(self) -> None:
        """Read the corpus before the model is loaded; the folder is named after the model."""
        if self.load_parts is not absent:
            _ = self.parts

    @property
    def name(self) -> str:
        """Name of the study's folders, from the model and the corpus."""
        return f"{slug(self.model.cfg.model_name)}--{slug(self.corpus.name)}"

    @property
    def folder(self) -> Path:
        """Where activations, maps and results are."""
        return self.out / "studies" / self.name

    @property
    def origin_of_weights(self) -> dict[str, Any]:
        """The model and the seed, for results without maps."""
        return {"model": ModelIdentity.from_model(self.model).to_json(), "seed": self.seed}

    @cached_property
    def maps_without_sinks(self) -> MapSet:
        """``mat`` for the pairs of layers, fitted without attention sinks."""
        samples = self.stream[0]
        pairs = resolve_pairs(self.pairs, samples.provenance)
        return self._maps("maps", "not-sink", samples, pairs, fit_samples)

    def _maps(self, kind: str, fitted: str, samples: Activations, pairs: Any, fit: Any) -> MapSet:
        """Maps fitted on ``all``, ``not-first`` or ``not-sink`` samples, in a folder of their own."""
        rows: dict[str, Any] = {}
        if fitted != "all":
            is_first = torch.from_numpy(samples.places == 0)
            rows["rows"] = ~(is_first if fitted == "not-first" else sink_rows(self.stream[0]))
        n_samples = int(rows["rows"].sum()) if rows else samples.n_rows
        details = samples.provenance.samples.with_details(n_samples=n_samples, fitted=fitted)
        return write_maps(self.folder / f"{kind}-{fitted}", pairs, partial(fit, samples, **rows), details)

    @cached_property
    def submodule_samples(self) -> Activations:
        """Inputs and outputs of all sub-modules at the sampled positions of the training sentences.

        If accessed first, they are collected in one pass with the residual stream and the heads' outputs.
        """
        layout = ModelLayout.from_model(self.model)
        ends = _sites_of(submodule_pairs(layout))
        if self._collected:
            return self._training(ends, "train-submodules")
        sites = [*map(str, layout.stream), *ends, *head_outputs(layout)]
        return collect(self.model, self.examples[0], sites, folder=self.folder / "train")

    def submodule_maps(self, *fitted: str) -> dict[str, MapSet]:
        """Maps of all sub-modules, fitted on ``all``, ``not-first`` or ``not-sink`` tokens."""
        samples, pairs = self.submodule_samples, submodule_pairs(ModelLayout.from_model(self.model))
        return {
            name: self._maps("submodule-maps", name, samples, pairs, fit_submodules).in_memory(
                device=self.model.cfg.device
            )
            for name in fitted
        }

    @cached_property
    def head_samples(self) -> tuple[Activations, Activations]:
        """Inputs of attention and outputs of heads, for training and validation sentences."""
        layout = ModelLayout.from_model(self.model)
        ends = _sites_of(head_pairs(layout))
        sites = [*ends, str(layout.stream[-1])]
        validation = collect(
            self.model, self.validation_examples, sites, folder=self.folder / "validation-heads"
        )
        return self._training(ends, "train-heads"), validation

    @property
    def _collected(self) -> list[str]:
        """Sites already collected for the training sentences."""
        with suppress(InputError, OSError):
            return list(Activations.load(self.folder / "train"))
        return []

    def _training(self, sites: list[str], otherwise: str) -> Activations:
        """Vectors of the training sentences: from ``train/`` if it has the sites, else another folder."""
        folder = self.folder / "train"
        existing = self._collected
        if set(sites) <= set(existing):
            sites = existing
        else:
            folder = self.folder / otherwise
        return collect(self.model, self.examples[0], sites, folder=folder)

    @property
    def validation_examples(self) -> Examples:
        """The tokenized validation sentences, with a sampled position in each."""
        return self.examples[1]

    @cached_property
    def values(self) -> ValueVectors:
        """The model's value vectors."""
        return ValueVectors(self.model)

    def trace(self, k: int = 10) -> Trace:
        """A trace of the validation sentences with ``k`` dominant sub-updates."""
        folder = self._traces(f"k{k}")
        return Trace.run(self.model, self.validation_examples, k=k, seed=self.seed, folder=folder)

    def trace_origin(self, trace: Trace) -> dict[str, Any]:
        """Provenance of values of a trace, and its numbers of sinks."""
        sinks = sink_counts(trace.sinks, trace.examples.positions)
        return trace.provenance.to_json("model", "data", "seed", "k") | sinks

    def collect_validation(self, sites: Sequence[str]) -> Activations:
        """Vectors of sites at the positions of the validation sentences, stored next to the traces."""
        return collect(self.model, self.validation_examples, sites, folder=self._traces("stream"))

    def clusters(self, n_clusters: int, **options: Any) -> Clusters:
        """Clusters of the model's value vectors, see `cluster_values`."""
        return cluster_values(self.values, self.out, n_clusters, **options)

    def _traces(self, what: str) -> Path:
        n_train, n_validation = map(len, self.parts)
        sizes = f"{n_validation}" if n_train == 1 else f"{n_train}+{n_validation}"
        return self.out / "traces" / f"{self.name}--{sizes}-seed{self.seed}-{what}"


def head_pairs(layout: ModelLayout) -> list[tuple[str, str]]:
    """Input of attention and outputs of its heads in every block."""
    if "attn_in" not in layout.kinds:
        raise InputError(f"model must have blocks whose attention input is known, got {layout.wiring.name}.")
    pairs = []
    for layer in range(layout.n_layers):
        target = layout.resolve(f"z.{layer}")
        if len(layout.hooks[layout.hook(target)].shape) != 2:
            raise InputError(f"{target} must be a site with shape [heads, width].")
        pairs.append((f"attn_in.{layer}", str(target)))
    return pairs


def head_outputs(layout: ModelLayout) -> list[str]:
    """Outputs of the heads in every block; empty if unknown."""
    try:
        return [target for _, target in head_pairs(layout)]
    except InputError:
        return []


def _sites_of(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return sorted({site for pair in pairs for site in pair})
