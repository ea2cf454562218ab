"""Train three sizes of a small GPT-2 for paper A's Figures 7, 8 and 10.

GPT-2's own architecture (learned positions, GELU, no gates) with 2, 4 and 8 layers of 64, 96 and 128
dimensions, and a byte-level vocabulary of 4,000 pieces learned from the training part; all read the same
sentences in the same order. They predict far worse than the published family, but show whether curves of one
family coincide by relative depth, and how linear FFNs without gates are.

Pass the folders ``small-gpt-2``, ``small-gpt-4`` and ``small-gpt-8`` as ``--model``;
``analyses/paper_a_fig7_models.py`` takes it once for each. With the same ``--seed``, and a ``--val`` that is
not larger, the validation sentences of other analyses are held out here, too. An interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
from figures.paper_a import training_curves
from studies import Report, Study, run_study
from training.running import TrainingRun, bpe_tokenizer, token_sequences, train
from training.tables import compare_with_ngrams, training_table
from transformers import GPT2Config, GPT2LMHeadModel

from matlens.errors import Between, PositiveInt

NAME = "small_gpts"
WIDTHS = {2: 64, 4: 96, 8: 128}  # by layers
RATE = 2e-3
LONGEST, TRAINED = 128, 96  # tokens that the models read, and of a sentence that are trained on


def main(
    study: Study,
    report: Report,
    updates: PositiveInt = 600,
    pieces: Annotated[int, Between(258)] = 4000,
    size: list[int] | None = None,
) -> None:
    """Train the models one after the other, save them, and compare them with n-grams.

    Parameters
    ----------
    updates
        Updates of 32 sentences each.
    pieces
        Pieces of the vocabulary.
    size
        Layers of a model to train, 2, 4 or 8; by default all three.
    """
    training, held_out = study.parts
    tables, origin = [], {"sentences": len(training), "fingerprint": training.fingerprint, "updates": updates}
    for layers in size or WIDTHS:
        name = f"small-gpt-{layers}"
        folder = report.out / name
        model, tokenizer, parts, run = train_gpt(study, folder, layers=layers, pieces=pieces, updates=updates)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        print(folder)
        perplexities = compare_with_ngrams(model, *parts)
        tables.append(training_table(run, perplexities, model=name, corpus=held_out.name, n_held_out=200))
        origin[name] = {"minutes": run.seconds / 60, "parameters": model.num_parameters()}
    table = pd.concat(tables, ignore_index=True)
    report.write(NAME, table, {"trained on": origin, "seed": study.seed}, training_curves(table))


def train_gpt(
    study: Study,
    folder: Path,
    *,
    layers: int,
    pieces: int,
    updates: int,
    save: Callable[[Any, Any, int], None] = lambda model, tokenizer, update: None,
) -> tuple[GPT2LMHeadModel, Any, list[list[list[int]]], TrainingRun]:
    """Train a GPT-2 of one of the sizes; with its tokenizer, and the training and held-out sequences."""
    tokenizer = bpe_tokenizer(study.parts[0], n_tokens=pieces, longest=LONGEST)
    parts = [token_sequences(tokenizer, part, longest=TRAINED) for part in study.parts]
    width = WIDTHS.get(layers, 64)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=LONGEST, n_embd=width, n_layer=layers, n_head=width // 16,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(study.seed)
        model = GPT2LMHeadModel(config)
    run = train(
        model, parts[0], parts[1][:200], folder=folder / "training", n_updates=updates, rate=RATE,
        seed=study.seed, after_update=partial(save, model, tokenizer),
    )  # fmt: skip
    return model, tokenizer, parts, run


if __name__ == "__main__":
    run_study(main, model=None)
