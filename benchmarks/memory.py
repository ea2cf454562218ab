"""How the peak memory grows when there are ten times more sentences, in every way of going over them.

Each size runs in a process of its own, since a peak never goes back; all begin with what is imported. What
writes to disk or keeps moments should grow by less than 5%; what keeps rows in memory by the rows alone.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Measured, Out

from matlens import collect
from matlens.activations import stream, stream_moments
from matlens.corpora import Examples
from matlens.ffn import Trace
from matlens.linear import fit_stream
from matlens.models import Anatomy
from matlens.patching import submodule_pairs

_LAYERS, _WIDTH, _LENGTH = 6, 256, 24
_SHARE = 0.05


def main(
    sentences: Annotated[int, typer.Option(help="The smaller number of sentences.")] = 500,
    rounds: Annotated[int, typer.Option(help="Runs of each; the least peak counts.")] = 2,
    out: Out = None,
) -> None:
    """Measure the growth of the peak in each mode."""
    torch.set_num_threads(1)  # threads do not survive a fork
    measured = Measured("memory", out, sentences=sentences, times=10, rounds=rounds)
    rows = 9 * sentences * (_LAYERS + 1) * _WIDTH * 4 / 2**20
    for name in _MODES:
        small, large = (min(_measured(n, name) for _ in range(rounds)) for n in (sentences, 10 * sentences))
        if name == _IN_MEMORY:
            measured.add(f"{name}: growth / rows", (large - small) / rows, most=1 + _SHARE)
        else:
            measured.add(f"{name}: peak of ten times the sentences / peak", large / small, most=1 + _SHARE)
        measured.add(f"{name}: peak", small, unit="MiB")
    measured.write()


def _measured(sentences: int, mode: str) -> float:
    """The peak of a process of its own, in MiB."""
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        code = 1
        try:
            os.write(writes, str(_peak(sentences, mode)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writes)
    with open(reads) as said:
        peak = said.read()
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"{mode} of {sentences} sentences has failed.")
    return float(peak)


def _collected(model: Any, examples: Any, **how: Any) -> None:
    collect(model, examples, progress=False, **how)


def _on_disk(model: Any, examples: Any, folder: Path) -> None:
    _collected(model, examples, folder=folder)


def _in_memory(model: Any, examples: Any, folder: Path) -> None:
    _collected(model, examples)


def _all_positions(model: Any, examples: Any, folder: Path) -> None:
    _collected(model, examples, folder=folder, positions="all")


def _moments(model: Any, examples: Any, folder: Path) -> None:
    stream_moments(model, examples, folder, progress=False)


def _passing(model: Any, examples: Any, folder: Path) -> None:
    sites = [f"h.{layer}" for layer in range(_LAYERS + 1)]
    rows = stream(model, examples, sites, positions="all", progress=False)
    for _ in fit_stream(rows, [(0, _LAYERS), (_LAYERS // 2, _LAYERS)]):
        pass


def _submodules(model: Any, examples: Any, folder: Path) -> None:
    stream_moments(model, examples, folder, pairs=submodule_pairs(Anatomy.from_model(model)), progress=False)


def _trace(model: Any, examples: Any, folder: Path) -> None:
    Trace.run(model, examples, folder=folder, progress=False)


_IN_MEMORY = "collecting in memory"
_MODES: dict[str, Callable[[Any, Any, Path], None]] = {
    "collecting to disk": _on_disk, _IN_MEMORY: _in_memory,
    "collecting all positions to disk": _all_positions,
    "moments of all positions": _moments, "maps while vectors pass by": _passing,
    "moments of sub-modules": _submodules, "tracing to disk": _trace,
}  # fmt: skip


def _peak(sentences: int, mode: str) -> float:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=_WIDTH, intermediate_size=512, num_hidden_layers=_LAYERS,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    model = build_bridge_from_module(LlamaForCausalLM(config).eval(), "LlamaForCausalLM", hf_config=config)
    tokens = np.random.default_rng(0).integers(3, 1000, sentences * _LENGTH)
    examples = Examples(tokens, np.arange(sentences + 1) * _LENGTH, np.full(sentences, _LENGTH - 1))
    with tempfile.TemporaryDirectory() as folder:
        _MODES[mode](model, examples, Path(folder) / "out")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    typer.run(main)
