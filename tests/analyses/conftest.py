"""Scripts of paper A's analyses on small models, and the same studies by hand; made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analysing import N_PATCHED, N_TRAIN, N_VALIDATION, PATCHED, SINKS, run, sizes
from paper_a_by_hand import SINK_TOKENS, StudyByHand

from matlens import MapSet, Readout, collect, load_corpus, make_examples


@pytest.fixture(scope="session")
def finished(corpora, model_folder, tmp_path_factory):
    """The output folder of a model, with what a script leaves in it; all scripts share it, as users do."""
    folders: dict[str, Path] = {}
    done = set()

    def folder(name: str, model: str) -> Path:
        out = folders.setdefault(model, tmp_path_factory.mktemp(model) / "out")
        if (name, model) in done:
            return out
        options: list[object] = ["--model", model_folder(model), "--corpus", corpora / "words.txt"]
        if name == "paper_a_fig7_models":
            options += ["--model", model_folder("gpt2")]
        if name == "paper_a_sec5_corpora":
            options += ["--corpus", corpora / "others.txt"]
        if name == "plausibility":
            options += ["--sentences", 8]
        if name == "paper_a_table1_tokens":
            mask = " [MASK]" if model == "bert" else ""
            options += ["--prompt", f"w1 w2 w3{mask}", "--prompt", f"w4{mask} w5"]
        if name in PATCHED:
            options += ["--patched", N_PATCHED]
        run(name, *options, *sizes(), "--out", out)
        done.add((name, model))
        return out

    return folder


@pytest.fixture(scope="session")
def by_hand(corpora, small_model, plain_model):
    studies: dict[tuple[str, str], StudyByHand] = {}

    def study(model: str = SINKS, corpus: str = "words") -> StudyByHand:
        if (model, corpus) not in studies:
            path = corpora / f"{corpus}.txt"
            args = small_model(model), plain_model(model), path, (N_TRAIN, N_VALIDATION)
            studies[model, corpus] = StudyByHand(model, *args)
        return studies[model, corpus]

    return study


class Collected:
    """The streams of a model with sinks on the sentences of the analyses, and which rows are sinks.

    Sinks are told by their tokens, and maps are fitted on rows that are chosen here.
    """

    def __init__(self, model: Any, corpus: Path) -> None:
        self.model, self.readout = model, Readout(model)
        parts = load_corpus(str(corpus)).split(n_train=N_TRAIN, n_validation=N_VALIDATION, seed=0)
        self.examples = [make_examples(model, part, seed=0) for part in parts]
        self.train, self.validation = (collect(model, examples, progress=False) for examples in self.examples)
        self.train_sinks, self.validation_sinks = (
            torch.from_numpy(np.isin(each.tokens[each.offsets[:-1] + each.positions], SINK_TOKENS))
            for each in self.examples
        )
        assert 0 < int(self.train_sinks.sum()) != int(self.validation_sinks.sum()) > 0

    def maps(self, *, without_sinks: bool = False) -> MapSet:
        rows = ~self.train_sinks if without_sinks else None
        return MapSet.fit(self.train, pairs="all", rows=rows, progress=False)

    def counts(self, part: int) -> dict[str, int]:
        """What a record says of the sinks among training (0) or validation (1) samples."""
        sinks = (self.train_sinks, self.validation_sinks)[part].numpy()
        first = self.examples[part].positions == 0
        return {
            "n_sinks": int(sinks.sum()), "n_first_sinks": int((sinks & first).sum()),
            "n_later_sinks": int((sinks & ~first).sum()), "n_first_tokens": int(first.sum()),
        }  # fmt: skip


@pytest.fixture(scope="session")
def collected(corpora, small_model):
    return Collected(small_model(SINKS), corpora / "words.txt")
