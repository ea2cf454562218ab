"""Run many patched variants of a model, sharing the blocks that are not replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from matlens.activations.collecting import check_unchanged, default_batch_tokens
from matlens.data.examples import Batch, Examples
from matlens.data.readers import batch_groups, check_own_tokens, reads_whole
from matlens.errors import InputError, PositiveInt, checked
from matlens.io.rows import Column, writing_rows
from matlens.models.hooks import EndOfPass, reading, run_of_functions
from matlens.models.identity import ModelIdentity, Provenance, check_raw
from matlens.models.layout import ModelLayout
from matlens.models.sites import STREAM, Site
from matlens.parallel import Bar
from matlens.patching.contexts import apply_replacements
from matlens.patching.replacements import Replacement, describe_replacement, resolve_replacements

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_HOLDS = "variants"


@checked
@dataclass(frozen=True, eq=False)
class Variant:
    """A patched variant: original up to layer ``first``, then with replacements.

    A ``where`` with positions has one for each example.
    """

    first: int
    replacements: Sequence[Replacement]


@checked
@torch.no_grad()
def run_variants(
    model: TransformerBridge,
    examples: Examples,
    variants: Mapping[str, Variant],
    *,
    folder: str | Path | None = None,
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> Mapping[str, Float[Tensor, "n d_model"]]:
    """Run every variant; returns its last-layer vectors at the examples' positions.

    Each batch runs unpatched once, and a variant starts from there at its own first layer. Vectors can
    overflow; `matlens.lens.evaluate` counts vectors that are not finite as wrong. Decoders read a sentence no
    further than its last position. Vectors are stored in ``folder``, where an interrupted run resumes, by
    default in memory.
    """
    layout = ModelLayout.from_model(model)
    check_raw(model)
    check_own_tokens(model, examples)
    taken = {*examples.arrays} & {*variants}
    if not variants or taken:
        raise InputError(f"variants must have names other than {', '.join(examples.arrays)}.")
    provenance = Provenance.from_model(model, data=examples.provenance, examples=examples.fingerprint)
    ready = {
        name: _resolve_variant(model, provenance.identity, examples, name, variant)
        for name, variant in variants.items()
    }
    read = examples if reads_whole(model, examples) else examples.up_to_positions()
    width, longest = len(variants) * layout.d_model, int(examples.lengths.max())
    budget = batch_tokens or default_batch_tokens(model, width, longest=longest, folder=folder)

    sentences = read.batch_indices(budget, batch_groups(model, read))
    counts = np.bincount(examples.sentences, minlength=len(examples))
    request = {
        "provenance": provenance.to_json(),
        "run_of_functions": run_of_functions(model),
        "replaced": {
            name: [describe_replacement(replacement) for replacement in variant.replacements]
            for name, variant in ready.items()
        },
        "batch_tokens": budget,
    }
    columns = dict.fromkeys(variants, Column(layout.d_model))
    with (
        writing_rows(
            _HOLDS, request, columns, [int(counts[index].sum()) for index in sentences],
            folder=folder, arrays=examples.arrays,
        ) as writer,
        Bar(total=len(examples), unit="sentence", desc="patched runs", disable=not progress) as bar,
    ):  # fmt: skip
        bar.update(len(examples) - sum(len(sentences[number]) for number in writer.missing))
        for number in writer.missing:
            batch = read.batch(sentences[number])
            row, position, rows = examples.rows_of(batch.index)
            places = torch.from_numpy(row), torch.from_numpy(position)
            vectors = _run(model, batch, ready, places)
            writer.add(rows, vectors)
            bar.update(len(batch.index))
        check_unchanged(model, provenance)
    return writer.rows


def _resolve_variant(
    model: TransformerBridge, identity: ModelIdentity, examples: Examples, name: str, variant: Variant
) -> Variant:
    layout = ModelLayout.from_model(model)
    first = layout.resolve(Site(STREAM, variant.first)).layer
    start, end = layout.order(Site(STREAM, first)) if first else -1, layout.order(layout.stream[-1])
    replacements = resolve_replacements(model, variant.replacements, identity=identity)
    for replacement in replacements:
        if layout.order(replacement.target) > end:
            raise InputError(f"{replacement} in {name} must not be after {layout.stream[-1]}.")
        if layout.order(replacement.source) < start:
            raise InputError(
                f"{replacement} in {name} must be after layer {first}, up to which it runs unpatched."
            )
        where = replacement.where
        if not isinstance(where, str) and len(where) != len(examples):
            raise InputError(
                f"'where' of {replacement} in {name} must have {len(examples)} rows, one per example, got "
                f"{len(where)}."
            )
    return replace(variant, first=first, replacements=replacements)


def _run(
    model: TransformerBridge, batch: Batch, variants: Mapping[str, Variant], places: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    last, index = ModelLayout.from_model(model).n_layers, torch.from_numpy(batch.index)
    inputs = batch.inputs(model)
    clean = run_to_layers(model, inputs, [], sorted({variant.first for variant in variants.values()} - {0}))
    final = {}
    for name, variant in variants.items():
        replacements = [_for_rows(replacement, index) for replacement in variant.replacements]
        if variant.first:
            replacements.insert(0, _start_from(clean[variant.first], variant.first))
        h = run_to_layers(model, inputs, replacements, [last])[last]
        row, column = (place.to(h.device) for place in places)
        final[name] = h[row, column].float()
    device = h.device  # skipped blocks leave vectors on their device
    gathered = torch.stack([vectors.to(device) for vectors in final.values()]).cpu()  # one transfer
    return dict(zip(final, gathered, strict=True))


def _for_rows(replacement: Replacement, index: Tensor) -> Replacement:
    where = replacement.where
    return replacement if isinstance(where, str) else replace(replacement, where=where[index])


def _start_from(h: Tensor, layer: int) -> Replacement:
    """Replace the blocks before a layer by their outputs."""
    return Replacement(lambda _: h, Site(STREAM, 0), Site(STREAM, layer))


def run_to_layers(
    model: TransformerBridge,
    inputs: tuple[Tensor, Mapping[str, Any]],
    replacements: Sequence[Replacement],
    layers: Sequence[int],
) -> dict[int, Tensor]:
    """Residual streams of a batch with replacements; nothing runs after the last of the layers."""
    if not layers:
        return {}
    layout = ModelLayout.from_model(model)
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(value: Tensor, hook: Any) -> None:
            seen[layer] = value
            if layer == layers[-1]:
                raise EndOfPass

        return hook

    with apply_replacements(model, replacements):
        hooks = [(layout.hook(Site(STREAM, layer)), keep(layer)) for layer in layers]
        with reading(model, hooks):
            model(inputs[0], **inputs[1], return_type=None)
    return seen
