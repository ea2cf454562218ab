"""Scripts of paper A's analyses on small models, and the same studies by hand; made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from analysing import N_PATCHED, N_TRAIN, N_VALIDATION, PATCHED, PROMPTS, SINKS, run, sizes
from paper_a_by_hand import StudyByHand

OPTIONS = {
    "plausibility": ["--sentences", 8],
    "paper_a_table1_tokens": [part for prompt in PROMPTS for part in ("--prompt", prompt)],
}


@pytest.fixture(scope="session")
def finished(corpora, model_folder, tmp_path_factory):
    """The output folder of a model, with what a script leaves in it; all scripts share it, as users do."""
    folders: dict[str, Path] = {}
    done = set()

    def folder(name: str, model: str) -> Path:
        out = folders.setdefault(model, tmp_path_factory.mktemp(model) / "out")
        if (name, model) in done:
            return out
        options = ["--model", model_folder(model), "--corpus", corpora / "words.txt", *OPTIONS.get(name, ())]
        if name == "paper_a_fig7_models":
            options += ["--model", model_folder("gpt2")]
        if name == "paper_a_sec5_corpora":
            options += ["--corpus", corpora / "others.txt"]
        if name in PATCHED:
            options += ["--patched", N_PATCHED]
        run(name, *options, *sizes(), "--out", out)
        described = json.loads((out / f"{name}.json").read_text())
        for origin in described.get("studies", {"": described}).values():
            of_fit = origin["maps"]["data"]
            assert (of_fit["seed"], of_fit["n"], origin["validation"]["n"]) == (0, N_TRAIN, N_VALIDATION)
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
