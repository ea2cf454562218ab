"""Kneser-Ney by its formula, counted anew for each probability."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from training.tables import NgramModel

V = 6
GENERATOR = np.random.default_rng(0)
SEQUENCES = [[0, *map(int, GENERATOR.choice([1, 1, 1, 2, 2, 3, 4], 8)), 0] for _ in range(12)]
TESTED = [[0, 1, 2, 5, 3, 0], [0, 4, 4, 1, 0]]


def grams(length: int) -> list[tuple[int, ...]]:
    return [
        tuple(tokens[i : i + length])
        for tokens in SEQUENCES
        for i in range(len(tokens) - length + 1)
        if length > 1 or i  # the first token of a sequence is not predicted
    ]


def count(gram: tuple[int, ...], order: int) -> int:
    """How often; of shorter n-grams before how many different tokens, and how often at the beginning."""
    if len(gram) == order:
        return grams(order).count(gram)
    before = {longer[0] for longer in grams(len(gram) + 1) if longer[1:] == gram}
    return len(before) + sum(tuple(tokens[: len(gram)]) == gram for tokens in SEQUENCES if len(gram) > 1)


def discount(length: int, order: int) -> float:
    counts = [count(gram, order) for gram in set(grams(length))]
    once, twice = counts.count(1), counts.count(2)
    return once / (once + 2 * twice) if once and twice else 0.5


def probability(context: Sequence[int], token: int, order: int) -> float:
    p = 1 / V
    for length in range(1, order + 1):
        given = tuple(context[len(context) - length + 1 :]) if length > 1 else ()
        if len(given) < length - 1:
            break
        counts = {w: count((*given, w), order) for w in range(V)}
        total, different = sum(counts.values()), sum(c > 0 for c in counts.values())
        if not total:
            break
        d = discount(length, order)
        p = max(counts[token] - d, 0) / total + d * different / total * p
    return p


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_and_perplexity_are_those_of_the_formula(order):
    model = NgramModel(SEQUENCES, d_vocab=V, order=order)
    for context in ([0], [0, 1], [2, 1], [1, 5], [5, 5], [3, 0, 1]):
        found = [model.probability(context, token) for token in range(V)]
        assert found == pytest.approx([probability(context, w, order) for w in range(V)], rel=1e-12)
        assert math.fsum(found) == pytest.approx(1, rel=1e-12)
    logs = [
        math.log(probability(tokens[:i], tokens[i], order))
        for tokens in TESTED
        for i in range(1, len(tokens))
    ]
    value, n = model.perplexity(TESTED)  # of all tokens but the first
    assert n == len(logs) == 9
    assert value == pytest.approx(math.exp(-sum(logs) / len(logs)), rel=1e-12)
