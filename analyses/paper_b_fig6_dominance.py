"""Paper B, Figure 6: how much of an FFN's update comes from its ten dominant sub-updates.

The share of the ten sub-updates with the largest ``|m_i| ||v_i||`` at every layer, and of ten random ones, at
one drawn position of each sentence. Expect the dominant ones to hold 5% to 10% and more of the whole, the
random ones ``10 / d_mlp``. The paper's figure is ``--model gpt2-medium``, 2,000 sentences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matlens import load, load_corpus, make_examples
from matlens.cli import options, report, run_script
from matlens.ffn import dominance
from matlens.models import ModelIdentity
from matlens.plots import shares_by_layer

NAME = "paper_b_fig6_dominance"


def main(
    model: options.Model = "smollm2-135m",
    corpus: options.CorpusName = "wikipedia-sample",
    sentences: Annotated[int, typer.Option(min=2, help="How many sentences to run.")] = 2000,
    dominant: Annotated[int, typer.Option(min=1, help="How many sub-updates count as dominant.")] = 10,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: options.Out = Path("out"),
) -> None:
    """Measure the share of the dominant sub-updates over a corpus, and draw it layer by layer."""
    texts = load_corpus(corpus)
    _, part = texts.split(n_train=1, n_validation=sentences, seed=seed)
    loaded = load(model, device=device)
    examples = make_examples(loaded, part, seed=seed)
    table = dominance(loaded, examples, k=dominant, seed=seed)
    origin = {"model": ModelIdentity.from_model(loaded).to_json(), "data": examples.provenance, "seed": seed}
    report(out, NAME, table, origin, shares_by_layer(table, f"share of {dominant} sub-updates"))


if __name__ == "__main__":
    run_script(main)
