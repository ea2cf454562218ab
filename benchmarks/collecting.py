"""Time of collecting relative to the bare forward passes.

In turns, in one process and on the same batches: the transformers model with its default attention,
without hooks and bridge, and ``matlens.collect`` of all ``h^l``, at one position per sentence (both
truncate sentences at their positions) and at all positions. Target: at most 1.05 times the trunk, without
unembedding, and 1.15 times the forward passes for streaming all positions.
"""

from __future__ import annotations

from typing import Any

import typer
from ratios import Out, Rounds, Sentences, on_smollm2, plain_smollm2, run_forward

import matlens
from matlens.activations import default_batch_tokens, stream
from matlens.data import Examples


def main(sentences: Sentences = 400, rounds: Rounds = 3, out: Out = None) -> None:
    """Measure the ratios of collecting and of streaming to bare forward passes of SmolLM2."""
    measured, model, examples = on_smollm2("collecting", out, sentences, rounds=rounds)
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
    measured.time(works, rounds)
    measured.add_times()
    measured.ratio("collecting / trunk cut at positions", "collecting", "trunk, cut", max=1.05)
    measured.ratio("collecting / forward passes cut at positions", "collecting", "forward, cut")
    ours = "streaming all positions"
    measured.ratio(f"{ours} / forward passes", ours, "forward", max=1.15)
    measured.ratio(f"{ours} / trunk", ours, "trunk")
    measured.write()


if __name__ == "__main__":
    typer.run(main)
