"""How the peak memory of collecting grows when there are ten times more sentences.

Each size runs in a process of its own, since a peak never goes back. On disk the peak should grow by less
than 5%; in memory by the stored rows alone.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

_LAYERS, _WIDTH, _LENGTH = 6, 256, 24


def main(
    sentences: Annotated[int, typer.Option(help="The smaller number of sentences.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Runs of each; the least peak counts.")] = 2,
    store: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print the growth of the peak, on disk and in memory."""
    if store:
        print(_peak(sentences, store))
        return
    rows = 9 * sentences * (_LAYERS + 1) * _WIDTH * 4 / 2**20
    for kind in ("disk", "memory"):
        small, large = (min(_measured(n, kind) for _ in range(rounds)) for n in (sentences, 10 * sentences))
        print(
            f"{kind:6}: peak {small:.0f} MiB at {sentences} sentences, {large:.0f} MiB at {10 * sentences}: "
            f"{100 * (large / small - 1):+.1f}%, {large - small:+.0f} MiB (rows stored more: {rows:.0f} MiB)"
        )


def _measured(sentences: int, store: str) -> float:
    command = [sys.executable, __file__, "--sentences", str(sentences), "--store", store]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def _peak(sentences: int, store: str) -> float:
    import torch
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import LlamaConfig, LlamaForCausalLM

    from matlens import collect
    from matlens.corpora import Examples

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=_WIDTH, intermediate_size=512, num_hidden_layers=_LAYERS,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    model = build_bridge_from_module(LlamaForCausalLM(config).eval(), "LlamaForCausalLM", hf_config=config)
    tokens = np.random.default_rng(0).integers(3, 1000, sentences * _LENGTH)
    examples = Examples(tokens, np.arange(sentences + 1) * _LENGTH, np.full(sentences, _LENGTH - 1))
    with tempfile.TemporaryDirectory() as folder:
        collect(model, examples, folder=Path(folder) / "rows" if store == "disk" else None, progress=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    typer.run(main)
