"""Targets of WikiLM's files and of the training of small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import training

from attack.kept import draw, once
from attack.signatures import Target
from attack.world import World
from matlens import models

_SEQUENCES = [[2, 5, 6, 7, 2], [2, 8, 5, 2]]


def _dictionary(_: World) -> models.WordDictionary:
    return models.WordDictionary.from_counts([(f"w{i}", 50 - i) for i in range(20)], n_words=24)


def _small(world: World) -> models.WikiLMForCausalLM:
    def made() -> models.WikiLMForCausalLM:
        torch.manual_seed(0)
        config = models.WikiLMConfig(
            vocab_size=24, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=16, cutoffs=[8, 16], adaptive_factor=2.0,
        )  # fmt: skip
        return models.WikiLMForCausalLM(config)

    return once(world, "small wikilm", made)


def _checkpoint(world: World) -> Path:
    def made() -> Path:
        return models.write_wikilm(_small(world), _dictionary(world), world.root / "wikilm")

    return once(world, "wikilm's checkpoint", made)


def _sequences(_: World) -> Any:
    return _SEQUENCES


def _trained(_: World) -> Any:
    run = training.TrainingRun(2, 1.0, [(1, 3.0, 3.0), (2, 2.0, 2.0)])
    return training.training_table(run, {}, model="small", corpus="words", n_held_out=2)


def _ngrams(_: World) -> training.NgramModel:
    return training.NgramModel(_SEQUENCES, d_vocab=24)


TRAINING: list[Target] = [
    Target("models.read_wikilm", good={"path": _checkpoint}),
    Target(
        "models.write_wikilm",
        {"model": "object", "dictionary": "object"},
        {"model": _small, "dictionary": _dictionary},
        takes={"folder=a_folder_of_others": lambda _, path: (path.parent / "other.txt").is_file()},
    ),
    Target(
        "models.WordDictionary.from_counts",
        {"counts": "object"},
        {"counts": lambda _: [("w1", 3)], "n_words": lambda _: 8},
        takes={f"counts={none}": lambda _, words: len(words) == 8 for none in ("[]", "{}")},
    ),
    Target("models.WordDictionary.read", good={"path": lambda w: _checkpoint(w).with_name("dict.txt")}),
    Target(
        "models.WordDictionary.write",
        {"path": "file written"},
        {"path": lambda w: w.fresh("dict.txt")},
        _dictionary,
    ),
    Target("models.WordDictionary.tokenizer", {"longest": "whole"}, owner=_dictionary),
    Target(
        "models.words_of",
        {"texts": "sentences"},
        {"texts": lambda w: list(w.sentences[:2])},
        takes={"texts=[]": lambda _, words: words == []},
    ),
    Target("plots.training_curves", good={"table": _trained}, finish=draw),
]  # fmt: skip
