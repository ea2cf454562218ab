"""How much longer tracing candidates and sub-updates takes than the forward passes that it cannot do without.

``Trace.run`` runs every sentence up to its position and reads the top candidate before and after each of the
FFNs: ``2 x n_layers`` readouts of the whole vocabulary, where the model itself has one a token. By turns
with it in one process, over the same sentences, run the plain transformers model with its logits, over whole
sentences and cut at their positions. The aim is at most 1.2 times those that are cut.
"""

from __future__ import annotations

import torch
import typer
from turns import Measured, Out, Rounds, Sentences, fastest, plain_smollm2, smollm2_examples

from matlens.activations import default_batch_tokens
from matlens.data import Examples
from matlens.ffn import Trace, event_scores
from matlens.models import SMOLLM2


def main(sentences: Sentences = 400, rounds: Rounds = 2, out: Out = None) -> None:
    """Measure the ratio of tracing, events included, to bare forward passes of SmolLM2."""
    model, examples = smollm2_examples(sentences)
    job = {"sentences": sentences, "tokens": len(examples.tokens), "rounds": rounds}
    measured = Measured("events", out, model=SMOLLM2, corpus="wikipedia-sample", **job)
    plain = plain_smollm2()

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
    measured.add_times(best)
    ratio = best["events"] / best["cut at positions"]
    measured.add("events / forward passes cut at positions", ratio, max=1.2, profiled=events)
    measured.add("events / forward passes", best["events"] / best["whole sentences"])
    measured.write()


if __name__ == "__main__":
    typer.run(main)
