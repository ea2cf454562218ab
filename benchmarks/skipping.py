"""How much time a scheme takes that keeps a part of the blocks, against the model with all of them.

Both run the trunk alone, up to ``h^L``, over the same batches and by turns. A jump costs one matrix product
for the blocks that it skips, so half of the blocks should take about half of the time.
"""

from __future__ import annotations

from functools import partial

import torch
import typer
from ratios import Out, Rounds, Sentences, on_smollm2

from matlens import LinearMap, MapSet
from matlens.patching import Scheme, Variant, run_variants


def main(sentences: Sentences = 200, rounds: Rounds = 3, out: Out = None) -> None:
    """Measure the time of schemes as a ratio to that of the whole model."""
    measured, model, examples = on_smollm2("skipping", out, sentences, rounds=rounds)
    last = model.cfg.n_layers
    schemes = {
        "all blocks": Scheme((0, last), "blocks"),
        "every second block": Scheme(tuple(range(last + 1)), "mat"),
        "every third block": Scheme(tuple(sorted({*range(0, last + 1, 3), *range(2, last, 3)})), "mat"),
        "the second half": Scheme((0, last // 2, last), "mat"),
    }
    torch.manual_seed(0)
    nearly_identity = torch.eye(model.cfg.d_model) + 1e-3 * torch.randn(model.cfg.d_model, model.cfg.d_model)
    jumps = {pair for scheme in schemes.values() for pair in scheme.jumps}
    maps = MapSet(LinearMap(nearly_identity, None, f"h.{a}", f"h.{b}") for a, b in jumps)
    variants = {name: Variant(0, scheme.replacements(model, maps)) for name, scheme in schemes.items()}
    works = {
        name: partial(run_variants, model, examples, {name: variant}, progress=False)
        for name, variant in variants.items()
    }
    measured.time(works, rounds)
    for name, scheme in schemes.items():
        if name != "all blocks":
            what = f"{name} ({scheme.n_blocks} of {last}) / all blocks"
            measured.ratio(what, name, "all blocks")
    measured.write()


if __name__ == "__main__":
    typer.run(main)
