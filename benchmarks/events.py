"""How much longer tracing candidates and sub-updates takes than the forward passes that it cannot do without.

``Trace.run`` runs every sentence up to its position and reads the top candidate before and after each of the
FFNs: ``2 x n_layers`` readouts of the whole vocabulary, where the model itself has one a token. By turns
with it in one process, over the same sentences, run the plain transformers model with its logits, over whole
sentences and cut at their positions. The aim is at most 1.2 times those that are cut.
"""

from __future__ import annotations

import typer
from ratios import Out, Rounds, Sentences, on_smollm2, plain_smollm2, run_forward

from matlens.activations import default_batch_tokens
from matlens.ffn import Trace, event_scores


def main(sentences: Sentences = 400, rounds: Rounds = 2, out: Out = None) -> None:
    """Measure the ratio of tracing, events included, to bare forward passes of SmolLM2."""
    measured, model, examples = on_smollm2("events", out, sentences, rounds=rounds)
    plain, size = plain_smollm2(), default_batch_tokens(model)

    def events() -> None:
        event_scores(Trace.run(model, examples, progress=False))

    cut = examples.up_to_positions()
    works = {
        "whole sentences": lambda: run_forward(plain, examples.batches(size)),
        "cut at positions": lambda: run_forward(plain, cut.batches(size)),
        "events": events,
    }
    measured.time(works, rounds)
    measured.add_times()
    measured.ratio("events / forward passes cut at positions", "events", "cut at positions", max=1.2)
    measured.ratio("events / forward passes", "events", "whole sentences")
    measured.write()


if __name__ == "__main__":
    typer.run(main)
