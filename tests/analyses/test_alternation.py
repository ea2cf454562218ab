"""Schemes leave what a plain model predicts whose blocks are jumped over by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import N_LAYERS, SINK_TOKENS, plain_vectors
from handpatched import Part, hand_vectors, jump_part
from judged_by_hand import assert_judged, judged_by_hand
from paper_a.alternation import named_schemes, scheme_quality
from sklearn.metrics import r2_score
from torch import Tensor

from matlens import InputError, LinearMap, MapSet, Readout, collect, make_examples
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


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_scheme_is_run_as_by_hand_and_the_best_by_r2_of_mat(
    name: str,
    small_model: Callable[[str], Any],
    plain_model: Callable[[str], Any],
    sentences: Corpus,
) -> None:
    model, plain = small_model(name), plain_model(name)
    maps, examples = block_maps(model), make_examples(model, sentences)
    validation = collect(model, examples, progress=False)
    table = scheme_quality(Readout(model), model, maps, validation, patched=17)
    tokens = [
        examples.tokens[start:end].tolist()
        for start, end in zip(examples.offsets[:-1], examples.offsets[1:], strict=True)
    ]

    def at_positions(jumps: list[tuple[int, int]], layer: int, n: int) -> Tensor:
        vectors = hand_vectors(name, plain, [part_of(*pair) for pair in jumps], tokens[:n])
        places = examples.positions[:n]
        return torch.stack([each[f"h.{layer}"][i] for each, i in zip(vectors, places, strict=True)])

    clean = [
        torch.stack(
            [
                plain_vectors(name, plain, torch.tensor(read))[f"h.{layer}"][0, i]
                for read, i in zip(tokens, examples.positions, strict=True)
            ]
        )
        for layer in range(N_LAYERS + 1)
    ]
    r2 = {
        (a, b): r2_score(clean[b].numpy(), part_of(a, b).apply(clean[a]).numpy()) for a, b in PAIRS
    }  # on all sentences, and not on the few that are patched

    def score(jumps: list[tuple[int, int]]) -> float:
        product = 1.0
        for pair in jumps:
            product *= r2[pair]
        return product

    expected: dict[tuple[str, int], Tensor] = {}
    for kept in range(N_LAYERS + 1):
        best = max((jumps for jumps in all_schemes() if blocks_run(jumps) == kept), key=score)
        rows = table[(table["method"] == "R2") & (table["layer"] == kept)]
        scheme = str(rows["scheme"].iloc[0])
        assert all(f"mat {a}-{b}" in scheme for a, b in best)
        assert scheme.count("mat") == len(best)
        expected["R2", kept] = at_positions(best, N_LAYERS, 17)
    # Round robin over three layers: whole periods of three layers alone.
    expected |= {
        ("WRR, blocks first", 1): at_positions([(1, 3)], N_LAYERS, 17),
        ("WRR, blocks first", 2): at_positions([(2, 3)], N_LAYERS, 17),
        ("WRR, mat first", 2): at_positions([(0, 1)], N_LAYERS, 17),
        ("WRR, mat first", 1): at_positions([(0, 2)], N_LAYERS, 17),
    }
    for layer in range(N_LAYERS + 1):
        h = clean[layer][:17]
        expected["id", layer] = h
        expected["mat", layer] = part_of(layer, N_LAYERS).apply(h) if layer < N_LAYERS else h
    assert_judged(table, judged_by_hand(plain, clean[-1][:17], expected))
    assert set(zip(table["method"], table["layer"], strict=True)) == set(expected)
    assert set(table["n"]) == {17}
    assert set(table["experiment"]) == {"paper_a_fig6_alternation"}
    assert table["scheme"].notna().tolist() == table["method"].str.contains("R").tolist()
    assert table.index.tolist() == list(range(len(table)))


def test_schemes_are_named_by_their_method(small_model: Callable[[str], Any], sentences: Corpus) -> None:
    model = small_model("llama")
    validation = collect(model, make_examples(model, sentences), progress=False)
    named = named_schemes(block_maps(model), validation)
    assert [method for method, _ in named].count("R2") == N_LAYERS + 1
    for method, scheme in named:
        assert method == "R2" or method == f"WRR, {scheme.segments[0][0]} first"
    with pytest.raises(InputError, match="lacks pairs of layers"):
        named_schemes(block_maps(model, PAIRS[1:]), validation)


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
