"""How much longer tracing candidates and sub-updates takes than the forward passes that it cannot do without.

``Trace.run`` runs every sentence up to its position and reads the top candidate before and after each of the
FFNs: ``2 x n_layers`` read-outs of the whole vocabulary, where the model itself has one a token. By turns
with it in one process, over the same sentences, run the plain transformers model with its logits, over whole
sentences and cut at their positions. The aim is at most 1.2 times those that are cut.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from turns import fastest, plain_smollm2, print_ratio, print_times, smollm2_examples

from matlens.activations import default_batch_tokens
from matlens.corpora import Examples
from matlens.ffn import Trace, event_scores


def compare(plain: Any, model: Any, examples: Examples, rounds: int) -> None:
    """Print the ratios for a model, plain and as matlens loads it."""

    @torch.inference_mode()
    def bare(read: Examples) -> None:
        for batch in read.batches(default_batch_tokens(model)):
            plain(batch.tokens, attention_mask=batch.mask)

    def events() -> None:
        event_scores(Trace.run(model, examples, progress=False))

    cut = examples.up_to_positions()
    works = {
        "whole sentences": lambda: bare(examples),
        "cut at positions": lambda: bare(cut),
        "events": events,
    }
    best = fastest(works, rounds)
    print_times(best, f"{len(examples)} sentences, {len(examples.tokens)} tokens")
    print(f"events / forward passes: {best['events'] / best['whole sentences']:.2f}")
    ratio = best["events"] / best["cut at positions"]
    print_ratio("events / forward passes cut at positions", ratio, 1.2, events)


def main(
    sentences: Annotated[int, typer.Option(help="Sentences of wikipedia-sample.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Turns; the fastest of each counts.")] = 1,
) -> None:
    """Print the ratio of tracing, events included, to bare forward passes of SmolLM2."""
    compare(plain_smollm2(), *smollm2_examples(sentences), rounds)


if __name__ == "__main__":
    typer.run(main)
