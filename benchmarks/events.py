"""How much longer tracing candidates and sub-updates takes than the forward passes that it cannot do without.

``Trace.run`` runs every sentence up to its position and reads the top candidate before and after each of the
FFNs: ``2 x n_layers`` read-outs of the whole vocabulary, where the model itself has one a token. By turns
with it in one process, over the same sentences, run the plain transformers model with its logits, over whole
sentences and cut at their positions. The aim is at most 1.5 times the whole ones.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from turns import fastest, plain_smollm2

import matlens
from matlens.activations import default_batch_tokens
from matlens.corpora import Examples
from matlens.ffn import Trace, event_scores
from matlens.models import SMOLLM2


def main(
    sentences: Annotated[int, typer.Option(help="Sentences of wikipedia-sample.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Turns; the fastest of each counts.")] = 1,
) -> None:
    """Print the ratio of tracing, events included, to bare forward passes of SmolLM2."""
    plain = plain_smollm2()
    model = matlens.load(SMOLLM2, device="cpu")
    corpus, _ = matlens.load_corpus("wikipedia-sample").split(n_train=sentences, n_validation=2)
    examples = matlens.make_examples(model, corpus)

    @torch.inference_mode()
    def bare(read: Examples) -> None:
        for batch in read.batches(default_batch_tokens(model)):
            plain(batch.tokens, attention_mask=batch.mask)

    best = fastest(
        {
            "whole sentences": lambda: bare(examples),
            "cut at positions": lambda: bare(examples.up_to_positions()),
            "events": lambda: event_scores(Trace.run(model, examples, progress=False)),
        },
        rounds,
    )
    n_tokens = len(examples.tokens)
    print(f"{sentences} sentences, {n_tokens} tokens, {torch.get_num_threads()} threads")
    for name, seconds in best.items():
        print(f"{name:16} {seconds:7.2f} s")
    print(f"events / forward passes: {best['events'] / best['whole sentences']:.2f} (aim: at most 1.5)")
    print(f"events / forward passes cut at positions: {best['events'] / best['cut at positions']:.2f}")


if __name__ == "__main__":
    typer.run(main)
