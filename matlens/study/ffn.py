"""What analyses of FFNs share in an output folder: one model on one corpus traced once, clustered once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matlens.corpora.corpus import load_corpus
from matlens.corpora.examples import make_examples
from matlens.ffn.clusters import MEMORY_GIB, N_CLUSTERS, Clusters, method_within
from matlens.ffn.trace import Trace
from matlens.ffn.updates import DOMINANT
from matlens.ffn.values import ValueVectors
from matlens.models.loading import load
from matlens.study.study import slug

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


def traced(
    model: str | TransformerBridge,
    corpus: str,
    out: Path,
    *,
    sentences: int,
    seed: int = 0,
    k: int = DOMINANT,
    device: str | None = None,
) -> tuple[TransformerBridge, Trace]:
    """Load a model and trace it over a corpus, or open what another script has left in the output folder.

    The trace is in ``traces/<model>--<corpus>--<sentences>-seed<seed>-k<k>/``; one that was broken off is
    gone on with.

    Parameters
    ----------
    model, corpus
        By name; a model may be loaded already.
    out
        The output folder.
    sentences, seed
        How many, drawn as the validation part of `Corpus.split`; the seed is of the positions and of the
        random sub-updates too.
    k
        How many sub-updates are dominant.

    Raises
    ------
    InputError
        Something is not there, the corpus is too small, or the model cannot be traced.
    """
    _, part = load_corpus(corpus).split(n_train=1, n_validation=sentences, seed=seed)
    loaded = load(model, device=device) if isinstance(model, str) else model
    name = f"{slug(loaded.cfg.model_name)}--{slug(corpus)}--{sentences}-seed{seed}-k{k}"
    examples = make_examples(loaded, part, seed=seed)
    return loaded, Trace.run(loaded, examples, k=k, seed=seed, folder=out / "traces" / name)


def clustered(
    values: ValueVectors, out: Path, n_clusters: int = N_CLUSTERS, *, memory: float = MEMORY_GIB
) -> Clusters:
    """Cluster a model's value vectors, or open the clusters that are in the output folder.

    They are in ``clusters/<model>--<n_clusters>-<method>/``, see `Clusters.fit`.

    Raises
    ------
    InputError
        More clusters than vectors, or a vector without a direction.
    """
    name = f"{slug(values.identity.name)}--{n_clusters}-{method_within(len(values), memory)}"
    return Clusters.fit(values, n_clusters, memory=memory, folder=out / "clusters" / name)
