"""One model on one corpus: what all analyses of the pair share, collected, fitted and traced once.

An output folder holds ``studies/<model>--<corpus>/`` with ``train/``, ``validation/`` and sets of maps,
``traces/`` and ``clusters/``; every analysis that is given the same output folder finds there what another
has left.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch
from tqdm.auto import tqdm

from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import collect
from matlens.activations.sinks import sink_rows
from matlens.activations.stored_moments import StoredMoments
from matlens.data.corpus import Corpus
from matlens.data.corpus_examples import make_examples
from matlens.data.examples import Examples
from matlens.errors import InputError, NonNegative, checked, printable
from matlens.ffn.clusters import MEMORY_GIB, N_CLUSTERS, Clusters
from matlens.ffn.trace import Trace
from matlens.ffn.updates import DOMINANT
from matlens.ffn.values import ValueVectors
from matlens.io.artifact import is_finished
from matlens.linear.fitting import fit_samples, fitting_bar
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet, write_maps
from matlens.linear.pairs import Pairs, resolve_pairs
from matlens.linear.samples import are_few
from matlens.linearity.heads import head_outputs, head_pairs
from matlens.models.identity import ModelIdentity
from matlens.models.layout import ModelLayout
from matlens.models.readout import Readout
from matlens.numerics.agglomeration import Linkage, method_within
from matlens.patching.submodules import fit_submodules, submodule_pairs
from matlens.study.fits import chosen_ridge, fit_maps
from matlens.study.output import MAPS, MOMENTS, TRAIN, VALIDATION, check_output
from matlens.study.parts import PositionsOrAuto, accumulate, collect_parts, training_positions
from matlens.study.plan import CHARACTERS, Part, Shape, check_fit, fitting_sizes, plan_study
from matlens.study.results import evaluate_maps, origin_of

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Fitted = Literal["all", "not-first", "not-sink"]


@checked
@dataclass(frozen=True, kw_only=True)
class Study:
    """A model, a corpus and sizes; everything else is made when it is first asked for.

    Attributes
    ----------
    load_model, load_corpus
        What gives the model and the corpus; a study of the weights alone has no corpus, and one of a corpus
        alone no model.
    load_values
        What gives the value vectors, where that is not the model.
    out
        The output folder.
    n_train, n_validation, seed
        Sizes of the two parts of the corpus, and the seed of `Corpus.split`, of the positions and of the
        random sub-updates. Without sizes the corpus is not split.
    adjustable
        Which of the two sizes are made smaller where the corpus has too few sentences; see `fitting_sizes`.
    main_folder
        Where activations, maps and results are, by default ``studies/<model>--<corpus>/`` of ``out``.
    positions, draw_special, batch_tokens
        How the stream is collected, as in `collect_parts`.
    pairs, intercept, ridge
        Which maps are fitted and how, as in `fit_maps`.
    keep_rows
        Whether the vectors of all positions are kept on disk; else only what fits need of them is, and
        `stream` collects once more if it is asked for.
    """

    load_model: Callable[[], TransformerBridge] | None = None
    load_corpus: Callable[[], Corpus] | None = None
    load_values: Callable[[], ValueVectors] | None = None
    out: Path
    n_train: int = 1
    n_validation: int | None = None
    adjustable: tuple[Part, ...] = ()
    seed: int = 0
    main_folder: Path | None = None
    positions: PositionsOrAuto = "drawn"
    draw_special: bool = True
    batch_tokens: int | None = None
    pairs: Pairs = "all"
    intercept: bool = False
    ridge: NonNegative | None = 0.0
    keep_rows: bool = True

    @cached_property
    def corpus(self) -> Corpus:
        """All sentences."""
        if self.load_corpus is None:
            raise InputError("This study has no corpus. Expected the name of one.")
        return self.load_corpus()

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Numbers of training and of validation sentences; fewer than asked for where that can be changed."""
        if self.n_validation is None:
            raise InputError("This study has no sizes. Expected a number of validation sentences.")
        wanted = self.n_train, self.n_validation
        sizes = fitting_sizes(len(self.corpus), *wanted, self.adjustable)
        if sizes != wanted:
            tqdm.write(
                f"{printable(self.corpus.name)} has {len(self.corpus):,} sentences, fewer than {wanted[0]:,}+"
                f"{wanted[1]:,} (training+validation): it is split into {sizes[0]:,}+{sizes[1]:,}.",
                file=sys.stderr,
            )
        return sizes

    @cached_property
    def parts(self) -> tuple[Corpus, Corpus]:
        """The training and the validation sentences."""
        n_train, n_validation = self.sizes
        return self.corpus.split(n_train=n_train, n_validation=n_validation, seed=self.seed)

    @cached_property
    def model(self) -> TransformerBridge:
        """The model; the corpus is checked before, since a model can take minutes."""
        if self.load_model is None:
            raise InputError("This study has no model. Expected the name of one.")
        if self.n_validation is not None:
            self._check_same_job()
        return self.load_model()

    def _check_same_job(self) -> None:
        """Refuse a folder that holds vectors of another job, as far as that is known without the model."""
        train, validation = self.parts
        if self.main_folder is None:
            return
        known: dict[str, dict[str, Any]] = {}
        for name, part in ((TRAIN, train), (MOMENTS, train), (VALIDATION, validation)):
            data = {"seed": self.seed, "n": len(part), "corpus_fingerprint": part.fingerprint}
            known[name] = {"data": data}
            if name != VALIDATION and self.positions != "auto":
                known[name]["positions"] = self.positions
        check_output(self.main_folder, known)

    @property
    def operations(self) -> float:
        """About how many floating-point operations collecting, fitting and evaluating take."""
        train, _ = self.parts
        positions: Positions = "all" if self.positions == "all" else "drawn"
        if self.positions == "auto" and not self.ridge and are_few(len(train), self.model.cfg.d_model):
            positions = "all"
        plan = plan_study(
            Shape.from_model(self.model), *self.sizes, positions=positions,
            pairs="last" if self.pairs == "last" else "all",
            train_tokens=sum(map(len, train.sentences)) // CHARACTERS, keep_rows=self.keep_rows,
        )  # fmt: skip
        steps = [step for step in plan.needs if step.startswith(("collect", "fit from", "evaluate"))]
        return sum(plan[step].operations for step in steps)

    @property
    def n_layers(self) -> int:
        """``L``."""
        return int(self.model.cfg.n_layers)

    @property
    def folder(self) -> Path:
        """Where activations, maps and results are."""
        return self.main_folder or self.out / "studies" / self._name

    @cached_property
    def readout(self) -> Readout:
        """The model's read-out."""
        return Readout(self.model)

    @cached_property
    def stream(self) -> tuple[Activations, Activations]:
        """The stream of the training and of the validation sentences."""
        return self._collect(keep_rows=True)

    @cached_property
    def validation(self) -> Activations:
        """The stream of the validation sentences; the training part exists then as well."""
        return self.stream[1] if self.keep_rows else self._collect(keep_rows=False)[1]

    def _collect(self, *, keep_rows: bool) -> tuple[Any, Activations]:
        return collect_parts(
            self.model, self.parts, self.folder, seed=self.seed, positions=self._positions,
            draw_special=self.draw_special, pairs=self.pairs, keep_rows=keep_rows,
            batch_tokens=self.batch_tokens,
        )  # fmt: skip

    @property
    def _positions(self) -> PositionsOrAuto:
        """Where a penalty is asked for, it is what few sentences are met with."""
        return "drawn" if self.positions == "auto" and self.ridge else self.positions

    def shard_moments(self, number: int, of: int) -> StoredMoments:
        """Moments of one of several parts of the training sentences, in the study's folder."""
        examples = self._examples(self.parts[0])
        positions = training_positions(
            self.model, examples, self.folder, self.pairs, self._positions, self.draw_special, False
        )
        return accumulate(
            self.model, examples, self.folder, pairs=self.pairs, positions=positions, shard=(number, of),
            batch_tokens=self.batch_tokens,
        )  # fmt: skip

    @cached_property
    def maps(self) -> MapSet:
        """``mat`` for the pairs of layers."""
        wanted = resolve_pairs(self.pairs, self.n_layers)  # before the work, not after it
        kept = self.positions == "drawn" or self.keep_rows  # one sample of each sentence, or more
        if kept and not is_finished(self.folder / MAPS):
            check_fit(self.sizes[0], self.model.cfg.d_model, wanted)
        _ = self.validation
        return fit_maps(self.folder, pairs=self.pairs, intercept=self.intercept, ridge=self.ridge)

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

    def evaluate(self) -> pd.DataFrame:
        """Evaluate the maps on the validation sentences, into ``results.csv`` of the folder."""
        _ = self.maps
        return evaluate_maps(self.model, self.folder)

    @property
    def origin(self) -> dict[str, Any]:
        """What the study's numbers come from."""
        return origin_of(self.maps, self.validation)

    @property
    def origin_of_weights(self) -> dict[str, Any]:
        """What numbers come from that no map has a part in: the model and the seed."""
        return {"model": ModelIdentity.from_model(self.model).to_json(), "seed": self.seed}

    @cached_property
    def submodule_samples(self) -> Activations:
        """Inputs and outputs of all sub-modules at the drawn positions of the training sentences.

        Asked for before anything else, they are collected in one pass with the stream and what heads give.
        """
        layout = ModelLayout.from_model(self.model)
        ends = _sites_of(submodule_pairs(layout))
        train = self.folder / TRAIN
        if is_finished(train):
            return self._training(ends, "train-submodules")
        examples = self._examples(self.parts[0])
        return collect(self.model, examples, [*layout.stream, *ends, *head_outputs(layout)], folder=train)

    def submodule_maps(self, fitted: Fitted = "all") -> MapSet:
        """Stand-ins for all sub-modules, fitted on all samples, all but first tokens, or all but sinks."""
        samples = self.submodule_samples
        rows = {
            "all": lambda: None,
            "not-first": lambda: torch.from_numpy(samples.places > 0),
            "not-sink": lambda: ~sink_rows(self.stream[0]),
        }[fitted]()

        def fit(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
            return fit_submodules(samples, missing, rows=rows)

        maps = write_maps(
            self.folder / f"submodule-maps-{fitted}",
            submodule_pairs(ModelLayout.from_model(self.model)), fit,
            samples.provenance.samples.with_details(
                n_samples=samples.n_rows if rows is None else int(rows.sum()), fitted=fitted
            ),
        )  # fmt: skip
        return maps.held(device=self.model.cfg.device)

    def stand_ins(self, *fitted: Fitted) -> dict[str, MapSet]:
        """Stand-ins for all sub-modules, each set under the name of what it was fitted on."""
        return {name: self.submodule_maps(name) for name in fitted}

    @cached_property
    def head_samples(self) -> tuple[Activations, Activations]:
        """What enters attention and what its heads give, of the training and the validation sentences."""
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
        return collect(self.model, self._examples(self.parts[0]), sites, folder=folder)

    @cached_property
    def validation_examples(self) -> Examples:
        """The validation sentences as the model reads them, with a position drawn in each."""
        return self._examples(self.parts[1])

    def _examples(self, part: Corpus) -> Examples:
        """Sentences as the model reads them, with a position drawn in each."""
        return make_examples(self.model, part, seed=self.seed, draw_special=self.draw_special)

    @cached_property
    def values(self) -> ValueVectors:
        """The model's value vectors."""
        return ValueVectors(self.model) if self.load_values is None else self.load_values()

    def trace(self, k: int = DOMINANT) -> Trace:
        """What FFNs do to the predictions for the validation sentences, with ``k`` dominant sub-updates.

        It is in ``traces/`` of the output folder; one that was broken off is gone on with.
        """
        return Trace.run(
            self.model, self.validation_examples, k=k, seed=self.seed, folder=self._traces(f"k{k}")
        )

    def collect_validation(self, sites: Sequence[str]) -> Activations:
        """Vectors of sites at the drawn positions of the validation sentences, kept beside the traces."""
        return collect(self.model, self.validation_examples, sites, folder=self._traces("stream"))

    def clusters(
        self,
        n_clusters: int = N_CLUSTERS,
        *,
        linkage: Linkage = "average",
        memory: float = MEMORY_GIB,
        disk: float = 0.0,
    ) -> Clusters:
        """Clusters of the model's value vectors, in ``clusters/`` of the output folder; see `Clusters.fit`.

        Raises
        ------
        InputError
            More clusters than vectors, a vector without a direction, or complete linkage without room.
        """
        method = method_within(len(self.values), memory, disk)
        kind = f"{linkage}-{method}" if linkage == "complete" else method
        return Clusters.fit(
            self.values, n_clusters, linkage=linkage, memory=memory, disk=disk,
            folder=self.out / "clusters" / f"{self._model_name}--{n_clusters}-{kind}",
        )  # fmt: skip

    @property
    def _model_name(self) -> str:
        named = self.load_values is not None
        return slug(self.values.identity.name if named else self.model.cfg.model_name)

    @property
    def _name(self) -> str:
        return f"{self._model_name}--{slug(self.corpus.name)}"

    def _traces(self, what: str) -> Path:
        n_train, n_validation = self.sizes
        sizes = f"{n_validation}" if n_train == 1 else f"{n_train}+{n_validation}"
        return self.out / "traces" / f"{self._name}--{sizes}-seed{self.seed}-{what}"


@checked
def slug(name: str) -> str:
    """Name a folder after a model or a corpus; files of one name in different folders get different ones."""
    if not name.strip():
        raise InputError("The name of a model or of a corpus is empty. Expected one to name a folder after.")
    path = Path(name)
    if not os.path.exists(path):
        return re.sub(r"[^\w.-]+", "-", name)
    return f"{path.resolve().name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"


def _sites_of(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return sorted({site for pair in pairs for site in pair})
