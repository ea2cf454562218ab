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
from turns import fastest, plain_smollm2, print_times, smollm2_examples

from matlens.activations import default_batch_tokens
from matlens.corpora import Examples
from matlens.ffn import Trace, event_scores


def main(
    sentences: Annotated[int, typer.Option(help="Sentences of wikipedia-sample.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Turns; the fastest of each counts.")] = 1,
) -> None:
    """Print the ratio of tracing, events included, to bare forward passes of SmolLM2."""
    plain = plain_smollm2()
    model, examples = smollm2_examples(sentences)

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
    print_times(best, f"{sentences} sentences, {len(examples.tokens)} tokens")
    print(f"events / forward passes: {best['events'] / best['whole sentences']:.2f} (aim: at most 1.5)")
    print(f"events / forward passes cut at positions: {best['events'] / best['cut at positions']:.2f}")


if __name__ == "__main__":
    typer.run(main)
