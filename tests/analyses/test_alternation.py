"""Schemes leave what a plain model predicts whose blocks are jumped over by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from conftest import N_LAYERS, SINK_TOKENS
from handpatched import Part, hand_vectors, jump_part
from independent import assert_judged, judged_by_hand
from paper_a_fig6_alternation import scheme_quality
from sklearn.metrics import r2_score
from torch import Tensor

from matlens import LinearMap, MapSet, Readout, collect, make_examples
from matlens.data.corpus import Corpus
from matlens.models.identity import ModelIdentity, Provenance

PAIRS = [(a, b) for a in range(N_LAYERS) for b in range(a + 1, N_LAYERS + 1)]


def part_of(a: int, b: int) -> Part:
    """Random, but near to leaving a vector as it is: so are r2 of all signs."""
    random = jump_part(a, b, 10 * a + b, bias=False)
    return random._replace(weight=0.9 * torch.eye(32) + 0.25 * (b - a) * random.weight)


def block_maps(model: Any, pairs: list[tuple[int, int]] = PAIRS) -> MapSet:
    provenance = Provenance(ModelIdentity.from_model(model))
    parts = [part_of(*pair) for pair in pairs]
    return MapSet(LinearMap(p.weight, None, p.source, p.target, provenance=provenance) for p in parts)


def all_schemes() -> list[list[tuple[int, int]]]:
    """The jumps of every way through the layers in which no two segments of one kind touch."""
    ways: list[list[tuple[int, int]]] = []
    for n in range(N_LAYERS):
        for inner in itertools.combinations(range(1, N_LAYERS), n):
            segments = list(itertools.pairwise((0, *inner, N_LAYERS)))
            ways += [segments[0::2], segments[1::2]]
    return ways


def blocks_run(jumps: list[tuple[int, int]]) -> int:
    return N_LAYERS - sum(b - a for a, b in jumps)


def test_schemes_without_sinks_are_scored_and_run_without_them(
    small_model: Callable[[str], Any], plain_model: Callable[[str], Any], sentences: Corpus
) -> None:
    name = "llama-sinks"
    model, plain = small_model(name), plain_model(name)
    examples = make_examples(model, sentences, seed=1)
    validation = collect(model, examples, progress=False)
    kept = ~torch.isin(torch.from_numpy(examples.tokens[examples.offsets[:-1] + examples.positions]),
                       torch.tensor(SINK_TOKENS))  # fmt: skip
    assert 2 < int(kept.sum()) < len(kept)
    others = {pair: 1.1 * part_of(*pair).weight.T for pair in PAIRS}  # maps of another fit
    provenance = Provenance(ModelIdentity.from_model(model))
    without = MapSet(LinearMap(w, None, f"h.{a}", f"h.{b}", provenance) for (a, b), w in others.items())
    maps = block_maps(model)
    table = scheme_quality(Readout(model), model, maps, validation, without_sinks=without, patched=9)

    def best(weights: dict[tuple[int, int], Tensor], n_blocks: int) -> list[tuple[int, int]]:
        scores = {
            (a, b): r2_score(validation[b][kept].numpy(), (validation[a][kept] @ w.T).numpy())
            for (a, b), w in weights.items()
        }
        ways = (jumps for jumps in all_schemes() if blocks_run(jumps) == n_blocks)
        return max(ways, key=lambda jumps: math.prod(scores[pair] for pair in jumps))

    for method, weights in (
        ("R2, scored without sinks", {pair: part_of(*pair).weight for pair in PAIRS}),
        ("R2 without sinks", others),
    ):
        expected = {}
        for n_blocks in range(N_LAYERS + 1):
            jumps = best(weights, n_blocks)
            rows = table[(table["method"] == method) & (table["layer"] == n_blocks)]
            assert str(rows["scheme"].iloc[0]).count("mat") == len(jumps)
            at_sinks = method == "R2, scored without sinks"
            expected[method, n_blocks] = torch.stack(
                [jumped_by_hand(plain, weights, jumps, examples, s, at_sinks=at_sinks) for s in range(9)]
            )
        assert_judged(table, judged_by_hand(plain, validation[N_LAYERS][:9], expected), nats=1e-3)
    assert set(table[table["method"] == "R2 without sinks"]["layer"]) == set(range(N_LAYERS + 1))


def jumped_by_hand(
    plain: Any, weights: Any, jumps: list[tuple[int, int]], examples: Any, sentence: int, *, at_sinks: bool
) -> Tensor:
    """``h^L`` at a sentence's position; tokens that are no sinks, or all, jump, and the others are run."""
    tokens = examples.tokens[examples.offsets[sentence] : examples.offsets[sentence + 1]].tolist()
    where = (tuple(at_sinks or token not in SINK_TOKENS for token in tokens),)
    parts = [Part(f"h.{a}", f"h.{b}", weights[a, b], where=where) for a, b in jumps]
    vectors = hand_vectors("llama-sinks", plain, parts, [tokens])[0]
    return vectors[f"h.{N_LAYERS}"][examples.positions[sentence]].float()
