"""Growth of peak memory with ten times the sentences, for every kind of pass.

Each size runs in a separate process. Jobs that write to disk or accumulate sums should grow by less than
5%, jobs that return vectors by their size. The same holds for the peak of the longer run relative to its
peak after a tenth of the time, since the peaks of two processes differ by chance, by up to a tenth. If
the peak grows, it is measured again with glibc returning large blocks at once, and so is the cost in
time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from ratios import Measured, Out
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM
from watched import EARLY, IN_USE, MIB, PEAK, SECONDS, TAKEN, Work, in_a_process

from matlens import collect
from matlens.activations import stream
from matlens.data import Examples
from matlens.ffn import Trace
from matlens.linear import fit_stream, stream_least_squares
from matlens.models import ModelLayout
from matlens.patching import submodule_pairs

_LAYERS, _WIDTH, _LENGTH = 6, 256, 24
_SHARE = 0.05


def main(
    sentences: Annotated[int, typer.Option(help="The smaller number of sentences.")] = 2_000,
    rounds: Annotated[int, typer.Option(help="Runs of each; the smallest peak counts.")] = 1,
    out: Out = None,
) -> None:
    """Measure the growth of the peak in each mode."""
    torch.set_num_threads(1)  # threads do not survive a fork
    measured = Measured("memory", out, sentences=sentences, times=10, rounds=rounds)
    rows = 9 * sentences * (_LAYERS + 1) * _WIDTH * 4 / MIB

    def limited(what: str, value: float) -> None:
        measured.add(f"{name}: {what}", value, max=1 + _SHARE)

    for name in _MODES:
        sizes = sentences, 10 * sentences
        seen = [[_parts(n, name) for _ in range(rounds)] for n in sizes]
        small, large = (_least(of_size, PEAK) for of_size in seen)
        if name == _IN_MEMORY:
            limited("growth / rows", (large - small) / rows)
            taken = [_least(of_size, TAKEN) for of_size in seen]
            limited("growth of what is in use / rows", (taken[1] - taken[0]) / rows)
        else:
            limited("peak of ten times the sentences / peak", large / small)
            later = min(float(parts[PEAK]) / float(parts[EARLY]) for parts in seen[1])
            limited("peak / peak after a tenth of the time", later)
            used = [_least(of_size, IN_USE) for of_size in seen]
            limited("in use, the same", used[1] / used[0])
            if large > (1 + _SHARE) * small:
                given = [[_parts(n, name, gives_back=True) for _ in range(rounds)] for n in sizes]
                peaks = [_least(of_size, PEAK) for of_size in given]
                seconds = [_least(of_size[1], SECONDS) for of_size in (seen, given)]
                measured.add(f"{name}, large blocks returned: peak, the same", peaks[1] / peaks[0])
                measured.add(f"{name}, large blocks returned: time / time", seconds[1] / seconds[0])
        measured.add(f"{name}: peak", small, unit="MiB")
    measured.write()


def _least(of_size: list[dict[str, Any]], part: str) -> float:
    """The smallest value over the runs of a size."""
    return min(float(parts[part]) for parts in of_size)


def _parts(sentences: int, mode: str, *, gives_back: bool = False) -> dict[str, Any]:
    """Memory use of a job in a separate process."""

    def prepare(folder: Path) -> Work:
        return partial(_MODES[mode], *_prepared(sentences), folder / "out")

    return in_a_process(prepare, gives_back=gives_back)


def _streaming_fit(model: Any, examples: Any, folder: Path) -> None:
    sites = [f"h.{layer}" for layer in range(_LAYERS + 1)]
    rows = stream(model, examples, sites, positions="all", progress=False)
    for _ in fit_stream(rows, [(0, _LAYERS), (_LAYERS // 2, _LAYERS)]):
        pass


_QUIET: dict[str, Any] = {"progress": False}
_IN_MEMORY = "collecting in memory"
_MODES: dict[str, Callable[[Any, Any, Path], object]] = {
    "collecting to disk": lambda m, examples, f: collect(m, examples, folder=f, **_QUIET),
    _IN_MEMORY: lambda m, examples, _: collect(m, examples, **_QUIET),
    "collecting all positions to disk": lambda m, examples, f: collect(
        m, examples, folder=f, positions="all", **_QUIET
    ),
    "sums of all positions": lambda m, examples, f: stream_least_squares(m, examples, f, **_QUIET),
    "streaming fit": _streaming_fit,
    "sums of sub-modules": lambda m, examples, f: stream_least_squares(
        m, examples, f, pairs=submodule_pairs(ModelLayout.from_model(m)), **_QUIET
    ),
    "tracing to disk": lambda m, examples, f: Trace.run(m, examples, folder=f, **_QUIET),
}


def _prepared(sentences: int) -> tuple[Any, Examples]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=_WIDTH, intermediate_size=512, num_hidden_layers=_LAYERS,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    model = build_bridge_from_module(LlamaForCausalLM(config).eval(), "LlamaForCausalLM", hf_config=config)
    tokens = np.random.default_rng(0).integers(3, 1000, sentences * _LENGTH)
    return model, Examples(tokens, np.arange(sentences + 1) * _LENGTH, np.full(sentences, _LENGTH - 1))


if __name__ == "__main__":
    typer.run(main)
