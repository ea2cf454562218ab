"""All value vectors of a model as static pages, which also work when opened from a disk.

A browser lets a page opened from a disk load scripts next to it, and fetch nothing. So every part of the data
is a script that passes its content by name, and is loaded when it is needed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from matlens.data.corpus import Corpus
from matlens.data.examples import Examples
from matlens.data.making import make_examples
from matlens.errors import InputError, check_int, checked, printable
from matlens.explorer.usage import Usage, max_activating_examples, shortened
from matlens.ffn.clusters import Clusters
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors
from matlens.io.artifact import Artifact
from matlens.io.files import write_files
from matlens.models.identity import Provenance
from matlens.models.tokens import token_texts, visible
from matlens.numerics import without_autocast
from matlens.parallel import Bar
from matlens.plots.pages import assemble, embedded_json, packed

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

HOLDS = "pages of value vectors"
INDEX = "index.html"
_BLOCK = 256  # value vectors per script
_SENTENCES = 1024  # sentences per script
_TOKENS = 1024  # tokens per script that lists their value vectors
_IN_LISTS = 5  # top tokens per vector in lists of vectors
_SHOWN, _SEARCHED = 10, 30  # tokens of a vector that are shown, and that are searched
_BEST = 5  # sentences per vector
_USAGE = "usage"


@checked
def write_value_pages(
    model: TransformerBridge,
    folder: str | Path,
    *,
    corpus: Corpus | None = None,
    clusters: Clusters | None = None,
    neighbors: int = 8,
    progress: bool = True,
) -> Path:
    """Write pages of all value vectors of a model into a folder; returns the page to open.

    An interrupted call resumes; a finished folder is only verified.

    Parameters
    ----------
    corpus
        Sentences to search for activating examples, the first 64 tokens of each.
    neighbors
        Number of nearest vectors to show. The cosines of all pairs are computed, which takes hours for half a
        million vectors; 0 skips them.
    """
    values, plain = ValueVectors(model), Projection.from_model(model)
    check_int(neighbors, "neighbors", min=0, max=len(values) - 1)
    if clusters is not None:
        clusters.provenance.check_same(values.identity, ours="the clusters", theirs="the value vectors")
        if len(clusters.labels) != len(values):
            raise InputError(f"clusters must be of {len(values)} vectors, got {len(clusters.labels)}.")
    request = {
        "provenance": Provenance(values.identity).to_json(), "neighbors": neighbors,
        "corpus": None if corpus is None else corpus.fingerprint,
        "clusters": None if clusters is None else clusters.provenance.to_json(),
    }  # fmt: skip
    with Artifact.writing(folder, HOLDS, request) as artifact:
        if artifact.finished:
            artifact.check()
        else:
            examples = usage = None
            if corpus is not None:
                examples = shortened(make_examples(model, corpus))
                usage = max_activating_examples(
                    model, examples, values, artifact.folder / _USAGE, n_best=_BEST, progress=progress
                )
            projections = {"plain": plain}
            if hasattr(model, "ln_final"):
                projections["norm"] = Projection.after_norm(model)
            pages = _Pages(artifact, values, projections, neighbors, examples, usage)
            pages.compute(progress)
            pages.write(clusters)
            page = _index_page(values, corpus, clusters)
            write_files({artifact.folder / INDEX: page})
            for layer in range(values.n_layers):
                artifact.remove(_name(layer))
            shutil.rmtree(artifact.folder / _USAGE, ignore_errors=True)
            artifact.finish()
    return artifact.folder / INDEX


def _index_page(values: ValueVectors, corpus: Corpus | None, clusters: Clusters | None) -> str:
    """The page that finds and shows value vectors."""
    model, name = values.identity.name, None if corpus is None else corpus.name
    data = {
        "model": model, "nLayers": values.n_layers, "dMlp": values.d_mlp, "block": _BLOCK,
        "sentences": _SENTENCES, "tokens": _TOKENS, "top_k": _SEARCHED, "corpus": name,
        "nClusters": 0 if clusters is None else len(clusters),
    }  # fmt: skip
    return assemble(
        "values.html", "values.js", title=f"Value vectors of {model}", data=data, sources=["'self'"],
        model=printable(model), corpus=None if name is None else printable(name), top_k=_SEARCHED,
        n_vectors=f"{len(values):,}",
    )  # fmt: skip


class _Pages:
    """The files of the pages, written from the lists of every layer when all of these are stored."""

    def __init__(
        self, artifact: Artifact, values: ValueVectors, projections: dict[str, Projection],
        neighbors: int, examples: Examples | None, usage: Usage | None,
    ) -> None:  # fmt: skip
        self._artifact, self._values, self._projections = artifact, values, projections
        self._neighbors, self._examples, self._usage = neighbors, examples, usage

    def compute(self, progress: bool) -> None:
        """Store the norms, tokens and neighbors of the value vectors of each layer."""
        units = None
        layers = range(self._values.n_layers)
        if self._neighbors:
            units = torch.nn.functional.normalize(torch.cat(list(map(self._values.layer, layers))), dim=1)
        for layer in Bar(layers, desc="value vectors", unit="layer", disable=not progress):
            if self._artifact.written([_name(layer)]):
                continue
            vectors = self._values.layer_view(layer)
            near, cosines = self._near(layer, units)
            tensors = {"norms": vectors.norm(dim=1), "neighbors": near, "cosines": cosines}
            for reading, projection in self._projections.items():
                top, bottom = projection.top_and_bottom(vectors, _SEARCHED, _SHOWN)
                for side, (ids, scores) in (("top", top), ("bottom", bottom)):
                    tensors |= {f"{reading} {side}": ids, f"{reading} {side} scores": scores}
            self._artifact.write(_name(layer), tensors)

    def write(self, clusters: Clusters | None) -> None:
        """Write all scripts."""
        top = []
        for layer in range(self._values.n_layers):
            stored = {name: part.numpy() for name, part in self._artifact.read_all(_name(layer)).items()}
            self._write_layer(layer, stored)
            top.append(stored["plain top"])
        self._write_lists(np.concatenate(top), clusters)

    def _write(self, name: str, content: Any) -> None:
        """Write a script that passes a part of the data."""
        text = f"matlensShard({embedded_json(name)},{embedded_json(content)});\n"
        write_files({self._artifact.folder / f"{name}.js": text})

    def _write_layer(self, layer: int, stored: dict[str, np.ndarray]) -> None:
        for number, start in enumerate(range(0, self._values.d_mlp, _BLOCK)):
            part = slice(start, start + _BLOCK)
            content: dict[str, Any] = {
                "lists": [
                    {
                        "reading": reading, "side": side,
                        "ids": packed(stored[f"{reading} {side}"][part, :_SHOWN]),
                        "scores": packed(stored[f"{reading} {side} scores"][part, :_SHOWN]),
                    }
                    for reading in self._projections
                    for side in ("top", "bottom")
                ],
                **{name: packed(stored[name][part]) for name in ("norms", "neighbors", "cosines")},
                **self._uses(layer, part),
            }  # fmt: skip
            self._write(f"vectors-{layer}-{number}", content)

    def _uses(self, layer: int, part: slice) -> dict[str, Any]:
        """The sentences with the largest coefficients of some vectors, and how often these are dominant."""
        usage, examples = self._usage, self._examples
        if usage is None or examples is None:
            return {"sentences": None}
        sentence = usage.sentence[layer, :, part].T.numpy()
        coefficients = usage.coefficients[layer, :, part].transpose(0, 1).numpy()
        known = sentence >= 0
        lengths = np.where(known, examples.lengths[sentence], 0)
        inside = np.arange(coefficients.shape[-1]) < lengths[..., None]
        return {
            "dominant": packed(usage.dominant_share()[layer, part].numpy()),
            "sentences": packed(np.where(known, sentence + 1, 0)),
            "peaks": packed(np.where(known, usage.peak[layer, :, part].T.numpy(), 0)),
            "coefficients": packed(coefficients[inside].astype(np.int64) + 128),
            "starts": packed(np.concatenate([[0], np.cumsum(inside.sum((1, 2)))])),
        }

    @without_autocast()
    def _near(self, layer: int, units: Tensor | None) -> tuple[Tensor, Tensor]:
        d_mlp = self._values.d_mlp
        if units is None:
            return torch.empty(d_mlp, 0, dtype=torch.long), torch.empty(d_mlp, 0, dtype=torch.float32)
        rows = torch.arange(layer * d_mlp, (layer + 1) * d_mlp)
        cosines = units[rows] @ units.T
        cosines[torch.arange(d_mlp), rows] = -2.0  # not itself
        best = cosines.topk(self._neighbors)
        return best.indices, best.values

    def _texts(self) -> list[str]:
        plain = self._projections["plain"]
        return list(map(visible, token_texts(plain.tokenizer, range(len(plain.unembedding)))))

    def _write_lists(self, top: np.ndarray, clusters: Clusters | None) -> None:
        """Write token texts, vector summaries, the vectors of each token, and sentences."""
        texts = self._texts()
        self._write("vocabulary", texts)
        facts = {"top": packed(top[:, :_IN_LISTS])}
        if self._usage is not None:
            facts["dominant"] = packed(self._usage.dominant_share().flatten().numpy())
        if clusters is not None:
            facts["cluster"] = packed(clusters.labels)
        self._write("summary", facts)
        # The value vectors with each token in their top tokens, those that rank it highest first.
        n, k = top.shape
        order = np.lexsort((np.repeat(np.arange(n), k), np.tile(np.arange(k), n), top.ravel()))
        tokens, rows = top.ravel()[order], order // k
        bounds = np.searchsorted(tokens, np.arange(len(texts) + 1))
        for number, first in enumerate(range(0, len(texts), _TOKENS)):
            starts = bounds[first : min(first + _TOKENS, len(texts)) + 1]
            content = {"starts": packed(starts - starts[0]), "rows": packed(rows[starts[0] : starts[-1]])}
            self._write(f"tokens-{number}", content)

        examples = self._examples
        for number, first in enumerate(range(0, 0 if examples is None else len(examples), _SENTENCES)):
            assert examples is not None
            bounds = examples.offsets[first : first + _SENTENCES + 1]
            tokens = examples.tokens[bounds[0] : bounds[-1]]
            content = {"starts": packed(bounds - bounds[0]), "tokens": packed(tokens)}
            self._write(f"sentences-{number}", content)


def _name(layer: int) -> str:
    """The files of a layer that those after it need; they are removed in the end."""
    return f"layer-{layer}"
