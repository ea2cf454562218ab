"""Patterns among top tokens, found without a person: words that the sentences of a corpus use alike.

The annotation protocol of paper B asks for patterns of at least four tokens. Here a pattern is a word and
those of the same list that are used as it is (`WordSimilarity`), each word counted once whatever its case,
number or ending. What a vector promotes comes from the model, which words belong together from a corpus, so
a random vector gains nothing from tokens lying close together in the unembedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from matlens import metrics
from matlens.corpora.word_similarity import WordSimilarity
from matlens.errors import InputError
from matlens.ffn.projection import TOP, Projection, top_tokens_of_all
from matlens.ffn.values import ValueVectors
from matlens.models.vocabulary import token_texts, visible
from matlens.storage.tables import result_row, result_table

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

EXPERIMENT = "concept_search"
SMALLEST = 4  # words of a pattern, as in the paper's protocol
SIZES = range(SMALLEST, 13)
FOUND = ("known", "words", "tokens", "similarity", "pattern")


def find_patterns(
    ids: Int[Tensor, "n k"], usage: WordSimilarity, tokenizer: Any, *, progress: bool = True
) -> pd.DataFrame:
    """The largest pattern of each list of top tokens, one row a list.

    Columns are ``known, words, tokens, similarity, pattern``: how many different words of the list the corpus
    knows; how many of them the largest pattern has; how many tokens of the list these are, forms of one word
    included; how alike the pattern's words are to its central one, on average; and the words, the central one
    first, the others in their order in the list.

    Parameters
    ----------
    ids
        Tokens, such as `top_tokens_of_all` gives.
    usage
        What tells which words are used alike.
    tokenizer
        The model's own.

    Raises
    ------
    InputError
        No token of the lists is a word of the corpus.
    """
    seen, inverse = np.unique(ids.numpy(), return_inverse=True)
    words = np.array([usage.row(text) for text in token_texts(tokenizer, seen.tolist())])
    if not (words >= 0).any():
        raise InputError(
            f"None of the {len(words)} top tokens is among the {len(usage.words)} words that the corpus uses "
            "often enough. Expected a larger corpus, in the language of the model."
        )
    lists = words[inverse].reshape(ids.shape)
    rows: Iterable[int] = tqdm(range(len(lists)), desc="patterns", disable=not progress, delay=1)
    found = [_largest(lists[row][lists[row] >= 0], usage) for row in rows]
    return pd.DataFrame(found, columns=list(FOUND))


def _largest(words: Int[np.ndarray, " m"], usage: WordSimilarity) -> tuple[int, int, int, float, str]:
    families, first, forms = np.unique(usage.families[words], return_index=True, return_counts=True)
    order = first.argsort()
    own, forms = words[first[order]], forms[order]
    names = [usage.words[row] for row in own.tolist()]
    if not len(families):
        return 0, 0, 0, float("nan"), ""
    similar, linked = usage.alike(own)
    np.fill_diagonal(linked, True)
    np.fill_diagonal(similar, 0)
    sizes, closeness = linked.sum(1), (similar * linked).sum(1)
    centre = int(np.lexsort((-closeness, -sizes))[0])
    others = [i for i in np.flatnonzero(linked[centre]).tolist() if i != centre]
    alike = float(closeness[centre] / len(others)) if others else float("nan")
    told = ", ".join(names[i] for i in (centre, *others))
    return len(own), int(sizes[centre]), int(forms[linked[centre]].sum()), alike, told


def search_concepts(
    model: TransformerBridge,
    usage: WordSimilarity,
    *,
    k: int = TOP,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, pd.DataFrame]:
    """Patterns of all value vectors, of as many random vectors, and of the values' tokens dealt anew.

    Each table has a row for every vector, layer after layer, with the columns ``value, layer, index`` (of
    ``random`` a number for the first), those of `patterns`, and ``top``, the tokens with commas between.
    The random vectors have the mean and the standard deviation of their layer. In ``dealt`` each rank's
    tokens are shuffled among all value vectors: the same words as often, but whatever belongs together is
    torn apart, so its patterns are those of chance.

    Raises
    ------
    InputError
        The model has no value vectors, or the corpus none of its tokens.
    """
    values, projection = ValueVectors(model), Projection.from_model(model)
    real = top_tokens_of_all(values, projection, k=k, progress=progress).ids
    layers = tqdm(range(values.n_layers), desc="random vectors", disable=not progress, delay=1)
    drawn = [projection.top(values.random(layer, values.d_mlp, seed=seed), k).ids for layer in layers]
    generator = torch.Generator().manual_seed(seed)
    dealt = torch.stack([column[torch.randperm(len(real), generator=generator)] for column in real.T], 1)
    found = {}
    named = [values.at(row) for row in range(len(values))]
    for method, ids in (("values", real), ("random", torch.cat(drawn)), ("dealt", dealt)):
        names = map(str, named) if method == "values" else (f"{method} {row}" for row in range(len(ids)))
        told = {"value": list(names), "layer": [one.layer for one in named]}
        told["index"] = [one.index for one in named]
        found[method] = pd.concat(
            [pd.DataFrame(told), find_patterns(ids, usage, projection.tokenizer, progress=progress)], axis=1
        ).assign(top=_texts(ids, projection.tokenizer))
    return found


def _texts(ids: Tensor, tokenizer: Any) -> list[str]:
    seen = {int(token) for token in ids.unique()}
    texts = dict(zip(seen, map(visible, token_texts(tokenizer, seen)), strict=True))
    return [", ".join(texts[token] for token in own) for own in ids.tolist()]


def pattern_shares(
    found: dict[str, pd.DataFrame], model_name: str, corpus: str, *, k: int = TOP
) -> pd.DataFrame:
    """How many vectors have a pattern, layer by layer and over all layers (where ``layer`` is empty).

    The columns are those of all tables. Metrics: ``pattern``, the share of vectors whose largest pattern has
    ``k`` words or more; ``covered``, the share of the ``k`` top tokens that belong to a pattern of at least
    four words; ``known``, that of those which the corpus knows as different words.
    """
    rows = []
    measured: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
        "covered": lambda part: part["tokens"].where(part["words"] >= SMALLEST, 0) / k,
        "known": lambda part: part["known"] / k,
    }
    for method, table in found.items():
        for layer in (None, *sorted(table["layer"].unique())):
            part = table if layer is None else table[table["layer"] == layer]
            estimates = {}
            for size in SIZES:
                hits = torch.from_numpy((part["words"] >= size).to_numpy(copy=True))
                estimates["pattern", size] = metrics.proportion(hits)
            for metric, shares in measured.items():
                estimates[metric, k] = metrics.mean(torch.from_numpy(shares(part).to_numpy(copy=True)))
            rows += [
                result_row(
                    EXPERIMENT, model=model_name, corpus=corpus, method=method, layer=layer, target=layer,
                    metric=metric, k=size, estimate=estimate,
                )
                for (metric, size), estimate in estimates.items()
            ]  # fmt: skip
    return result_table(rows)


def distinct_concepts(
    found: pd.DataFrame, *, n: int = 30, words: int = 5, per_layer: int = 3, shared: float = 1 / 3
) -> pd.DataFrame:
    """The ``n`` vectors whose top tokens belong to one pattern most, each with another concept.

    Only patterns of enough different words count, so that forms of one word are none. They are taken in the
    order of tokens, words and similarity; a vector is passed over if it shares too many of its pattern's
    words with one that was taken, or if its layer has given enough.

    Parameters
    ----------
    found
        One of the tables of `search`.
    n
        How many; fewer if there are not so many.
    words
        Fewest words of a pattern.
    per_layer
        Most vectors of one layer.
    shared
        Most that two patterns may have in common, as a part of the smaller one.
    """
    order = found[found["words"] >= words].sort_values(
        ["tokens", "words", "similarity"], ascending=False, kind="stable"
    )
    taken: list[int] = []
    sets: list[set[str]] = []
    layers: Counter[int] = Counter()
    for row, pattern, layer in zip(order.index, order["pattern"], order["layer"], strict=True):
        own = set(pattern.split(", "))
        alike = any(len(own & other) > shared * min(len(own), len(other)) for other in sets)
        if len(taken) < n and not alike and layers[layer] < per_layer:
            layers[layer] += 1
            taken.append(row)
            sets.append(own)
    return found.loc[taken].reset_index(drop=True)
