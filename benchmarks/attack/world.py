"""The small world that is attacked: good inputs of every kind, and the folders that they are kept in."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import annotation
import numpy as np
import pandas as pd
import torch
import transformers

import matlens
from attack.models import WORDS, save_model
from matlens import data, ffn, lens, linear, patching, pruning
from matlens.lens import Trajectory
from matlens.study import Study

N_CLUSTERS = 20


class ConstantGrader:
    """A grader that grades texts by their length."""

    name = "constant"
    attributes: tuple[str, ...] = ("toxicity",)

    def grade(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """A score between 0 and 1 for each text."""
        return {"toxicity": np.array([len(text) % 10 / 10 for text in texts])}


class World:
    """Good inputs, each made when it is first asked for.

    Parameters
    ----------
    root
        The folder for everything that is written.
    seed
        Seed of the sentences.
    """

    def __init__(self, root: Path, *, seed: int = 0) -> None:
        self.root, self.seed = root, seed
        self._loaded: dict[str, Any] = {}
        self.made: dict[str, Any] = {}
        self.forwards = 0  # passes through any model

    def model_folder(self, name: str) -> Path:
        """The folder of a small model, see `save_model`."""
        folder = self.root / "models" / name
        return folder if folder.is_dir() else save_model(name, folder)

    def load(self, name: str) -> Any:
        """A small model, loaded once."""
        if name not in self._loaded:
            self._loaded[name] = matlens.load(str(self.model_folder(name)), device="cpu")
        return self._loaded[name]

    def fresh(self, name: str) -> Path:
        """A path where nothing is yet."""
        (self.root / "fresh").mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.root / "fresh")) / name

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """Sixty different sentences of 6 to 20 words, which fit the context with room to spare."""
        generator = np.random.default_rng(self.seed)
        return tuple(" ".join(generator.choice(WORDS, 6 + i % 15)) for i in range(60))

    @cached_property
    def text(self) -> Path:
        """The sentences in a file."""
        path = self.root / "words.txt"
        path.write_text("\n".join(self.sentences))
        return path

    @cached_property
    def model(self) -> Any:
        """The model that everything good is about."""
        return self.load("gpt2")

    @cached_property
    def corpus(self) -> data.Corpus:
        """The sentences as a corpus."""
        return data.load_corpus(str(self.text))

    @cached_property
    def examples(self) -> data.Examples:
        """The sentences as the model reads them."""
        return data.make_examples(self.model, self.corpus)

    @cached_property
    def prompts(self) -> data.Examples:
        """Two prompts as the model reads them."""
        return data.make_prompts(self.model, list(self.sentences[:2]))

    @cached_property
    def readout(self) -> matlens.Readout:
        """The model's read-out."""
        return matlens.Readout(self.model)

    def collected(self, name: str = "gpt2", sites: Any = None, *, positions: Any = "drawn") -> Any:
        """Vectors of a model at the sentences."""
        model = self.load(name)
        examples = data.make_examples(model, self.corpus)
        return matlens.collect(model, examples, sites, positions=positions, progress=False)

    @cached_property
    def activations(self) -> Any:
        """The stream."""
        return self.collected()

    @cached_property
    def other_activations(self) -> Any:
        """The stream of another model of the same shape."""
        return self.collected("weights")

    @cached_property
    def prompt_activations(self) -> Any:
        """The stream at the prompts."""
        return matlens.collect(self.model, self.prompts, progress=False)

    @cached_property
    def submodule_activations(self) -> Any:
        """Inputs and outputs of all sub-modules."""
        pairs = patching.submodule_pairs(matlens.models.ModelLayout.from_model(self.model))
        return self.collected(sites=sorted({site for pair in pairs for site in pair}))

    @cached_property
    def maps(self) -> matlens.MapSet:
        """Maps between all layers, and of the sub-modules, all of one model."""
        pairs = patching.submodule_pairs(matlens.models.ModelLayout.from_model(self.model))
        submodules = patching.fit_submodules(self.submodule_activations, pairs, progress=False)
        stream = matlens.MapSet.fit(self.activations, pairs="all", ridge=1.0, progress=False)
        return matlens.MapSet([*stream.values(), *submodules], provenance=stream.provenance)

    @cached_property
    def stream_maps(self) -> matlens.MapSet:
        """Maps between all layers of the stream."""
        return matlens.MapSet.fit(self.activations, pairs="all", ridge=1.0, progress=False)

    @cached_property
    def other_maps(self) -> matlens.MapSet:
        """Maps of another model of the same shape."""
        return matlens.MapSet.fit(self.other_activations, pairs="all", ridge=1.0, progress=False)

    @cached_property
    def nan_maps(self) -> matlens.MapSet:
        """Maps with a number that is none."""
        spoilt = []
        for pair in self.stream_maps:
            linear_map = self.stream_maps[pair]
            weight = linear_map.weight.clone()
            weight[0, 0] = torch.nan
            spoilt.append(
                matlens.LinearMap(weight, linear_map.bias, *pair, provenance=self.stream_maps.provenance)
            )
        return matlens.MapSet(spoilt, provenance=self.stream_maps.provenance)

    @cached_property
    def lens(self) -> matlens.Lens:
        """A lens on the model."""
        return matlens.Lens.from_maps(self.stream_maps, model=self.model)

    @cached_property
    def other_lens(self) -> matlens.Lens:
        """A lens on another model of the same shape."""
        return matlens.Lens.from_maps(self.other_maps, model=self.load("weights"))

    @cached_property
    def lens_moments(self) -> matlens.lens.LensMoments:
        """What closed forms need of the sentences."""
        return lens.lens_moments(self.model, self.activations, ["mat", "affine"], progress=False)

    @cached_property
    def trajectory(self) -> Trajectory:
        """A prompt through the lens."""
        return self.lens.trajectory(self.sentences[0], k=3)

    @cached_property
    def members(self) -> dict[str, matlens.lens.Member]:
        """The lens and the logit lens as members of a report."""
        return {"mat": lens.Member(self.lens), "id": lens.Member(matlens.Lens.identity(self.model))}

    @cached_property
    def report(self) -> pd.DataFrame:
        """The report of the members."""
        return lens.report_table(self.members, self.activations, against="id", progress=False)

    @cached_property
    def windows(self) -> data.Examples:
        """The sentences as running text."""
        return data.make_windows(self.model, self.corpus, size=16)

    @cached_property
    def pruned(self) -> pruning.Pruned:
        """The model without its second block."""
        return pruning.prune(self.model, self.windows, [1], progress=False)

    @cached_property
    def pair_moments(self) -> linear.PairMoments:
        """Sums of a pair of layers."""
        return linear.PairMoments([("h.0", "h.3")]).update(dict(self.activations))

    @cached_property
    def values(self) -> ffn.ValueVectors:
        """The model's value vectors."""
        return ffn.ValueVectors(self.model)

    @cached_property
    def projection(self) -> ffn.Projection:
        """How vectors are read in the model's vocabulary."""
        return ffn.Projection.from_model(self.model)

    @cached_property
    def tokens(self) -> Any:
        """Top tokens of all value vectors."""
        return ffn.top_tokens_of_all(self.values, self.projection, k=5, progress=False)

    @cached_property
    def updates(self) -> ffn.Updates:
        """What the FFNs write for the prompts."""
        return ffn.Updates.run(self.model, self.prompts, progress=False)

    @cached_property
    def trace(self) -> ffn.Trace:
        """A trace of the sentences."""
        return ffn.Trace.run(self.model, self.examples, k=4, progress=False)

    @cached_property
    def clusters(self) -> ffn.Clusters:
        """Clusters of the value vectors."""
        return ffn.Clusters.fit(self.values, N_CLUSTERS, progress=False)

    @cached_property
    def quality(self) -> pd.DataFrame:
        """A table of results."""
        fit = lens.fit_quality(self.stream_maps, self.activations, progress=False)
        read = lens.prediction_quality(self.readout, self.stream_maps, self.activations, progress=False)
        return pd.concat([part.astype({"k": "Int64"}) for part in (fit, read)], ignore_index=True)

    @cached_property
    def sample(self) -> pd.DataFrame:
        """Vectors whose top tokens are to be annotated."""
        return annotation.draw_concept_sample(self.model, self.examples, per_layer=2, k=5, progress=False)

    @cached_property
    def similarity(self) -> annotation.WordSimilarity:
        """Which words are used alike."""
        return annotation.WordSimilarity.fit(self.sentences, dimensions=5, min_count=2)

    @cached_property
    def losses(self) -> Any:
        """The loss of the model on each sentence."""
        return ffn.text_losses(self.model, self.corpus, progress=False)

    @cached_property
    def table_of_predictions(self) -> pd.DataFrame:
        """What layers predict for the prompts."""
        return lens.top_predictions(self.readout, self.stream_maps, self.prompt_activations, [0, 3], k=3)

    @cached_property
    def substitutes(self) -> list[Any]:
        """What stands in for the last layer at each layer."""
        return [self.activations[layer] for layer in range(1, 4)]

    @cached_property
    def confidence(self) -> Any:
        """How confident every layer is."""
        return lens.exit_confidences(self.readout, self.activations[3], self.substitutes)

    @cached_property
    def sweep(self) -> pd.DataFrame:
        """A sweep of early exits."""
        lenses = {name: member.lens for name, member in self.members.items()}
        return lens.exit_sweep(lenses, self.activations, progress=False)

    @cached_property
    def frequency(self) -> data.TokenFrequency:
        """How often each token is used."""
        return data.TokenFrequency.from_corpus(self.corpus, self.model.tokenizer, 60)

    @cached_property
    def patterns(self) -> dict[str, pd.DataFrame]:
        """Patterns of all value vectors."""
        return annotation.search_concepts(self.model, self.similarity, k=5, progress=False)

    @cached_property
    def study(self) -> Study:
        """A study of the model on the corpus, kept in a folder."""
        return self.make_study(self.root / "study")

    def make_study(self, folder: Path) -> Study:
        """A study of the model on the corpus in a folder."""
        return Study(
            load_model=lambda: self.model, load_corpus=lambda: self.corpus, out=folder, main_folder=folder,
            n_train=40, n_validation=20, ridge=1.0,
        )  # fmt: skip

    @cached_property
    def study_folder(self) -> Path:
        """The folder of a finished study."""
        with contextlib.suppress(FileExistsError):
            self.study.evaluate()
        return self.root / "study"

    def copy_of_study(self) -> Path:
        """A copy of the finished study, to be changed."""
        folder = self.fresh("study")
        shutil.copytree(self.study_folder, folder)
        return folder

    @cached_property
    def plain(self) -> Any:
        """The same model without matlens."""
        return transformers.AutoModelForCausalLM.from_pretrained(self.model_folder("gpt2"))

    @cached_property
    def moments(self) -> linear.LeastSquares:
        """Sums of the pair of the first and the last layer."""
        return linear.LeastSquares(32, 32).update(self.activations[0], self.activations[3])


@contextlib.contextmanager
def make_world(*, seed: int = 0, keep: Path | None = None) -> Iterator[World]:
    """A world in a folder of its own, which is removed unless it is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield World(keep, seed=seed)
        return
    with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as folder:
        yield World(Path(folder), seed=seed)
