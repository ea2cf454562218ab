"""Replaced sub-modules leave what a plain model patched by hand predicts, case by case."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import N_LAYERS, SINK_TOKENS, assert_near, plain_vectors
from handpatched import Part, hand_vectors, submodule_part
from judged_by_hand import assert_judged, judged_by_hand
from paper_a.submodules import (
    PLACES,
    SubmoduleCase,
    attention_rows,
    places_to_replace,
    precision_by_layer,
    rows_of_replacement,
    run_submodule_cases,
    submodule_alone,
    submodule_layers,
    submodule_positions,
)
from torch import Tensor

from matlens import InputError, LinearMap, MapSet, Readout, collect, make_examples
from matlens.activations.activations import Activations
from matlens.data.corpus import Corpus
from matlens.models.identity import ModelIdentity, Provenance

NAME = "llama-sinks"
FITTED = ("all", "not-first", "not-sink")
PARTS = {"mat_attn": ("attn",), "mat_ffn": ("ffn",), "mat_ln1_ln2": ("ln1", "ln2")}
Models = Callable[[str], Any]


def stand_in(part: str, layer: int, fitted: str, where: Any = "all") -> Part:
    """A random stand-in, another for every sub-module, layer and set."""
    seed = 100 * FITTED.index(fitted) + 10 * ("attn", "ffn", "ln1", "ln2").index(part) + layer
    random = submodule_part(part, layer, seed, bias=False, where=where)
    return random._replace(weight=4 * random.weight)  # so that other tokens are told of it


def stand_ins(model: Any, names: tuple[str, ...] = FITTED) -> dict[str, MapSet]:
    identity = ModelIdentity.from_model(model)
    sets = {}
    for fitted in names:
        parts = [
            stand_in(part, layer, fitted)
            for part, layer in itertools.product(("attn", "ffn", "ln1", "ln2"), range(N_LAYERS))
        ]
        provenance = Provenance(identity, details={"fitted": fitted})
        maps = (LinearMap(p.weight, None, p.source, p.target, provenance=provenance) for p in parts)
        sets[fitted] = MapSet(maps)
    return sets


def block_maps(model: Any) -> MapSet:
    identity = ModelIdentity.from_model(model)
    weights = torch.randn(N_LAYERS, 32, 32, generator=torch.Generator().manual_seed(7)) / 6
    provenance = Provenance(identity)
    return MapSet(
        LinearMap(weight, None, f"h.{layer}", f"h.{N_LAYERS}", provenance=provenance)
        for layer, weight in enumerate(weights)
    )


class Bench:
    """A model with sinks, its plain twin, and the stream on some sentences."""

    def __init__(self, small_model: Models, plain_model: Models, sentences: Corpus) -> None:
        self.model, self.plain = small_model(NAME), plain_model(NAME)
        self.readout = Readout(self.model)
        # Positions that are not the last, so that taking the last token's vector shows.
        examples = make_examples(self.model, sentences).head(24)
        self.data: Activations = collect(self.model, examples, progress=False)
        ends = zip(examples.offsets[:-1], examples.offsets[1:], strict=True)
        self.tokens = [examples.tokens[start:end].tolist() for start, end in ends]
        self.positions = examples.positions.tolist()
        self.truth = self.clean(N_LAYERS)

    def clean(self, layer: int) -> Tensor:
        rows = []
        for tokens, position in zip(self.tokens, self.positions, strict=True):
            vectors = plain_vectors(NAME, self.plain, torch.tensor(tokens))
            rows.append(vectors[f"h.{layer}"][0, position])
        return torch.stack(rows)

    def where(self, place: str) -> Any:
        """The places where something is replaced, told from the tokens alone."""
        return {
            "all": "all",
            "not-first": "not-first",
            "not-sink": tuple(tuple(token not in SINK_TOKENS for token in tokens) for tokens in self.tokens),
            "predicted": tuple(self.positions),
        }[place]

    def patched(self, method: str, fitted: str, place: str, layer: int, target: int | None = None) -> Tensor:
        """``h^L`` at the positions, by hand."""
        parts = [
            stand_in(part, of_layer, fitted, self.where(place))
            for part, of_layer in itertools.product(PARTS[method], range(layer, target or N_LAYERS))
        ]
        vectors = hand_vectors(NAME, self.plain, parts, self.tokens)
        return torch.stack(
            [each[f"h.{N_LAYERS}"][i] for each, i in zip(vectors, self.positions, strict=True)]
        )

    def judge(self, substitutes: dict[Any, Tensor]) -> dict[Any, list[float]]:
        return judged_by_hand(self.plain, self.truth, substitutes)


@pytest.fixture
def bench(small_model: Models, plain_model: Models, sentences: Corpus) -> Bench:
    return Bench(small_model, plain_model, sentences)


def test_there_are_sinks_and_other_tokens_before_what_is_predicted(bench: Bench) -> None:
    read = [tokens[: i + 1] for tokens, i in zip(bench.tokens, bench.positions, strict=True)]
    sinks = [token in SINK_TOKENS for tokens in read for token in tokens]
    assert 3 < sum(sinks) < len(sinks) / 2
    assert any(tokens[0] not in SINK_TOKENS and set(tokens) & set(SINK_TOKENS) for tokens in read)


def test_places_are_told_by_name(bench: Bench) -> None:
    places = places_to_replace(bench.model, bench.data.examples)
    assert tuple(places) == PLACES
    assert (places["all"], places["not-first"]) == ("all", "not-first")
    assert places["predicted"].tolist() == bench.positions  # type: ignore[union-attr]
    for row, expected in zip(places["not-sink"], bench.where("not-sink"), strict=True):
        assert row[: len(expected)].tolist() == list(expected)  # type: ignore[union-attr]


@pytest.mark.parametrize("replaced", ["mat_ffn", "mat_ln1_ln2"])
def test_each_case_has_its_own_stand_ins_at_its_own_tokens(replaced: str, bench: Bench) -> None:
    cases = [SubmoduleCase(replaced, *way) for way in itertools.product(FITTED, PLACES, (0, 2))]
    vectors = run_submodule_cases(bench.model, stand_ins(bench.model), bench.data.examples, cases)
    assert list(vectors) == cases
    expected = {case: bench.patched(*case) for case in cases}
    for case in cases:
        assert_near(vectors[case], expected[case], 1e-4)
    for a, b in itertools.combinations([case for case in cases if case.layer == 0], 2):
        distance = (expected[a] - expected[b]).abs().max() / expected[a].abs().max()
        assert float(distance) > 1e-3, "no two cases are alike"


def test_attention_that_is_not_run_is_attention_replaced_at_all_tokens(bench: Bench) -> None:
    rows = attention_rows(bench.readout, bench.model, stand_ins(bench.model)["all"], bench.data, range(3))
    expected = bench.judge(
        {("mat_attn", layer): bench.patched("mat_attn", "all", "all", layer) for layer in range(3)}
    )
    assert_judged(pd.DataFrame(rows), expected)


def test_the_figures_table_has_every_kind_from_every_layer(bench: Bench) -> None:
    maps = block_maps(bench.model)
    table = submodule_layers(
        bench.readout, bench.model, maps, stand_ins(bench.model, ("all", "not-sink")), bench.data,
        every=2, patched=9,
    )  # fmt: skip
    whole, some = {}, {}
    for layer in range(N_LAYERS):
        whole["mat", layer] = bench.clean(layer) @ maps[layer, N_LAYERS].weight.T
    for layer in (0, 2):
        whole["mat_attn", layer] = bench.patched("mat_attn", "all", "all", layer)
        for method in ("mat_ffn", "mat_ln1_ln2"):
            some[method, layer] = bench.patched(method, "all", "all", layer)[:9]
            without = bench.patched(method, "not-sink", "not-sink", layer)[:9]
            some[f"{method} without sinks", layer] = without
    assert_judged(table, bench.judge(whole))
    assert_judged(table, judged_by_hand(bench.plain, bench.truth[:9], some))
    assert set(zip(table["method"], table["layer"], strict=True)) == {*whole, *some}
    patched = table["method"].isin([method for method, _ in some])
    assert set(table[patched]["n"]) == {9}
    assert set(table[~patched]["n"]) == {24}
    assert set(table["experiment"]) == {"paper_a_fig10_submodules"}
    every_layer = submodule_layers(
        bench.readout, bench.model, maps, stand_ins(bench.model, ("all", "not-sink")), bench.data
    )
    assert set(every_layer["n"]) == {24}
    for method in ("mat_attn", "mat_ffn", "mat_ln1_ln2 without sinks"):
        assert sorted(set(every_layer[every_layer["method"] == method]["layer"])) == [0, 1, 2]


def test_the_table_of_positions_has_every_combination(bench: Bench) -> None:
    maps = block_maps(bench.model)
    sets = stand_ins(bench.model)
    table = submodule_positions(bench.readout, bench.model, maps, sets, bench.data, every=2)
    expected = {("mat", layer): bench.clean(layer) @ maps[layer, N_LAYERS].weight.T for layer in (0, 2)}
    for method, fitted, place in itertools.product(("mat_ffn", "mat_ln1_ln2"), FITTED, PLACES):
        for layer in (0, 2):
            name = f"{method}, fit {fitted}, replace {place}"
            expected[name, layer] = bench.patched(method, fitted, place, layer)
    assert_judged(table, bench.judge(expected))
    assert set(zip(table["method"], table["layer"], strict=True)) == set(expected)
    assert set(table["experiment"]) == {"submodule_positions"}
    wide = precision_by_layer(table)
    assert wide.index.tolist() == list(dict.fromkeys(method for method, _ in expected))
    for (method, layer), numbers in bench.judge(expected).items():
        assert wide.loc[method, layer] == pytest.approx(numbers[0])
    for replaced in ("mat_ffn", "mat_ln1_ln2"):
        part = rows_of_replacement(table, replaced)
        assert {method.split(",")[0] for method in part["method"]} == {"mat", replaced}
        assert len(part) == 4 * 2 * 13


def test_alone_only_one_block_is_replaced(bench: Bench) -> None:
    table = submodule_alone(
        bench.readout, bench.model, stand_ins(bench.model), bench.data, kinds=["mat_ffn", "mat_ln1_ln2"]
    )
    expected = {}
    for method, (fitted, name), block in itertools.product(
        ("mat_ffn", "mat_ln1_ln2"), {"all": "", "not-sink": " without sinks"}.items(), range(N_LAYERS)
    ):
        expected[f"{method}{name}", block] = bench.patched(method, fitted, fitted, block, block + 1)
    assert_judged(table, bench.judge(expected))
    assert set(zip(table["method"], table["layer"], strict=True)) == set(expected)
    assert set(table["experiment"]) == {"submodule_alone"}


def test_stand_ins_under_the_name_of_others_are_refused(bench: Bench) -> None:
    sets = stand_ins(bench.model)
    swapped = sets | {"all": sets["not-sink"], "not-sink": sets["all"]}
    for make, more in ((submodule_layers, ()), (submodule_positions, ())):
        with pytest.raises(InputError, match=r"under the name 'all' were fitted on 'not-sink'"):
            make(bench.readout, bench.model, block_maps(bench.model), swapped, bench.data, *more)
    lacking = {"all": sets["all"]}
    with pytest.raises(InputError, match=r"no replacements that were fitted on 'not-sink'"):
        submodule_layers(bench.readout, bench.model, block_maps(bench.model), lacking, bench.data)
    # Maps that do not say what they were fitted on are taken at their name.
    silent = {
        name: MapSet(
            replace(linear, provenance=Provenance(ModelIdentity.from_model(bench.model)))
            for linear in maps.values()
        )
        for name, maps in sets.items()
    }
    cases = [SubmoduleCase("mat_ffn", "all", "all", 2)]
    assert run_submodule_cases(bench.model, silent, bench.data.examples, cases)
