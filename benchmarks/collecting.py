"""How much longer collecting takes than the bare forward passes that it cannot do without.

Over the same batches in one process, by turns: the plain transformers model with its default attention,
without hooks and without the bridge, and ``matlens.collect`` of all ``h^l``, once at one position a sentence,
where sentences are cut at their positions for both, and once at all positions. The aim is at most 1.05 times
the bare trunk, which has no unembedding. Maps that are fitted while all vectors pass by may take 1.15 times
the forward passes, but for what the moments themselves take.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from turns import Measured, Out, fastest, plain_smollm2, run_forward, smollm2_examples

import matlens
from matlens.activations import default_batch_tokens, stream
from matlens.data import Examples
from matlens.models import SMOLLM2


def compare(plain: Any, model: Any, examples: Examples, rounds: int, measured: Measured) -> None:
    """Measure the ratios for a model, plain and as matlens loads it."""
    size, cut = default_batch_tokens(model), examples.up_to_positions()
    sites = [f"h.{layer}" for layer in range(model.cfg.n_layers + 1)]

    def bare(part: Any, read: Examples) -> None:
        run_forward(part, read.batches(size))

    def collected() -> None:
        matlens.collect(model, examples, progress=False)

    def passing() -> None:
        for _ in stream(model, examples, sites, positions="all", progress=False):
            pass

    works = {
        "forward, cut": lambda: bare(plain, cut), "trunk, cut": lambda: bare(plain.model, cut),
        "collecting": collected,
        "forward": lambda: bare(plain, examples), "trunk": lambda: bare(plain.model, examples),
        "streaming all positions": passing,
    }  # fmt: skip
    best = fastest(works, rounds)
    measured.add_times(best)
    measured.add(
        "collecting / trunk cut at positions", best["collecting"] / best["trunk, cut"], most=1.05,
        profiled=collected,
    )  # fmt: skip
    measured.add("collecting / forward passes cut at positions", best["collecting"] / best["forward, cut"])
    measured.add(
        "streaming all positions / forward passes", best["streaming all positions"] / best["forward"],
        most=1.15, profiled=passing,
    )  # fmt: skip
    measured.add("streaming all positions / trunk", best["streaming all positions"] / best["trunk"])


def main(
    sentences: Annotated[int, typer.Option(help="Sentences of wikipedia-sample.")] = 400,
    rounds: Annotated[int, typer.Option(help="Turns; the fastest of each counts.")] = 3,
    out: Out = None,
) -> None:
    """Measure the ratios of collecting and of streaming to bare forward passes of SmolLM2."""
    model, examples = smollm2_examples(sentences)
    job = {"sentences": sentences, "tokens": len(examples.tokens), "rounds": rounds}
    measured = Measured("collecting", out, model=SMOLLM2, corpus="wikipedia-sample", **job)
    compare(plain_smollm2(), model, examples, rounds, measured)
    measured.write()


if __name__ == "__main__":
    typer.run(main)
