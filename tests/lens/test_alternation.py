"""Schemes leave what a plain model predicts whose blocks are jumped over by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import N_LAYERS, plain_vectors
from handpatched import Part, hand_vectors, jump_part
from judged_by_hand import assert_judged, judged_by_hand
from sklearn.metrics import r2_score
from torch import Tensor

from matlens import InputError, LinearMap, MapSet, Readout, collect, make_examples
from matlens.corpora.corpus import Corpus
from matlens.lens.alternation import named_schemes, scheme_quality
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


def test_schemes_are_named_by_their_method(small_model: Callable[[str], Any], sentences: Corpus) -> None:
    model = small_model("llama")
    validation = collect(model, make_examples(model, sentences), progress=False)
    named = named_schemes(block_maps(model), validation)
    assert [method for method, _ in named].count("R2") == N_LAYERS + 1
    for method, scheme in named:
        assert method == "R2" or method == f"WRR, {scheme.segments[0][0]} first"
    with pytest.raises(InputError, match="lacks pairs of layers"):
        named_schemes(block_maps(model, PAIRS[1:]), validation)
