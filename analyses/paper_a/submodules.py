"""What is left of the prediction when one kind of sub-module is replaced (paper A, Figure 10).

``mat_attn`` needs no context, so it is computed for single vectors. ``mat_ffn`` and ``mat_ln1_ln2`` keep
attention, so the model is run; which tokens their replacements are fitted on, and at which tokens they stand,
decides over what is left in a model with attention sinks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from matlens.activations.activations import Activations
from matlens.activations.sinks import find_sinks
from matlens.data.examples import Examples
from matlens.errors import InputError
from matlens.io.tables import result_table
from matlens.lens.evaluation import evaluate, prediction_quality, prediction_rows
from matlens.linear.mapsets import MapSet
from matlens.models.identity import ModelIdentity
from matlens.models.layout import ModelLayout
from matlens.models.readout import Readout
from matlens.parallel import Bar
from matlens.patching.replacements import Where, mat_ffn, mat_ln1_ln2
from matlens.patching.submodules import attend_nowhere
from matlens.patching.variants import Variant, run_variants

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Place = Literal["all", "not-first", "not-sink", "predicted"]
PLACES: tuple[Place, ...] = ("all", "not-first", "not-sink", "predicted")
CONTEXTUAL = {"mat_ffn": mat_ffn, "mat_ln1_ln2": mat_ln1_ln2}  # replacements that keep attention
# Experiments.
SUBMODULE_LAYERS, SUBMODULE_POSITIONS = "paper_a_fig10_submodules", "submodule_positions"
SUBMODULE_ALONE = "submodule_alone"


class SubmoduleCase(NamedTuple):
    """One way of replacing a kind of sub-module from a layer on.

    Attributes
    ----------
    replaced
        ``mat_ffn`` or ``mat_ln1_ln2``.
    fitted
        Which tokens the replacements were fitted on: ``all``, ``not-first`` or ``not-sink``.
    place
        At which tokens they stand: one of `PLACES`.
    layer
        The layer from which on they do.
    target
        The layer up to which they do; by default the last one.
    """

    replaced: str
    fitted: str
    place: str
    layer: int
    target: int | None = None


def places_to_replace(model: TransformerBridge, examples: Examples) -> dict[str, Where]:
    """Each of `PLACES` as the ``where`` of a `Replacement`.

    All tokens, all but the first of each sentence, all but attention sinks, and the one token that is
    predicted from.
    """
    return {
        "all": "all",
        "not-first": "not-first",
        "not-sink": ~find_sinks(model, examples),
        "predicted": torch.from_numpy(examples.positions),
    }


def run_submodule_cases(
    model: TransformerBridge,
    maps: Mapping[str, MapSet],
    examples: Examples,
    cases: Iterable[SubmoduleCase],
    *,
    folder: str | Path | None = None,
) -> dict[SubmoduleCase, Float[Tensor, "n d_model"]]:
    """Replace sub-modules in every way; what each has for ``h^L`` at the drawn positions.

    ``maps`` are those of all sub-modules by the tokens that they were fitted on.
    """
    cases = list(cases)
    _check_fitted(maps, {case.fitted for case in cases})
    where, last = places_to_replace(model, examples), ModelLayout.from_model(model).n_layers
    variants = {}
    for case in cases:
        fits, replace = maps[case.fitted], CONTEXTUAL[case.replaced]
        target = last if case.target is None else case.target
        replacements = replace(fits, case.layer, target, where=where[case.place])
        variants[_name(case)] = Variant(case.layer, replacements)
    origin = {fitted: fits.provenance.to_json() for fitted, fits in maps.items()}
    vectors = run_variants(model, examples, variants, folder=folder, origin=origin)
    return {case: vectors[_name(case)] for case in cases}


def _judged_rows(
    readout: Readout,
    data: Activations,
    vectors: Mapping[SubmoduleCase, Float[Tensor, "n d_model"]],
    methods: Mapping[SubmoduleCase, str],
    experiment: str,
) -> list[dict[str, Any]]:
    truth = data[data.provenance.identity.n_layers]
    judged = evaluate(readout, truth, vectors)
    return [
        row
        for case, method in methods.items()
        for row in prediction_rows(experiment, data, method, case.layer, judged[case])
    ]


def _name(case: SubmoduleCase) -> str:
    span = f"{case.layer}" if case.target is None else f"{case.layer}-{case.target}"
    return f"{case.replaced} fit {case.fitted} at {case.place}.{span}"


def _check_fitted(maps: Mapping[str, MapSet], wanted: Iterable[str]) -> None:
    """Maps are those of their name: what is called ``not-sink`` was fitted on tokens that are no sinks."""
    for fitted in sorted({*wanted, *maps}):
        if fitted not in maps:
            raise InputError(f"There are no replacements that were fitted on {fitted!r}. Expected a set.")
        recorded = maps[fitted].provenance.details.get("fitted", fitted)
        if recorded != fitted:
            raise InputError(
                f"The replacements under the name {fitted!r} were fitted on {recorded!r}. Expected each set "
                "under the name of what it was fitted on."
            )


def attention_rows(
    readout: Readout,
    model: TransformerBridge,
    maps: MapSet,
    data: Activations,
    layers: Sequence[int],
    *,
    experiment: str = SUBMODULE_LAYERS,
) -> list[dict[str, Any]]:
    """Rows of a table for ``mat_attn`` from each layer to the last: no attention is run from there on."""
    readout.check_same(data.provenance)
    data.provenance.check_same(ModelIdentity.from_model(model), ours="the activations")
    last = data.provenance.identity.n_layers
    bar = Bar(layers, desc="mat_attn", unit="layer")
    vectors = {layer: attend_nowhere(model, maps, data[layer], layer, last) for layer in bar}
    judged = evaluate(readout, data[last], vectors)
    return [
        row for layer in layers for row in prediction_rows(experiment, data, "mat_attn", layer, judged[layer])
    ]


def submodule_layers(
    readout: Readout,
    model: TransformerBridge,
    maps: MapSet,
    stand_ins: Mapping[str, MapSet],
    validation: Activations,
    *,
    every: int = 1,
    patched: int | None = None,
    folder: str | Path | None = None,
) -> pd.DataFrame:
    """Each kind of sub-module replaced from every layer to the last, compared with ``mat`` (Figure 10).

    The methods are ``mat``, ``mat_attn``, ``mat_ffn`` and ``mat_ln1_ln2``, the last two once fitted and
    replaced at all tokens, as in the paper, and once, as ``... without sinks``, at all that are no sinks.

    The first and every further ``every`` layers are taken, and the last block. ``stand_ins`` are fitted on
    ``all`` tokens and on those that are ``not-sink``; the model is run on the first ``patched`` examples.
    """
    last = validation.provenance.identity.n_layers
    layers = sorted({*range(0, last, every), last - 1})
    cases = {}
    for replaced, layer in itertools.product(CONTEXTUAL, layers):
        cases[SubmoduleCase(replaced, "all", "all", layer)] = replaced
        cases[SubmoduleCase(replaced, "not-sink", "not-sink", layer)] = f"{replaced} without sinks"
    _check_fitted(stand_ins, ("all", "not-sink"))
    rows = attention_rows(readout, model, stand_ins["all"], validation, layers)
    data = validation if patched is None else validation.head(patched)
    vectors = run_submodule_cases(model, stand_ins, data.examples, cases, folder=folder)
    rows += _judged_rows(readout, data, vectors, cases, SUBMODULE_LAYERS)
    blocks = prediction_quality(readout, maps, validation, methods=["mat"])
    blocks = blocks[blocks["layer"] < last].assign(experiment=SUBMODULE_LAYERS)
    return pd.concat([blocks, pd.DataFrame(rows)], ignore_index=True)


def submodule_positions(
    readout: Readout,
    model: TransformerBridge,
    maps: MapSet,
    stand_ins: Mapping[str, MapSet],
    data: Activations,
    *,
    every: int = 8,
    folder: str | Path | None = None,
) -> pd.DataFrame:
    """``mat_ffn`` and ``mat_ln1_ln2`` by what they are fitted on and where they are used, and ``mat``.

    A method is called ``mat_ffn, fit not-sink, replace all``; all combinations of the sets of maps and
    `PLACES` are run, from every so many layers, from the third layer before the last and from the last block.
    """
    last = data.provenance.identity.n_layers
    layers = sorted({*range(0, last, every), last - 3, last - 1} & {*range(last)})
    cases = {
        SubmoduleCase(replaced, fitted, place, layer): f"{replaced}, fit {fitted}, replace {place}"
        for replaced, fitted, place, layer in itertools.product(CONTEXTUAL, stand_ins, PLACES, layers)
    }
    vectors = run_submodule_cases(model, stand_ins, data.examples, cases, folder=folder)
    rows = _judged_rows(readout, data, vectors, cases, SUBMODULE_POSITIONS)
    blocks = prediction_quality(readout, maps, data, methods=["mat"])
    blocks = blocks[blocks["layer"].isin(layers)].assign(experiment=SUBMODULE_POSITIONS)
    return pd.concat([blocks, pd.DataFrame(rows)], ignore_index=True)


def submodule_alone(
    readout: Readout,
    model: TransformerBridge,
    stand_ins: Mapping[str, MapSet],
    data: Activations,
    *,
    kinds: Sequence[str] = ("mat_ffn",),
    folder: str | Path | None = None,
) -> pd.DataFrame:
    """``mat_ffn``, or ``mat_ln1_ln2``, in one block at a time, all others as they are.

    The method ``mat_ffn`` is fitted and replaced at all tokens, ``mat_ffn without sinks`` at all that are no
    sinks; ``layer`` is the block.
    """
    readout.check_same(data.provenance)
    data.provenance.check_same(ModelIdentity.from_model(model), ours="the activations")
    blocks = range(data.provenance.identity.n_layers)
    names = {"all": "", "not-sink": " without sinks"}
    cases = {
        SubmoduleCase(replaced, fitted, fitted, block, block + 1): f"{replaced}{names[fitted]}"
        for replaced, fitted, block in itertools.product(kinds, names, blocks)
    }
    vectors = run_submodule_cases(model, stand_ins, data.examples, cases, folder=folder)
    return result_table(_judged_rows(readout, data, vectors, cases, SUBMODULE_ALONE))


def precision_by_layer(table: pd.DataFrame) -> pd.DataFrame:
    """Precision@1 of a table of results for people: a row for each method, a column for each layer."""
    best = table[(table["metric"] == "precision") & (table["k"] == 1)]
    return best.pivot_table(index="method", columns="layer", values="value", sort=False)


def rows_of_replacement(table: pd.DataFrame, replaced: str) -> pd.DataFrame:
    """The rows of one kind of sub-module in a table of `submodule_positions`, and those of ``mat``."""
    return table[table["method"].str.startswith(f"{replaced}, fit ") | (table["method"] == "mat")]
