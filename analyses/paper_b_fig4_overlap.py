"""Paper B, Figure 4: how far the final norm changes which tokens value vectors promote.

Overlap (IoU) of the 30 top tokens by ``E v`` and by ``E ln_f(v)`` at every layer, of all value vectors and of
random vectors with their mean and standard deviation. Expect a large overlap of the value vectors, so that
reading them without the norm is sound, and a smaller one of the random vectors. The paper's figure is
``--model gpt2``. Only the weights are read, so there is no corpus.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matlens import load
from matlens.cli import options, report, run_script
from matlens.ffn import norm_overlap
from matlens.models import ModelIdentity
from matlens.plots import shares_by_layer

NAME = "paper_b_fig4_overlap"


def main(
    model: options.Model = "smollm2-135m",
    random: Annotated[int, typer.Option(min=1, help="Random vectors at each layer.")] = 500,
    top: Annotated[int, typer.Option(min=1, help="Tokens of each list.")] = 30,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: options.Out = Path("out"),
) -> None:
    """Compare what vectors promote with and without the final norm, and draw the overlap layer by layer."""
    loaded = load(model, device=device)
    table = norm_overlap(loaded, n_random=random, k=top, seed=seed)
    origin = {"model": ModelIdentity.from_model(loaded).to_json(), "seed": seed, "n_random": random}
    report(out, NAME, table, origin, shares_by_layer(table, f"overlap of the {top} top tokens (IoU)"))


if __name__ == "__main__":
    run_script(main)
