"""Collecting the residual stream of all layers at all tokens, next to other libraries.

On the same batches, each against the forward pass without the unembedding: transformers with
``output_hidden_states``, which keeps references; TransformerLens with ``run_with_cache``; nnsight with saved
layer outputs; `matlens.activations.stream`, which copies the vectors out of their padding. And with the
batches that each makes itself, sentences per CPU second, kept in memory and written to a folder: transformers
in batches of 16 sentences as they come, matlens by length.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from ratios import Out, Rounds, Sentences, fastest, on_smollm2, plain_smollm2, run_forward
from safetensors.torch import save_file
from torch import Tensor

import matlens
from matlens.activations import default_batch_tokens, stream

_SENTENCES_A_BATCH = 16


def main(sentences: Sentences = 400, rounds: Rounds = 3, out: Out = None) -> None:
    """Measure the ratios on SmolLM2."""
    measured, model, examples = on_smollm2("peers", out, sentences, rounds=rounds)
    plain, size = plain_smollm2(), default_batch_tokens(model)
    n_layers, batches = model.cfg.n_layers, list(examples.batches(size))
    sites = [f"h.{layer}" for layer in range(n_layers + 1)]
    # hook_in of block l is h^l; TransformerLens has no hook behind the last block but its output.
    hooks = [f"blocks.{layer}.hook_in" for layer in range(n_layers)] + [f"blocks.{n_layers - 1}.hook_out"]

    def hidden_states(tokens: Tensor, mask: Tensor) -> list[Tensor]:
        run = plain.model(tokens, attention_mask=mask, use_cache=False, output_hidden_states=True)
        return list(run.hidden_states)

    @torch.no_grad()
    def transformers() -> None:
        for batch in batches:
            hidden_states(batch.tokens, batch.mask)

    @torch.no_grad()
    def transformer_lens() -> None:
        for batch in batches:
            _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.mask, names_filter=hooks)
            assert len(cache) == len(hooks)

    def ours() -> None:
        for _ in stream(model, examples, sites, positions="all", batch_tokens=size, progress=False):
            pass

    works: dict[str, Callable[[], None]] = {
        "trunk": lambda: run_forward(plain.model, batches),
        "transformers": transformers, "TransformerLens": transformer_lens, "matlens": ours,
    }  # fmt: skip
    with suppress(ModuleNotFoundError):
        works["nnsight"] = _nnsight(plain, batches)
    measured.time(works, rounds)
    for name in list(works)[1:]:
        target = {"max": 1.05} if name == "matlens" else {}
        measured.ratio(f"same batches: {name} / forward pass", name, "trunk", **target)

    @torch.no_grad()
    def in_order() -> Iterator[list[Tensor]]:
        for start in range(0, len(examples), _SENTENCES_A_BATCH):
            batch = examples.batch(np.arange(len(examples))[start : start + _SENTENCES_A_BATCH])
            yield [layer[batch.mask.bool()] for layer in hidden_states(batch.tokens, batch.mask)]

    def to_folder(write: Callable[[Path], object]) -> Callable[[], None]:
        def run() -> None:
            with tempfile.TemporaryDirectory() as folder:
                write(Path(folder) / "vectors")

        return run

    def write_theirs(folder: Path) -> None:
        folder.mkdir()
        for number, layers in enumerate(in_order()):
            save_file({f"h.{i}": layer for i, layer in enumerate(layers)}, folder / f"{number}.safetensors")

    quiet: Any = {"positions": "all", "progress": False}
    own = {
        "transformers, in memory": lambda: list(in_order()),
        "matlens, in memory": lambda: matlens.collect(model, examples, **quiet),
        "transformers, to a folder": to_folder(write_theirs),
        "matlens, to a folder": to_folder(
            lambda folder: matlens.collect(model, examples, folder=folder, **quiet)
        ),
    }
    for name, seconds in fastest(own, rounds).items():
        measured.add(f"own batches: {name}", sentences / seconds, unit="sentences per CPU second")
    measured.write()


def _nnsight(plain: Any, batches: list[Any]) -> Callable[[], None]:
    """Passes that save the input of the first layer and the output of each layer."""
    from nnsight import NNsight

    traced = NNsight(plain.model)

    @torch.no_grad()
    def run() -> None:
        for batch in batches:
            kept: list[Any] = []
            with traced.trace(batch.tokens, attention_mask=batch.mask, use_cache=False):
                kept.append(traced.layers[0].input.save())
                for layer in traced.layers:
                    kept.append(layer.output.save())

    return run


if __name__ == "__main__":
    typer.run(main)
