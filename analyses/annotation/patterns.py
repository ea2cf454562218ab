"""Patterns in top tokens, found automatically: words with similar contexts in a corpus.

The annotation protocol of paper B asks for patterns of at least four tokens. Here a pattern is a word and
those of the same list that occur in similar contexts (`WordSimilarity`); words with the same stem count once.
Similarity comes from a corpus and not from the model, so a random vector gains nothing from tokens that are
close together in the unembedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from studies import Model, layer_table
from torch import Tensor

from annotation.word_similarity import WordSimilarity
from matlens import InputError, metrics
from matlens.ffn import Projection, ValueVectors
from matlens.models import token_texts, visible
from matlens.parallel import Bar

MIN_PATTERN_WORDS = 4  # as in the paper's protocol
PATTERN_SIZES = range(MIN_PATTERN_WORDS, 13)
PATTERN_COLUMNS = ("known", "words", "tokens", "similarity", "pattern")


def find_patterns(ids: Int[Tensor, "n k"], word_similarity: WordSimilarity, tokenizer: Any) -> pd.DataFrame:
    """The largest pattern of each list of top tokens, one row a list.

    Columns are ``known, words, tokens, similarity, pattern``: how many different words of the list the corpus
    knows; how many of them the largest pattern has; how many tokens of the list these are, forms of one word
    included; how alike the pattern's words are to its central one, on average; and the words, the central one
    first, the others in their order in the list.
    """
    tokens, inverse = np.unique(ids.cpu().numpy(), return_inverse=True)
    words = np.array([word_similarity.row(text) for text in token_texts(tokenizer, tokens.tolist())])
    if not (words >= 0).any():
        raise InputError(
            f"None of the {len(words)} top tokens is one of the {len(word_similarity.words)} words that the "
            "corpus uses often enough. Expected a larger corpus, in the language of the model."
        )
    lists = words[inverse].reshape(ids.shape)
    bar = Bar(lists, desc="patterns")
    patterns = [_largest_pattern(of_list[of_list >= 0], word_similarity) for of_list in bar]
    return pd.DataFrame(patterns, columns=list(PATTERN_COLUMNS))


def _largest_pattern(
    words: Int[np.ndarray, " m"], word_similarity: WordSimilarity
) -> tuple[int, int, int, float, str]:
    families, first, forms = np.unique(word_similarity.families[words], return_index=True, return_counts=True)
    if not len(families):
        return 0, 0, 0, float("nan"), ""
    order = first.argsort()
    words, forms = words[first[order]], forms[order]
    similarities, alike = word_similarity.compare(words)
    np.fill_diagonal(alike, True)
    np.fill_diagonal(similarities, 0)
    sizes, closeness = alike.sum(1), (similarities * alike).sum(1)
    center = int(np.lexsort((-closeness, -sizes))[0])
    others = [i for i in np.flatnonzero(alike[center]).tolist() if i != center]
    similarity = float(closeness[center] / len(others)) if others else float("nan")
    pattern = ", ".join(word_similarity.words[words[i]] for i in (center, *others))
    return len(words), int(sizes[center]), int(forms[alike[center]].sum()), similarity, pattern


def search_concepts(
    model: Model, word_similarity: WordSimilarity, *, k: int = 30, seed: int = 0
) -> dict[str, pd.DataFrame]:
    """Patterns of all value vectors, of random vectors, and of shuffled tokens.

    Each table has a row for every vector, layer after layer, with the columns ``value, layer, index`` (where
    ``value`` is the name of a value vector, or a number in the other tables), those of `find_patterns`, and
    ``top``, the tokens with commas between. The random vectors have the mean and the standard deviation of
    their layer. In ``shuffled`` each rank's tokens are permuted over all value vectors: the same words
    with the same frequency, but related words are separated, so its patterns are due to chance.
    """
    values, projection = ValueVectors(model), Projection.from_model(model)
    value_ids = projection.top_of_all(values, k).ids
    layers = Bar(range(values.n_layers), desc="random vectors")
    random_ids = [projection.top(values.random(layer, values.d_mlp, seed=seed), k).ids for layer in layers]
    generator = torch.Generator().manual_seed(seed)
    shuffled_ids = torch.stack(
        [column[torch.randperm(len(value_ids), generator=generator)] for column in value_ids.T], 1
    )
    named, tables = values.name_columns(range(len(values))), {}
    for method, ids in (("values", value_ids), ("random", torch.cat(random_ids)), ("shuffled", shuffled_ids)):
        patterns = find_patterns(ids, word_similarity, projection.tokenizer)
        tables[method] = pd.concat([named, patterns], axis=1).assign(
            top=_joined_texts(ids, projection.tokenizer)
        )
        if method != "values":
            tables[method]["value"] = [f"{method} {row}" for row in range(len(ids))]
    return tables


def _joined_texts(ids: Tensor, tokenizer: Any) -> list[str]:
    tokens = {int(token) for token in ids.unique()}
    texts = dict(zip(tokens, map(visible, token_texts(tokenizer, tokens)), strict=True))
    return [", ".join(texts[token] for token in row) for row in ids.tolist()]


def pattern_shares(
    tables: Mapping[str, pd.DataFrame], model_name: str, corpus: str, *, k: int = 30
) -> pd.DataFrame:
    """Share of vectors with a pattern, by layer and in total (without a layer).

    Metrics: ``pattern``, the share of vectors whose largest
    pattern has ``k`` words or more; ``covered``, the share of the ``k`` top tokens that belong to a pattern
    of at least four words; ``known``, the share of them that the corpus knows as different words.
    """
    rows = []
    for method, table in tables.items():
        for layer in (None, *sorted(table["layer"].unique())):
            part = table if layer is None else table[table["layer"] == layer]
            rows += [(method, layer, *share) for share in _shares(part, k)]
    return layer_table("concept_search", model_name, corpus, rows)


def _shares(patterns: pd.DataFrame, k: int) -> Iterator[tuple[str, int, metrics.Estimate]]:
    """Shares of vectors with a pattern by its size, and of the top tokens that are in one or are known."""
    for size in PATTERN_SIZES:
        yield "pattern", size, metrics.proportion(_tensor(patterns["words"] >= size))
    in_patterns = patterns["tokens"].where(patterns["words"] >= MIN_PATTERN_WORDS, 0)
    for name, counts in (("covered", in_patterns), ("known", patterns["known"])):
        yield name, k, metrics.share(_tensor(counts / k), n_entries=k * len(counts))


def _tensor(column: pd.Series) -> Tensor:
    return torch.from_numpy(column.to_numpy(copy=True))


def distinct_concepts(
    patterns: pd.DataFrame, *, n: int = 30, words: int = 5, per_layer: int = 3, shared: float = 1 / 3
) -> pd.DataFrame:
    """The ``n`` vectors whose top tokens belong to one pattern most, each with another concept.

    Only patterns with at least ``words`` different words count, so that forms of one word do not count.
    They are ordered by tokens, words and similarity; a vector is skipped if more than ``shared`` of its
    pattern's words are in one already chosen, or if its layer already has ``per_layer``.
    """
    order = patterns[patterns["words"] >= words].sort_values(
        ["tokens", "words", "similarity"], ascending=False, kind="stable"
    )
    taken: list[int] = []
    taken_words: list[set[str]] = []
    layers: Counter[int] = Counter()
    for row, pattern, layer in zip(order.index, order["pattern"], order["layer"], strict=True):
        new = set(pattern.split(", "))
        overlaps = any(len(new & old) > shared * min(len(new), len(old)) for old in taken_words)
        if len(taken) < n and not overlaps and layers[layer] < per_layer:
            layers[layer] += 1
            taken.append(row)
            taken_words.append(new)
    return patterns.loc[taken].reset_index(drop=True)
