"""A prompt through the lenses of a model, with the sub-updates that made each cell, as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Int

from matlens.activations.collecting import collect
from matlens.data.prompts import make_prompts
from matlens.errors import PositiveInt, check_choice, check_int, checked
from matlens.explorer.dominant import dominant_cells
from matlens.ffn.norms import FFN_OUT
from matlens.ffn.projection import Projection
from matlens.ffn.updates import DOMINANT, Updates
from matlens.ffn.values import ValueVectors
from matlens.io.artifact import CONFIG, read_record
from matlens.io.files import PAGE_SUFFIXES, check_file_name, system_errors, write_text
from matlens.lens.lens import Lens
from matlens.lens.trajectory import read_cells, texts_of, tokens_of_interest
from matlens.linear.mapsets import HOLDS as MAPS
from matlens.linear.mapsets import MapSet
from matlens.models.layout import ModelLayout
from matlens.models.sites import COEFFICIENTS, STREAM, Site
from matlens.models.tokens import visible, word_token
from matlens.plots.page_assembly import framed
from matlens.plots.page_trajectory import LensCells, UpdateCells, trajectory_page

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_ROOM = 900_000  # bytes, before base64, that tokens which are followed through all cells may take
_FEWEST, _MOST = 6, 64  # tokens that are followed


@checked
@dataclass(frozen=True, eq=False)
class Exploration:
    """A prompt through lenses, with the sub-updates of every cell; a notebook shows its page.

    Attributes
    ----------
    model, prompt
        What was run on what, as people read it.
    tokens
        The prompt's tokens.
    layers
        Layers that all lenses read, ascending; the last is the model's own prediction.
    lenses
        What each lens reads in every cell, by its name: those that were given, then ``id``. The page opens
        on the first.
    followed
        Tokens whose ranks are known in every cell: those asked for, what the model predicts at the tokens of
        the prompt, and the prompt's own.
    texts
        How people read each token that comes up.
    updates
        The sub-updates of every FFN at every token; ``None`` where the model has no known value vectors.
    pinned
        Tokens that the page begins with.
    notes
        Sentences about how it was made.
    """

    model: str
    prompt: str
    tokens: Int[np.ndarray, " n"]
    layers: tuple[int, ...]
    lenses: dict[str, LensCells]
    followed: Int[np.ndarray, " followed"]
    texts: dict[int, str]
    updates: UpdateCells | None
    pinned: tuple[int, ...]
    notes: tuple[str, ...]

    def to_html(self) -> str:
        """The page: one HTML text that needs nothing from elsewhere."""
        return trajectory_page(
            model=self.model, prompt=self.prompt, tokens=self.tokens, layers=self.layers, lenses=self.lenses,
            followed=self.followed, texts=self.texts, updates=self.updates, pinned=self.pinned,
            notes=self.notes,
        )  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Write the page to a ``.html`` or ``.htm`` file; an existing one is replaced.

        Raises
        ------
        InputError
            The name has another suffix, or the file cannot be written there.
        """
        path = Path(path)
        check_file_name(path, suffixes=PAGE_SUFFIXES)
        with system_errors(path):
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
            write_text(path, self.to_html())
        return path

    def _repr_html_(self) -> str:
        return framed(self.to_html())


@checked
def explore(
    model: TransformerBridge,
    prompt: str,
    lenses: Sequence[Lens | MapSet] = (),
    *,
    pins: Sequence[str | int] = (),
    k: int = 10,
    dominant: PositiveInt = DOMINANT,
    read: Literal["plain", "head"] = "plain",
    proceed: Callable[[], None] | None = None,
    progress: bool = True,
) -> Exploration:
    """Look at a prompt layer by layer: what lenses read everywhere, and the sub-updates that wrote it.

    Parameters
    ----------
    model
        A model, as `matlens.load` gives it.
    prompt
        A text; for masked-LM models with one mask in it.
    lenses
        Lenses of the model beside ``id``, which is always there; of a set of maps those onto the last layer.
    pins
        Tokens to follow through all cells and to begin with: words that are one token each, or numbers. By
        default what the model predicts behind the prompt.
    k
        How many of the most probable tokens are kept in each cell.
    dominant
        How many sub-updates of each FFN are kept at each token.
    read
        How value vectors are read: ``"plain"``, ``E v`` as in paper B, or ``"head"``, through the linear
        parts of the model's head.
    proceed
        Called between two steps; what it raises ends the work.
    progress
        Whether to show bars.

    Raises
    ------
    InputError
        The prompt cannot be read, a pin is no token, a lens is of another model, or ``k`` or ``dominant`` is
        less than 1 or more than there are.
    """
    check_choice(read, ("plain", "head"), "read")
    go_on = proceed or _nothing
    logit_lens = Lens.identity(model)
    named = _named([logit_lens, *(_beside(logit_lens, lens) for lens in lenses)])
    readout = named["id"].on_readout
    check_int(k, "k", min=1, max=readout.d_vocab)
    asked = [_token_id(pin, readout.tokenizer, readout.d_vocab) for pin in pins]
    examples = make_prompts(model, [prompt])
    last = named["id"].n_layers
    layers = sorted(set.intersection(*(set(lens.layers) for lens in named.values())) | {last})
    has_values = COEFFICIENTS in ModelLayout.from_model(model).kinds
    values = ValueVectors(model) if has_values else None
    kinds = list(dict.fromkeys((COEFFICIENTS, FFN_OUT, values.output_kind))) if values is not None else []
    sites = [Site(STREAM, layer) for layer in layers] + [Site(kind, b) for b in range(last) for kind in kinds]
    activations = collect(model, examples, sites, positions="all", progress=False)
    vectors = [activations[layer] for layer in layers]
    tokens = torch.from_numpy(examples.tokens).long()
    place = int(examples.positions[0])
    final = readout.logits(vectors[-1]).topk(k).indices.cpu()
    room = _followed_tokens(len(tokens), len(layers), len(named), last if has_values else 0, dominant)
    wanted = [*asked, *tokens_of_interest(final, tokens, place)]
    followed = torch.tensor([*dict.fromkeys(wanted)][: max(room, len(set(asked)))])
    cells: dict[str, LensCells] = {}
    for name, lens in [*list(named.items())[1:], ("id", named["id"])]:  # a page opens on the first
        go_on()
        cells[name] = read_cells(lens.logits, vectors, layers, followed=followed, k=k)
    updates: UpdateCells | None = None
    go_on()
    if values is not None:
        make = Projection.from_model if read == "plain" else Projection.through_head
        updates = dominant_cells(
            Updates(values, activations), make(model), followed, k=dominant, proceed=proceed,
            progress=progress,
        )  # fmt: skip
    shown = [tokens.numpy(), followed.numpy(), *(of_lens.ids for of_lens in cells.values())]
    texts = texts_of(readout.tokenizer, shown if updates is None else [*shown, updates.promoted])
    pinned = tuple(dict.fromkeys(asked)) or tuple(final[place, :2].tolist())
    return Exploration(
        activations.provenance.identity.name, visible(prompt), tokens.numpy(), tuple(layers), cells,
        followed.numpy(), texts, updates, pinned, _notes(read, last, layers),
    )  # fmt: skip


@checked
def load_lens(folder: str | Path) -> Lens:
    """A lens from its folder, or from a folder of maps, of which those onto the last layer are one.

    Raises
    ------
    InputError
        The folder holds neither, or is damaged.
    """
    folder = Path(folder)
    holds = None
    with suppress(OSError):
        holds = read_record(folder / CONFIG)["holds"]
    return Lens.from_maps(MapSet.load(folder)) if holds == MAPS else Lens.load(folder)


def _nothing() -> None:
    """Between two steps of what nobody calls off."""


def _beside(logit_lens: Lens, lens: Lens | MapSet) -> Lens:
    """A lens on the model of the logit lens, whose read-out it shares: making one takes seconds."""
    bare = Lens.from_maps(lens) if isinstance(lens, MapSet) else lens
    bare.provenance.check_same(logit_lens.provenance.identity, ours="the lens", theirs="the model")
    return replace(bare, readout=logit_lens.readout, model=logit_lens.model)


def _named(lenses: Sequence[Lens]) -> dict[str, Lens]:
    """Lenses by their methods; where two have the same one they are numbered."""
    named: dict[str, Lens] = {}
    for lens in lenses:
        name, n = lens.method, 1
        while name in named:
            n += 1
            name = f"{lens.method} {n}"
        named[name] = lens
    return named


def _token_id(pin: str | int, tokenizer: object, d_vocab: int) -> int:
    if isinstance(pin, str):
        return word_token(tokenizer, pin)
    return check_int(pin, "A pinned token", min=0, max=d_vocab - 1)


def _followed_tokens(n_tokens: int, n_layers: int, n_lenses: int, n_ffns: int, dominant: int) -> int:
    """How many tokens may be followed, so that the page of a long prompt stays one that can be sent."""
    each = n_tokens * (8 * n_layers * n_lenses + n_ffns * (4 + dominant))
    return min(max(_ROOM // each, _FEWEST), _MOST)


def _notes(read: str, last: int, layers: Sequence[int]) -> tuple[str, ...]:
    notes = [
        "Value vectors are read as E v, without the final norm."
        if read == "plain"
        else "Value vectors are read through the linear parts of the model's head."
    ]
    if len(layers) <= last:
        notes.append("Layers that a lens has no map of are left out.")
    return tuple(notes)
