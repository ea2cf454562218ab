"""Where value vectors are used: sentences of their largest coefficients, and how often they dominate.

One pass over a corpus, which keeps the best few sentences of each value vector and nothing else. The first
token of a sentence is read but does not count: in most decoders it is an attention sink, whose coefficients
are hundreds of times as large as all others and say nothing of it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.activations.collecting import stream
from matlens.data.examples import Examples
from matlens.errors import Between, InputError, PositiveInt, check_int, checked
from matlens.ffn.updates import DOMINANT
from matlens.ffn.values import ValueVectors
from matlens.io.artifact import Artifact
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.sites import COEFFICIENTS, Site
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

LONGEST = 64  # tokens of a sentence that are read
_CHUNK = 256  # sentences between two times that what is known is kept
_STEPS = 127  # of a coefficient, against the largest of its sentence that counts
_BATCH_TOKENS = 512


@checked
@dataclass(frozen=True, eq=False)
class Usage:
    """The best sentences of every value vector, the best first, and how often each is dominant.

    Attributes
    ----------
    sentence
        Rows of the examples; -1 where there are fewer sentences.
    peak
        The largest coefficient in the sentence.
    coefficients
        Of the sentence's tokens, in steps of ``|peak| / 127`` and cut off at 127 of them.
    dominant
        At how many tokens each is among the ``k`` sub-updates that contribute most.
    n_tokens
        How many tokens counted.
    """

    sentence: Int[Tensor, "layers best d_mlp"]
    peak: Float[Tensor, "layers best d_mlp"]
    coefficients: Int[Tensor, "layers best d_mlp longest"]
    dominant: Int[Tensor, "layers d_mlp"]
    n_tokens: int


@checked
def shortened(examples: Examples, longest: Annotated[int, Between(2)] = LONGEST) -> Examples:
    """The same sentences, those that are longer cut after so many tokens, and the last of each as position.

    Raises
    ------
    InputError
        It is no whole number of at least 2.
    """
    kept = examples.places < longest
    lengths = np.minimum(examples.lengths, longest)
    return replace(
        examples,
        tokens=examples.tokens[kept],
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        positions=lengths[examples.sentences] - 1,
    )


@checked
@torch.inference_mode()
def max_activating_examples(
    model: TransformerBridge,
    examples: Examples,
    values: ValueVectors,
    *,
    n_best: PositiveInt = 5,
    k: int = DOMINANT,
    folder: str | Path | None = None,
    progress: bool = True,
) -> Usage:
    """Run a corpus through a model once, and keep the sentences that use each value vector most.

    Parameters
    ----------
    model, examples
        The model, and sentences of at most 64 tokens, see `shortened`.
    values
        Its value vectors.
    n_best
        How many sentences of each value vector are kept.
    k
        How many sub-updates of a token count as dominant.
    folder
        Where the state is stored from time to time, so that an interrupted call resumes.
    progress
        Whether to show a bar over the sentences.

    Raises
    ------
    InputError
        ``n_best`` or ``k`` is less than 1, or ``k`` more than there are; the value vectors are of another
        model; there is no sentence, or a longer one; or the folder is of another job or damaged.
    """
    check_int(k, "k", min=1, max=values.d_mlp)
    identity = ModelIdentity.from_model(model).of_weights
    Provenance(values.identity).check_same(identity, ours="the value vectors", theirs="the model")
    if not len(examples) or int(examples.lengths.max()) > LONGEST:
        raise InputError(
            f"Expected one sentence or more, each of at most {LONGEST} tokens: explorer.shortened(examples) "
            "cuts those that are longer."
        )
    state = _State(values.n_layers, n_best, values.d_mlp)
    request = {
        "provenance": Provenance(values.identity, examples.provenance, examples.fingerprint).to_json(),
        "n_best": n_best, "k": k,
    }  # fmt: skip
    with nullcontext() if folder is None else Artifact.writing(folder, "usage", request) as artifact:
        if artifact is not None:
            state.resume(artifact)
        with Bar(total=len(examples), initial=state.n_done, desc="sentences", disable=not progress) as bar:
            while state.n_done < len(examples):
                end = min(state.n_done + _CHUNK, len(examples))
                state.read(model, _part(examples, state.n_done, end), values, k)
                bar.update(end - state.n_done)
                state.n_done = end
                if artifact is not None:
                    state.store(artifact)
        if artifact is not None and not artifact.finished:
            artifact.finish()
    n_tokens = int((examples.lengths - 1).sum())
    return Usage(state.sentence, state.peak, state.coefficients, state.dominant, n_tokens)


def _part(examples: Examples, start: int, end: int) -> Examples:
    first, last = int(examples.offsets[start]), int(examples.offsets[end])
    return Examples(
        examples.tokens[first:last],
        examples.offsets[start : end + 1] - first,
        np.diff(examples.offsets[start : end + 1]) - 1,
        examples.provenance,
        np.arange(end - start),
    )


class _State:
    """What is known after some of the sentences."""

    def __init__(self, n_layers: int, n_best: int, d_mlp: int) -> None:
        shape = n_layers, n_best, d_mlp
        self.n_done = 0
        self.sentence = torch.full(shape, -1, dtype=torch.int32)
        self.peak = torch.full(shape, -torch.inf)
        self.coefficients = torch.zeros(*shape, LONGEST, dtype=torch.int8)
        self.dominant = torch.zeros(n_layers, d_mlp, dtype=torch.int64)

    def resume(self, artifact: Artifact) -> None:
        """Take over the last state that an earlier call has stored."""
        for name in artifact.written()[-1:]:
            stored = {part: artifact.read(name, part, finite=False) for part in artifact.tensors(name)}
            self.n_done = int(stored.pop("n_done"))
            for part, values in stored.items():
                setattr(self, part, values.clone())

    def store(self, artifact: Artifact) -> None:
        """Store the state in the place of the one before."""
        before = artifact.written()
        parts = {
            "sentence": self.sentence, "peak": self.peak, "coefficients": self.coefficients,
            "dominant": self.dominant, "n_done": torch.tensor(self.n_done),
        }  # fmt: skip
        artifact.write(f"{self.n_done:09d}", parts)
        artifact.remove(*before)

    def read(self, model: TransformerBridge, examples: Examples, values: ValueVectors, k: int) -> None:
        """Run more sentences, which follow those that are done."""
        sites = [Site(COEFFICIENTS, layer) for layer in range(values.n_layers)]
        norms = [values.norms(layer).cpu() for layer in range(values.n_layers)]
        sentence_of = np.repeat(np.arange(len(examples)), examples.lengths)
        batches = stream(model, examples, sites, positions="all", batch_tokens=_BATCH_TOKENS, progress=False)
        for rows in batches:
            number = sentence_of[rows.index]
            ids, row = np.unique(number, return_inverse=True)
            at = torch.from_numpy(row), torch.from_numpy(rows.places)
            counted = at[1] > 0
            for layer, site in enumerate(sites):
                m = rows.vectors[str(site)]
                dominant = (m[counted].abs() * norms[layer]).topk(k).indices
                self.dominant[layer] += torch.bincount(dominant.flatten(), minlength=values.d_mlp)
                self._merge(layer, m, at, counted, torch.from_numpy(ids + self.n_done))

    def _merge(
        self, layer: int, m: Tensor, at: tuple[Tensor, Tensor], counted: Tensor, sentences: Tensor
    ) -> None:
        n, n_best = len(sentences), self.peak.shape[1]
        grid = torch.zeros(n, LONGEST, m.shape[1])
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
