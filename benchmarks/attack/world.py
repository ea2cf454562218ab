"""The small world that is attacked: good inputs of one model or another, each made when it is asked for."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

import matlens
from matlens import data, ffn, lens, linear, models, patching, pruning, study

NEW = object()  # a path where nothing is yet
_SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
_WORDS = [f"w{i}" for i in range(58)]
_CONFIG = transformers.GPT2Config(
    vocab_size=60, pad_token_id=1, bos_token_id=None, eos_token_id=None,
    n_layer=3, n_embd=32, n_head=4, n_inner=48, n_positions=48,
)  # fmt: skip


def save_model(seed: int, folder: Path) -> Path:
    """Write a small model of random weights and its tokenizer, as ``save_pretrained`` does."""
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(_CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate([*_SPECIAL.values(), *_WORDS])}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=_CONFIG.n_positions, **_SPECIAL
    ).save_pretrained(folder)
    return folder


class World:
    """Good inputs: ``world["MapSet"]`` is a good one, and ``world["layer"]`` a good argument of this name.

    Parameters
    ----------
    root
        The folder for everything that is written.
    seed
        Of the weights of the small model that everything is about.
    """

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root, self.seed = root, seed
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = RECIPES[name](self)
        return self._made[name]

    def __contains__(self, name: str) -> bool:
        return name in RECIPES

    @cached_property
    def model(self) -> Any:
        """The model, on the CPU."""
        return matlens.load(str(self.model_folder), device="cpu")

    @property
    def model_folder(self) -> Path:
        """The folder of the model."""
        folder = self.root / "models" / str(self.seed)
        return folder if folder.is_dir() else save_model(self.seed, folder)

    @cached_property
    def other(self) -> World:
        """The same sentences and a model of other weights."""
        return World(self.root, self.seed + 1)

    def fresh(self, name: str) -> Path:
        """A path where nothing is yet."""
        (self.root / "fresh").mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.root / "fresh")) / name

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """Sixty different sentences of 6 to 20 words, which fit the context with room to spare."""
        generator = np.random.default_rng(0)
        return tuple(" ".join(generator.choice(_WORDS[:50], 6 + i % 15)) for i in range(60))

    @cached_property
    def text(self) -> Path:
        """The sentences in a file."""
        path = self.root / "words.txt"
        path.write_text("\n".join(self.sentences))
        return path

    def saved(self, kind: str) -> Path:
        """A folder of a kind, written once."""
        folder = self.root / "saved" / str(self.seed) / kind
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            WRITERS[kind](self, folder)
        return folder

    def collect(self, sites: Any = None, **options: Any) -> Any:
        """Vectors of the model at the sentences."""
        return matlens.collect(self.model, self["Examples"], sites, progress=False, **options)


def _maps(world: World) -> matlens.MapSet:
    """Maps between all layers, and of the sub-modules."""
    pairs = patching.submodule_pairs(world["ModelLayout"])
    vectors = world.collect(sorted({site for pair in pairs for site in pair}))
    submodules = patching.fit_submodules(vectors, pairs, progress=False)
    return matlens.MapSet([*world["maps"].values(), *submodules], provenance=world["maps"].provenance)


def _table(world: World) -> Any:
    """A table of results."""
    return lens.fit_quality(world["maps"], world["Activations"], progress=False)


# What writes a folder, or a file, of each kind.
WRITERS: dict[str, Callable[[World, Path], Any]] = {
    "maps": lambda w, f: w["maps"].save(f),
    "lens": lambda w, f: w["Lens"].save(f),
    "activations": lambda w, f: w.collect(folder=f, batch_tokens=100),
    "trace": lambda w, f: ffn.Trace.run(
        w.model, w["Examples"], k=4, folder=f, batch_tokens=100, progress=False
    ),
    "clusters": lambda w, f: ffn.Clusters.fit(w["ValueVectors"], 20, folder=f, progress=False),
    "moments": lambda w, f: linear.stream_least_squares(
        w.model, w["Examples"], f, pairs="all", positions="sampled", batch_tokens=100, progress=False
    ),
}
# Which of them a parameter is given.
_READ = {
    "MapSet.load.folder": "maps", "io.verify.folder": "maps", "Lens.load.folder": "lens",
    "Activations.load.folder": "activations", "Trace.load.folder": "trace",
    "Clusters.load.folder": "clusters", "StoredLeastSquares.folder": "moments",
}  # fmt: skip
RECIPES: dict[str, Callable[[World], Any]] = {
    # By class: owners of methods, and arguments that are annotated with them.
    "TransformerBridge": lambda w: w.model,
    "Corpus": lambda w: data.load_corpus(str(w.text)),
    "Examples": lambda w: data.make_examples(w.model, w["Corpus"]),
    "Activations": lambda w: w.collect(),
    "MapSet": _maps,
    "LinearMap": lambda w: w["maps"][0, 3],
    "LeastSquares": lambda w: linear.LeastSquares(32, 32).update(w["Activations"][0], w["Activations"][3]),
    "Lens": lambda w: matlens.Lens.from_maps(w["maps"], model=w.model),
    "Trajectory": lambda w: w["Lens"].trajectory(w.sentences[0], k=3),
    "Readout": lambda w: matlens.Readout(w.model),
    "ModelLayout": lambda w: models.ModelLayout.from_model(w.model),
    "ModelIdentity": lambda w: models.ModelIdentity.from_model(w.model),
    "Provenance": lambda w: w["Activations"].provenance,
    "ValueVectors": lambda w: ffn.ValueVectors(w.model),
    "Projection": lambda w: ffn.Projection.from_model(w.model),
    "TopTokens": lambda w: w["Projection"].top_of_all(w["ValueVectors"], 5, progress=False),
    "Updates": lambda w: ffn.Updates.run(w.model, w["prompts"], progress=False),
    "Trace": lambda w: ffn.Trace.run(w.model, w["Examples"], k=4, progress=False),
    "Clusters": lambda w: ffn.Clusters.fit(w["ValueVectors"], 20, progress=False),
    "Catalogue": lambda w: ffn.Catalogue(w.model),
    "Pruned": lambda w: pruning.prune(w.model, w["windows"], [1], progress=False),
    "Scheme": lambda _: patching.Scheme((0, 1, 3), "blocks"),
    "Study": lambda w: study.Study(
        load_model=lambda: w.model,
        out=w.root / f"study-of-{w.seed}",
        ridge=1.0,
        load_parts=lambda: w["Corpus"].split(n_train=40, n_validation=20),
    ),
    "StoredLeastSquares": lambda w: linear.StoredLeastSquares(w.saved("moments")),
    "Shape": lambda w: study.Shape.from_model(w.model),
    # By name; where several functions mean other things by a name, with theirs before it.
    "maps": lambda w: matlens.MapSet.fit(w["Activations"], pairs="all", ridge=1.0, progress=False),
    "tokenizer": lambda w: w.model.tokenizer,
    **dict.fromkeys(("corpus", "texts", "sources", "targets"), lambda w: w["Corpus"]),
    **dict.fromkeys(("data", "samples", "validation"), lambda w: w["Activations"]),
    "from_maps.maps": lambda w: w["maps"],
    "make_prompts.prompts": lambda w: list(w.sentences[:2]),
    "top_tokens.h": lambda w: w["Activations"][3][0],
    "parse.text": lambda _: "h.3",
    **dict.fromkeys(("resolve.name", "column.name"), lambda _: "L0D1"),
    **dict.fromkeys(("load.name", "Catalogue.name"), lambda w: str(w.model_folder)),
    "visible.token": lambda _: "w1",
    "exits": lambda w: lens.exit_sweep({"mat": w["Lens"]}, w["Activations"], progress=False),
    "sinks": lambda _: torch.arange(60) % 9 == 0,
    **dict.fromkeys(("x", "y", "outputs"), lambda w: w["Activations"][3]),
    "replacements": lambda w: matlens.jump(w["maps"], 1, 3),
    "variants": lambda w: {"one": patching.Variant(1, matlens.jump(w["maps"], 1, 3))},
    "boundaries": lambda _: (0, 1, 3),
    "starts_with": lambda _: "blocks",
    "save.path": lambda w: w.fresh("figure.html"),
    **dict.fromkeys(("ValueVector.index", "column"), lambda _: 2),
    "ValueVector.parse.text": lambda _: "L0D1",
    "parts": lambda w: w["Corpus"].split(n_train=40, n_validation=10),
    "ids": lambda _: torch.full((60,), 5),
    "number": lambda _: 1,
    "of": lambda _: 2,
    "entries": lambda _: ["h.0", "h.3"],
    "scores": lambda w: w["Trace"].score,
    "index": lambda _: np.array([0, 1]),
    "weight": lambda _: torch.eye(32),
    "figure": lambda w: w["Trajectory"].plot(),
    "fitted": lambda w: data.make_windows(w.model, w["Corpus"], size=12, max_windows=3, targets=True),
    "evaluated": lambda w: {"text": w["windows"]},
    "attention": lambda _: [1],
    **{parameter: partial(World.saved, kind=kind) for parameter, kind in _READ.items()},
    **dict.fromkeys(("folder", "path", "out"), lambda _: NEW),
    "prompts": lambda w: data.make_prompts(w.model, list(w.sentences[:2])),
    "windows": lambda w: data.make_windows(w.model, w["Corpus"], size=16),
    "sentences": lambda w: w.sentences,
    "prompt": lambda w: w.sentences[0],
    "lenses": lambda w: {"mat": w["Lens"]},
    "report": lambda w: lens.evaluate_lenses({"mat": w["Lens"]}, w["Activations"], progress=False),
    "activations": lambda w: w["Activations"],
    "table": _table,
    "results": _table,
    "h": lambda w: w["Activations"][3],
    "vectors": lambda w: w["Activations"][3],
    "truth": lambda w: w["Activations"][3],
    "token": lambda _: torch.arange(4),
    "source": lambda w: str(w.text),
    "text": lambda _: "h.3",
    "sites": lambda _: ["h.0", "h.3"],
    "site": lambda _: "h.3",
    "pairs": lambda _: [("h.0", "h.3")],
    "names": lambda _: ["L0D1", "L1D2"],
    "words": lambda _: ["w1", "w2"],
    "methods": lambda _: ["mat"],
    "method": lambda _: "mat",
    "layers": lambda _: [0, 3],
    "blocks": lambda _: [1],
    "rows": lambda w: torch.ones(len(w["Examples"]), dtype=torch.bool),
    "n_layers": lambda _: 3,
    "n_clusters": lambda _: 20,
    "n_train": lambda _: 30,
    "n_validation": lambda _: 10,
    "first": lambda _: 1,
    "last": lambda _: 3,
    **dict.fromkeys(("layer", "cluster", "row"), lambda _: 1),
    **dict.fromkeys(("n", "k", "size", "max_tokens", "n_tokens"), lambda _: 20),
}


@contextlib.contextmanager
def make_world() -> Iterator[World]:
    """A world in a folder of its own, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as folder:
        yield World(Path(folder))
