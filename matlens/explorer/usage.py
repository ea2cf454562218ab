"""Max activating examples of value vectors, in one pass over a corpus.

The first token of a sentence is read but does not count: in most decoders it is an attention sink, whose
coefficients are hundreds of times as large as all others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from matlens.activations.collecting import stream
from matlens.data.examples import Examples
from matlens.ffn.updates import DOMINANT
from matlens.ffn.values import ValueVectors
from matlens.io.artifact import Artifact
from matlens.models.hooks import run_of_functions
from matlens.models.identity import Provenance
from matlens.models.sites import COEFFICIENTS, Site
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

LONGEST = 64  # tokens of a sentence that are read
_CHUNK = 256  # sentences between two stored states
_STEPS = 127  # of a coefficient, relative to the largest of its sentence
_BATCH_TOKENS = 512


def shortened(examples: Examples, longest: int = LONGEST) -> Examples:
    """The same sentences, truncated, with the last token of each as its position."""
    last = np.minimum(examples.lengths, longest) - 1
    return replace(examples, positions=last[examples.sentences]).up_to_positions()


@torch.no_grad()
def max_activating_examples(
    model: TransformerBridge, examples: Examples, values: ValueVectors, folder: Path, *,
    n_best: int = 5, progress: bool = True,
) -> Usage:  # fmt: skip
    """The sentences with the largest coefficients of each vector; resumes in the folder."""
    usage = Usage(values.n_layers, n_best, values.d_mlp)
    provenance = Provenance.from_model(model, data=examples.provenance, examples=examples.fingerprint)
    request = {
        "provenance": provenance.to_json(),
        "run_of_functions": run_of_functions(model),
        "n_best": n_best,
    }
    with (
        Artifact.writing(folder, "usage", request) as artifact,
        Bar(total=len(examples), desc="sentences", disable=not progress) as bar,
    ):
        usage.resume(artifact)
        bar.update(usage.n_done)
        while usage.n_done < len(examples):
            end = min(usage.n_done + _CHUNK, len(examples))
            usage.read(model, examples.select(np.arange(usage.n_done, end)), values)
            bar.update(end - usage.n_done)
            usage.n_done = end
            usage.store(artifact)
        if not artifact.finished:
            artifact.finish()
    return usage


class Usage:
    """The best sentences of every value vector, the best first, and how often each is dominant.

    Attributes
    ----------
    n_done, n_tokens
        Number of sentences read, and of their tokens that count.
    sentence, peak
        Rows of the examples, ``[layers, best, d_mlp]``, and the largest coefficient there; -1 and -inf where
        there are fewer sentences.
    coefficients
        Of the sentence's tokens, in steps of ``|peak| / 127`` and cut off at 127 of them,
        ``[layers, best, d_mlp, longest]``.
    dominant
        At how many tokens each is one of the ten dominant sub-updates, ``[layers, d_mlp]``.
    """

    def __init__(self, n_layers: int, n_best: int, d_mlp: int) -> None:
        shape = n_layers, n_best, d_mlp
        self.n_done = self.n_tokens = 0
        self.sentence = torch.full(shape, -1, dtype=torch.int32)
        self.peak = torch.full(shape, -torch.inf, dtype=torch.float32)
        self.coefficients = torch.zeros(*shape, LONGEST, dtype=torch.int8)
        self.dominant = torch.zeros(n_layers, d_mlp, dtype=torch.int64)

    def dominant_share(self) -> Tensor:
        """At which share of the tokens each is dominant."""
        return self.dominant / max(self.n_tokens, 1)

    def resume(self, artifact: Artifact) -> None:
        """Take over the last state that an earlier call has stored."""
        for name in artifact.written()[-1:]:
            for part in artifact.tensors(name):
                stored = artifact.read(name, part)
                setattr(self, part, stored.clone() if stored.ndim else int(stored))

    def store(self, artifact: Artifact) -> None:
        """Store the state in the place of the one before."""
        before = artifact.written()
        parts = {name: torch.as_tensor(part) for name, part in vars(self).items()}
        artifact.write(f"{self.n_done:09d}", parts)
        artifact.remove(*before)

    def read(self, model: TransformerBridge, examples: Examples, values: ValueVectors) -> None:
        """Run more sentences, which follow those that are done."""
        sites = [Site(COEFFICIENTS, layer) for layer in range(values.n_layers)]
        norms = [values.norms(layer).cpu() for layer in range(values.n_layers)]
        sentence_of = examples.at_positions("all").sentences
        batches = stream(model, examples, sites, positions="all", batch_tokens=_BATCH_TOKENS, progress=False)
        for rows in batches:
            number = sentence_of[rows.index]
            ids, row = np.unique(number, return_inverse=True)
            at = torch.from_numpy(row), torch.from_numpy(rows.places)
            counted = at[1] > 0
            self.n_tokens += int(counted.sum())
            for layer, site in enumerate(sites):
                m = rows.vectors[str(site)]
                dominant = (m[counted].abs() * norms[layer]).topk(min(DOMINANT, values.d_mlp)).indices
                self.dominant[layer] += torch.bincount(dominant.flatten(), minlength=values.d_mlp)
                self._merge(layer, m, at, counted, torch.from_numpy(ids + self.n_done))

    def _merge(
        self, layer: int, m: Tensor, at: tuple[Tensor, Tensor], counted: Tensor, sentences: Tensor
    ) -> None:
        n, n_best = len(sentences), self.peak.shape[1]
        grid = torch.zeros(n, LONGEST, m.shape[1], dtype=torch.float32)
        grid[at] = m
        outside = torch.ones(n, LONGEST, 1, dtype=torch.bool)
        outside[at[0][counted], at[1][counted]] = False
        peaks = grid.masked_fill(outside, -torch.inf).amax(1)
        best = torch.cat([self.peak[layer], peaks]).topk(n_best, dim=0)
        chosen = best.indices - n_best  # of this batch; below 0, of those before
        order = best.indices.clamp(max=n_best - 1)
        self.sentence[layer] = torch.where(
            chosen < 0, self.sentence[layer].gather(0, order), sentences[chosen.clamp(min=0)].int()
        )
        self.sentence[layer][best.values.isinf()] = -1
        old = self.coefficients[layer].gather(0, order[..., None].expand(-1, -1, LONGEST))
        self.peak[layer], self.coefficients[layer] = best.values, old
        slot, vector = ((chosen >= 0) & best.values.isfinite()).nonzero(as_tuple=True)
        if not len(slot):
            return
        taken = grid[chosen[slot, vector], :, vector]
        scale = best.values[slot, vector].abs().clamp(min=1e-30)[:, None]
        steps = (taken / scale * _STEPS).round().clamp(-_STEPS, _STEPS)
        self.coefficients[layer][slot, vector] = steps.to(torch.int8)
