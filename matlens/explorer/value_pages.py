"""All value vectors of a model as pages: static files that any server serves, and a disk as well."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from matlens.data.corpus import Corpus
from matlens.data.corpus_examples import make_examples
from matlens.data.examples import Examples
from matlens.errors import InputError, PositiveInt, check_int, checked
from matlens.explorer.usage import Usage, max_activating_examples, shortened
from matlens.ffn.clusters import Clusters
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors
from matlens.io.artifact import Artifact, check_file, describe_file
from matlens.models.identity import Provenance
from matlens.models.tokens import token_texts, visible
from matlens.parallel import Bar
from matlens.plots.page_assembly import packed
from matlens.plots.page_values import (
    BLOCK,
    INDEX,
    SENTENCES,
    TOKENS,
    VectorBlock,
    index_page,
    shard,
    vector_shard,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

HOLDS = "pages of value vectors"
_IN_LISTS = 5  # top tokens of a vector where many vectors are listed
_USAGE = "usage"


@checked
def write_value_pages(
    model: TransformerBridge,
    folder: str | Path,
    *,
    corpus: Corpus | None = None,
    clusters: Clusters | None = None,
    k: int = 10,
    among: int = 30,
    neighbours: int = 8,
    n_best: PositiveInt = 5,
    progress: bool = True,
) -> Path:
    """Write the pages of all value vectors of a model; open ``index.html`` in the folder.

    A killed call goes on where it was; a finished folder is looked through and left as it is.

    Parameters
    ----------
    model
        The model.
    folder
        Where the pages are written.
    corpus
        Sentences to look for uses of the vectors in, at most 64 tokens of each. Without one the pages show
        none.
    clusters
        Clusters of the model's value vectors.
    k
        How many top and bottom tokens of each vector are shown.
    among
        Among how many top tokens of each vector a token is found.
    neighbours
        How many vectors that point most the same way are shown. The cosines of all pairs are computed, which
        of half a million vectors takes hours: 0 leaves them out.
    n_best
        How many sentences of each vector are shown.
    progress
        Whether to show bars.

    Returns
    -------
    path
        The page to open.

    Raises
    ------
    InputError
        The model has no value vectors or no unembedding, the clusters are of another model, a number is out
        of range, the folder belongs to another job, or a file in it is not what was written.
    """
    values, plain = ValueVectors(model), Projection.from_model(model)
    d_vocab = len(plain.unembedding)
    check_int(k, "k", min=1, max=d_vocab)
    check_int(among, "among", min=k, max=d_vocab)
    check_int(neighbours, "neighbours", min=0, max=len(values) - 1)
    if clusters is not None:
        clusters.provenance.check_same(values.identity, ours="the clusters", theirs="the value vectors")
        if len(clusters.labels) != len(values):
            raise InputError(f"There are clusters of {len(clusters.labels)} vectors, not of {len(values)}.")
    request = {
        "provenance": Provenance(values.identity).to_json(), "k": k, "among": among,
        "neighbours": neighbours, "best": n_best if corpus is not None else None,
        "corpus": None if corpus is None else corpus.fingerprint,
        "clusters": None if clusters is None else clusters.provenance.to_json(),
    }  # fmt: skip
    with Artifact.writing(folder, HOLDS, request) as artifact:
        if artifact.finished:
            for _ in artifact.check():
                pass
        else:
            pages = _Pages(artifact, model, values, plain, k, among, neighbours, progress)
            pages.write(corpus, clusters, n_best)
            artifact.finish()
    return artifact.folder / INDEX


class _Pages:
    """The files of the pages, written part by part."""

    def __init__(
        self, artifact: Artifact, model: TransformerBridge, values: ValueVectors, plain: Projection, k: int,
        among: int, neighbours: int, progress: bool,
    ) -> None:  # fmt: skip
        self._artifact, self._folder = artifact, artifact.folder
        self._model, self._values = model, values
        self._k, self._among, self._neighbours, self._progress = k, among, neighbours, progress
        self._projections = {"plain": plain}
        if hasattr(model, "ln_final"):
            self._projections["norm"] = Projection.after_norm(model)
        self._d_vocab = len(plain.unembedding)

    def write(self, corpus: Corpus | None, clusters: Clusters | None, n_best: int) -> None:
        examples = None if corpus is None else shortened(make_examples(self._model, corpus))
        usage = None
        if examples is not None:
            usage = max_activating_examples(
                self._model, examples, self._values, n_best=n_best, folder=self._folder / _USAGE,
                progress=self._progress,
            )  # fmt: skip
        lengths = np.empty(0, dtype=np.int64) if examples is None else examples.lengths
        top = np.concatenate(list(self._layers(usage, lengths)))
        self._script("vocabulary", self._texts())
        self._summary(top, usage, clusters)
        self._tokens(top)
        if examples is not None:
            self._sentences(examples)
        page = index_page(
            model=self._values.identity.name, n_layers=self._values.n_layers, d_mlp=self._values.d_mlp,
            among=self._among, corpus=None if corpus is None else corpus.name,
            n_clusters=0 if clusters is None else len(clusters),
        )  # fmt: skip
        self._artifact.write_text(INDEX, page)
        for layer in range(self._values.n_layers):
            self._artifact.remove(_name(layer))
            (self._folder / f"{_name(layer)}.json").unlink(missing_ok=True)
        shutil.rmtree(self._folder / _USAGE, ignore_errors=True)

    def _script(self, name: str, content: Any) -> None:
        self._artifact.write_text(f"{name}.js", shard(name, content))

    def _layers(self, usage: Usage | None, lengths: np.ndarray) -> Iterator[np.ndarray]:
        """Write the value vectors of each layer, and yield their top tokens."""
        units = self._units() if self._neighbours else None
        layers = range(self._values.n_layers)
        for layer in Bar(layers, desc="value vectors", unit="layer", disable=not self._progress):
            if not self._is_written(layer):
                files = self._layer(layer, usage, lengths, units)
                records = {path.name: describe_file(path) for path in files}
                self._artifact.write_json(_name(layer), records)  # which says that all are there
            yield self._artifact.read(_name(layer), "top").numpy().astype(np.int64)

    def _is_written(self, layer: int) -> bool:
        """Whether all files of a layer exist; raises InputError if one is not what was written."""
        records = self._artifact.read_json(_name(layer))
        if records is None or not all(os.path.lexists(self._folder / name) for name in records):
            return False
        for name, record in records.items():
            check_file(self._folder / name, record)
        return True

    def _units(self) -> Tensor:
        rows = [self._values.layer(layer) for layer in range(self._values.n_layers)]
        return torch.nn.functional.normalize(torch.cat(rows), dim=1)

    def _layer(
        self, layer: int, usage: Usage | None, lengths: np.ndarray, units: Tensor | None
    ) -> list[Path]:
        """Write the files of a layer, and its top tokens beside."""
        files = []
        vectors = self._values.layer(layer)
        lists = {name: self._extremes(projection, vectors) for name, projection in self._projections.items()}
        near, cosines = self._near(layer, units)
        norms = vectors.norm(dim=1).cpu().numpy()
        for number, start in enumerate(range(0, self._values.d_mlp, BLOCK)):
            part = slice(start, start + BLOCK)
            tokens: dict[tuple[str, str], np.ndarray] = {}
            scores: dict[tuple[str, str], np.ndarray] = {}
            for name, sides in lists.items():
                for side, (ids, numbers) in sides.items():
                    tokens[name, side] = ids[part, : self._k].numpy()
                    scores[name, side] = numbers[part, : self._k].numpy()
            used: dict[str, np.ndarray] = {}
            if usage is not None:
                used = {
                    "dominant": (usage.dominant[layer, part] / max(usage.n_tokens, 1)).numpy(),
                    "sentences": usage.sentence[layer, :, part].T.numpy(),
                    "peaks": usage.peak[layer, :, part].T.numpy(),
                    "coefficients": usage.coefficients[layer, :, part].transpose(0, 1).numpy(),
                }
            block = VectorBlock(tokens, scores, norms[part], near[part], cosines[part], **used)
            text = vector_shard(layer, number, block, lengths)
            files.append(self._folder / f"vectors-{layer}-{number}.js")
            self._artifact.write_text(files[-1].name, text)
        self._artifact.write(_name(layer), {"top": lists["plain"]["top"][0].int()})
        return [*files, self._folder / f"{_name(layer)}.safetensors"]

    def _extremes(self, projection: Projection, vectors: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Ids and scores of the tokens at both ends, of scores that are made once."""
        parts: dict[str, list[Any]] = {"top": [], "bottom": []}
        for block in projection.blocks(vectors):
            scores = projection.scores(block)
            parts["top"].append(scores.topk(self._among))
            parts["bottom"].append(scores.topk(self._k, largest=False))
        return {
            side: (torch.cat([p.indices for p in tops]).cpu(), torch.cat([p.values for p in tops]).cpu())
            for side, tops in parts.items()
        }

    def _near(self, layer: int, units: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        d_mlp = self._values.d_mlp
        if units is None:
            return np.empty((d_mlp, 0), dtype=np.int64), np.empty((d_mlp, 0), dtype=np.float32)
        rows = torch.arange(layer * d_mlp, (layer + 1) * d_mlp)
        cosines = units[rows] @ units.T
        cosines[torch.arange(d_mlp), rows] = -2.0  # not itself
        best = cosines.topk(self._neighbours)
        return best.indices.cpu().numpy(), best.values.cpu().numpy()

    def _texts(self) -> list[str]:
        return list(map(visible, token_texts(self._projections["plain"].tokenizer, range(self._d_vocab))))

    def _summary(self, top: np.ndarray, usage: Usage | None, clusters: Clusters | None) -> None:
        content: dict[str, Any] = {"top": packed(top[:, :_IN_LISTS])}
        if usage is not None:
            content["dominant"] = packed((usage.dominant / max(usage.n_tokens, 1)).flatten().numpy())
        if clusters is not None:
            content["cluster"] = packed(clusters.labels)
        self._script("summary", content)

    def _tokens(self, top: np.ndarray) -> None:
        """Which value vectors have each token among their top tokens, those that rank it highest first."""
        n, among = top.shape
        order = np.lexsort((np.repeat(np.arange(n), among), np.tile(np.arange(among), n), top.ravel()))
        tokens, rows = top.ravel()[order], order // among
        bounds = np.searchsorted(tokens, np.arange(self._d_vocab + 1))
        for number, first in enumerate(range(0, self._d_vocab, TOKENS)):
            starts = bounds[first : min(first + TOKENS, self._d_vocab) + 1]
            content = {"starts": packed(starts - starts[0]), "rows": packed(rows[starts[0] : starts[-1]])}
            self._script(f"tokens-{number}", content)

    def _sentences(self, examples: Examples) -> None:
        for number, first in enumerate(range(0, len(examples), SENTENCES)):
            bounds = examples.offsets[first : first + SENTENCES + 1]
            tokens = examples.tokens[bounds[0] : bounds[-1]]
            content = {"starts": packed(bounds - bounds[0]), "tokens": packed(tokens)}
            self._script(f"sentences-{number}", content)


def _name(layer: int) -> str:
    """The files of a layer that those after it need; they are removed in the end."""
    return f"layer-{layer}"
