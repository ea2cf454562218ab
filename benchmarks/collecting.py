"""How much longer collecting takes than the bare forward passes that it cannot do without.

Both run over the same batches in one process, by turns: the plain transformers model with its default
attention, without hooks and without the bridge, and ``matlens.collect`` of all ``h^l`` at one position a
sentence. The aim is at most 1.15 times the bare passes.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from turns import fastest, plain_smollm2, print_times, smollm2_examples

import matlens
from matlens.activations import default_batch_tokens


def main(
    sentences: Annotated[int, typer.Option(help="Sentences of wikipedia-sample.")] = 400,
    rounds: Annotated[int, typer.Option(help="Turns; the fastest of each counts.")] = 3,
) -> None:
    """Print the ratio of collecting to bare forward passes of SmolLM2."""
    plain = plain_smollm2()
    model, examples = smollm2_examples(sentences)
    batches = list(examples.batches(default_batch_tokens(model)))

    @torch.inference_mode()
    def bare() -> None:
        for batch in batches:
            plain(batch.tokens, attention_mask=batch.mask)

    @torch.inference_mode()
    def trunk() -> None:
        for batch in batches:
            plain.model(batch.tokens, attention_mask=batch.mask, use_cache=False)

    def ours() -> None:
        matlens.collect(model, examples, progress=False)

    best = fastest({"bare": bare, "trunk": trunk, "ours": ours}, rounds)
    print_times(best, f"{sentences} sentences, {len(examples.tokens)} tokens, {len(batches)} batches")
    print(f"collecting / bare forward: {best['ours'] / best['bare']:.2f} (aim: at most 1.15)")
    print(f"collecting / forward without the unembedding: {best['ours'] / best['trunk']:.2f}")


if __name__ == "__main__":
    typer.run(main)
