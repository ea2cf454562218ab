"""Time of collecting relative to the bare forward passes.

In turns, in one process and on the same batches: the transformers model with its default attention,
without hooks and bridge, and ``matlens.collect`` of all ``h^l``, at one position per sentence (both
truncate sentences at their positions) and at all positions. Target: at most 1.05 times the trunk, without
unembedding, and 1.15 times the forward passes for streaming all positions.
"""

from __future__ import annotations

from typing import Any

import typer
from turns import Measured, Out, Rounds, Sentences, fastest, plain_smollm2, run_forward, smollm2_examples

import matlens
from matlens.activations import default_batch_tokens, stream
from matlens.data import Examples
from matlens.models import SMOLLM2


def main(sentences: Sentences = 400, rounds: Rounds = 3, out: Out = None) -> None:
    """Measure the ratios of collecting and of streaming to bare forward passes of SmolLM2."""
    model, examples = smollm2_examples(sentences)
    job = {"sentences": sentences, "tokens": len(examples.tokens), "rounds": rounds}
    measured = Measured("collecting", out, model=SMOLLM2, corpus="wikipedia-sample", **job)
    plain = plain_smollm2()
    size, cut = default_batch_tokens(model), examples.up_to_positions()
    sites = [f"h.{layer}" for layer in range(model.cfg.n_layers + 1)]

    def bare(part: Any, read: Examples) -> None:
        run_forward(part, read.batches(size))

    def collected() -> None:
        matlens.collect(model, examples, progress=False)

    def streaming() -> None:
        for _ in stream(model, examples, sites, positions="all", progress=False):
            pass

    works = {
        "forward, cut": lambda: bare(plain, cut), "trunk, cut": lambda: bare(plain.model, cut),
        "collecting": collected,
        "forward": lambda: bare(plain, examples), "trunk": lambda: bare(plain.model, examples),
        "streaming all positions": streaming,
    }  # fmt: skip
    best = fastest(works, rounds)
    measured.add_times(best)
    measured.add(
        "collecting / trunk cut at positions", best["collecting"] / best["trunk, cut"], max=1.05,
        profiled=collected,
    )  # fmt: skip
    measured.add("collecting / forward passes cut at positions", best["collecting"] / best["forward, cut"])
    measured.add(
        "streaming all positions / forward passes", best["streaming all positions"] / best["forward"],
        max=1.15, profiled=streaming,
    )  # fmt: skip
    measured.add("streaming all positions / trunk", best["streaming all positions"] / best["trunk"])
    measured.write()


if __name__ == "__main__":
    typer.run(main)
