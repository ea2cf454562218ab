"""A prompt through the lenses of a model, with the sub-updates of each cell, as a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from matlens.activations.collecting import collect
from matlens.data.making import Prompt, choose_prompt, make_prompts, prompt_text
from matlens.errors import InputError, PositiveInt, checked
from matlens.ffn.projection import Projection
from matlens.ffn.updates import DOMINANT, Updates
from matlens.ffn.values import ValueVectors
from matlens.io.artifact import CONFIG, read_record
from matlens.lens.lens import Lens
from matlens.lens.trajectory import (
    read_cells,
    texts_of,
    token_number,
    tokens_of_interest,
)
from matlens.linear.mapsets import HOLDS as MAPS
from matlens.linear.mapsets import MapSet
from matlens.models.layout import ModelLayout
from matlens.models.sites import COEFFICIENTS, FFN_OUT, STREAM, Site
from matlens.models.tokens import Messages, visible
from matlens.parallel import Bar
from matlens.patching.contexts import skipped_layers
from matlens.plots.pages import LensCells, PromptPage, UpdateCells

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_BEST, _PROMOTED = 10, 5  # tokens of each cell, and of each sub-update
_READ = {
    "plain": "Value vectors are read as E v, without the final norm.",
    "head": "Value vectors are read through the linear parts of the model's head.",
}
_REPLACED = "Sub-updates are not shown: the outputs of FFNs are replaced or hooked."
_SKIPPED = "Layers that the changed model skips and sub-updates are not shown."
_WITHOUT_MAP = "Layers without a map in a lens are not shown."
_FOLLOWED_BYTES = 900_000  # before base64, for tokens that are followed through all cells
_MIN_FOLLOWED, _MAX_FOLLOWED = 6, 64


@checked
def explore(
    model: TransformerBridge,
    prompt: Prompt | None = None,
    lenses: Iterable[Lens | MapSet] = (),
    *,
    changed: AbstractContextManager | None = None,
    messages: Messages | None = None,
    pins: Sequence[str | int] = (),
    dominant: PositiveInt = DOMINANT,
    read: Literal["plain", "head"] = "plain",
    progress: bool = True,
) -> PromptPage:
    """An HTML page of a prompt: predictions of lenses at every layer, and sub-updates.

    Inside ``model.hooks``, `matlens.patched` or `matlens.ffn.controlled`, the page shows the changed model
    and names the changes. To see both models next to each other, pass the context as ``changed``.

    Parameters
    ----------
    prompt
        A text, or token ids that are read as they are; for masked-LM models with one mask in it.
    lenses
        Lenses next to ``id``, which is always included, such as ``Lens.fit(...).values()``; of a set of maps
        those to the last layer.
    changed
        A context such as `matlens.patched` or ``model.hooks``, in which the prompt is read a second time. The
        page shows both models, layer by layer.
    messages
        In place of a prompt, a conversation such as ``[{"role": "user", "content": "Hello"}]``, read through
        the tokenizer's chat template up to where the model answers.
    pins
        Tokens to follow through all cells: words of one token, or ids. By default the model's prediction.
    dominant
        Number of sub-updates of each FFN at each token.
    read
        How value vectors are read: ``E v`` as in paper B, or through the linear parts of the model's head.

    Examples
    --------
    >>> explore(model, "The weather today is", [lens], changed=matlens.patched(model, [steering]))
    """
    given = choose_prompt(prompt, messages)
    logit_lens = Lens.identity(model)
    named = _named([logit_lens, *(_sharing(logit_lens, lens) for lens in lenses)])
    named["id"] = named.pop("id")  # a page opens on the first
    readout, last = logit_lens.on_readout, logit_lens.n_layers
    k = min(_BEST, readout.d_vocab)
    asked = [token_number(readout, pin) for pin in pins]
    examples = make_prompts(model, [given])
    skipped = skipped_layers(model)
    layers = sorted(set.intersection(*(set(lens.layers) for lens in named.values())) - skipped | {last})
    has_values = COEFFICIENTS in ModelLayout.from_model(model).kinds and not skipped
    values = ValueVectors(model) if has_values else None
    kinds = [] if values is None else list(dict.fromkeys((COEFFICIENTS, FFN_OUT, values.output_kind)))
    sites = [Site(STREAM, layer) for layer in layers] + [Site(kind, b) for b in range(last) for kind in kinds]
    activations = collect(model, examples, sites, positions="all", progress=False)
    vectors = [activations[layer] for layer in layers]
    tokens = torch.from_numpy(examples.tokens).long()
    place = int(examples.positions[0])
    final = readout.logits(vectors[-1]).topk(k).indices.cpu()
    # The number of followed tokens keeps the page of a long prompt small.
    n_grids = len(named) * (1 if changed is None else 2)
    each = len(tokens) * (8 * len(layers) * n_grids + (last if has_values else 0) * (4 + dominant))
    n_followed = max(min(max(_FOLLOWED_BYTES // each, _MIN_FOLLOWED), _MAX_FOLLOWED), len(set(asked)))
    modified: dict[str, LensCells] = {}
    modification, predicted = "", final[place, :2].tolist()
    wanted = tokens_of_interest(final, tokens, place)
    if changed is not None:
        with changed:
            computed = [layer for layer in layers if layer not in skipped_layers(model)]
            others = collect(model, examples, computed, positions="all", progress=False)
        modification = others.provenance.modification
        their_final = readout.logits(others[last]).topk(k).indices.cpu()
        predicted = [predicted[0], int(their_final[place, 0])]
        wanted = [*predicted, *wanted, *tokens_of_interest(their_final, tokens, place)]
    candidates = dict.fromkeys([*asked, *wanted])
    followed = torch.tensor([*candidates][:n_followed])
    cells = {name: read_cells(lens, vectors, layers, followed=followed, k=k) for name, lens in named.items()}
    if changed is not None:
        vectors = [others[layer] for layer in computed]
        for name, lens in named.items():
            read_again = read_cells(lens, vectors, computed, followed=followed, k=k)
            modified[name] = _with_skipped(read_again, [layer in computed for layer in layers])
    updates: UpdateCells | None = None
    if values is not None:
        projection = (Projection.from_model if read == "plain" else Projection.through_head)(model)
        with suppress(InputError):  # where FFNs are replaced, their sub-updates do not add up to the outputs
            of_prompt = Updates(values, activations)
            updates = dominant_cells(of_prompt, projection, followed, dominant, progress=progress)
    grids = [*cells.values(), *modified.values()]
    shown = [tokens.numpy(), followed.numpy(), *(of_lens.ids for of_lens in grids)]
    texts = texts_of(readout.tokenizer, shown if updates is None else [*shown, updates.promoted])
    notes = [_READ[read], *([_WITHOUT_MAP] if len(layers) + len(skipped) <= last else [])]
    for name, lens in named.items():
        if origin := lens.provenance.transfer.get("transferred_from"):
            notes.append(f"The lens {name} is of {origin['model']}, which differs ({origin['differs']}).")
    notes += [_SKIPPED] if skipped else [_REPLACED] if values is not None and updates is None else []
    return PromptPage(
        activations.provenance.identity.name, visible(prompt_text(model, given, examples.tokens)),
        tokens.numpy(), layers, cells,
        followed.numpy(), texts, updates, list(dict.fromkeys(asked or predicted)), notes,
        activations.provenance.modification, modified, modification,
    )  # fmt: skip


@checked
def load_lens(folder: str | Path) -> Lens:
    """A lens from its folder, or from the maps to the last layer in a folder of maps."""
    folder = Path(folder)
    holds = None
    with suppress(OSError):
        holds = read_record(folder / CONFIG)["holds"]
    return Lens.from_maps(MapSet.load(folder)) if holds == MAPS else Lens.load(folder)


def _with_skipped(cells: LensCells, computed: Sequence[bool]) -> LensCells:
    """Cells with a row for each layer: NaN, and 0 as ranks and tokens, where the model computes none."""

    def spread(values: np.ndarray) -> np.ndarray:
        rows = np.full((len(computed), *values.shape[1:]), np.nan if values.dtype.kind == "f" else 0)
        rows[[*computed]] = values
        return rows.astype(values.dtype)

    return LensCells(**{name: spread(values) for name, values in vars(cells).items()})


def _sharing(logit_lens: Lens, lens: Lens | MapSet) -> Lens:
    """A lens with the readout of the logit lens: another one would take seconds."""
    bare = Lens.from_maps(lens) if isinstance(lens, MapSet) else lens
    model = logit_lens.provenance.identity
    bare.provenance.check_same(model, ours="the lens", theirs="the model")
    return replace(bare, readout=logit_lens.readout, model=logit_lens.model)


def _named(lenses: Sequence[Lens]) -> dict[str, Lens]:
    """Lenses by their methods, numbered if equal."""
    named: dict[str, Lens] = {}
    for lens in lenses:
        name, n = lens.method, 1
        while name in named:
            n += 1
            name = f"{lens.method} {n}"
        named[name] = lens
    return named


@torch.no_grad()
def dominant_cells(
    updates: Updates, projection: Projection, followed: Int[Tensor, " followed"], k: int, *, progress: bool
) -> UpdateCells:
    """Sub-updates of all layers with their effects on the followed tokens."""
    values, words = updates.values, projection.of_tokens(followed)
    parts: dict[str, list[np.ndarray]] = {}
    n_ways = 0
    for layer in Bar(range(values.n_layers), desc="sub-updates", unit="layer", disable=not progress):
        vectors, m, scale = values.layer_view(layer), updates.coefficients(layer), updates.scales(layer)
        index = updates.dominant(layer, k)
        coefficient = m.gather(1, index)
        code, way = torch.unique(2 * index + (coefficient < 0), return_inverse=True)
        sign = 1 - 2 * (code % 2)
        pointing = sign[:, None] * vectors[code // 2]
        of_layer = {
            "way": way + n_ways,
            "coefficient": coefficient,
            "share": updates.shares(layer).gather(1, index),
            "scale": scale,
            "rest": scale[:, None] * (m.scatter(1, index, 0) @ words.scores(vectors).to(m.device)),
            "bias": words.scores(values.bias(layer)),
            "layer": torch.full_like(code, layer),
            "index": code // 2,
            "negative": code % 2,
            "promoted": projection.top(pointing, _PROMOTED).ids,
            "static": words.scores(pointing),
        }
        n_ways += len(code)
        for name, tensors in of_layer.items():
            parts.setdefault(name, []).append(tensors.cpu().numpy())
    by_cell = {
        name: np.stack(parts.pop(name)) for name in ("way", "coefficient", "share", "scale", "rest", "bias")
    }
    return UpdateCells(
        **by_cell, **{name: np.concatenate(p) for name, p in parts.items()}, d_mlp=values.d_mlp
    )
