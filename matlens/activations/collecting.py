"""Collecting: one pass over the examples gives the vectors of every chosen site."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import HOLDS, Activations, Positions
from matlens.arithmetic import own_precision
from matlens.data.batches import Batch
from matlens.data.examples import Examples
from matlens.data.readers import check_model, check_own_tokens, reads_whole
from matlens.errors import InputError, PositiveInt, check_int, checked
from matlens.io.folders import read_config
from matlens.io.rows import Column, keep_rows
from matlens.models.changes import changes_of, unchanged
from matlens.models.hooks import EndOfPass, reading
from matlens.models.identity import ModelIdentity, Provenance, check_raw
from matlens.models.images import is_visual
from matlens.models.layout import ModelLayout
from matlens.models.sites import STREAM, Site, check_finite
from matlens.models.weights import WeightChecksum
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_CPU_TOKENS, _GPU_TOKENS = 2048, 32768  # padded tokens of a batch; more no longer helps


@dataclass(frozen=True)
class Rows:
    """Vectors of one batch.

    Attributes
    ----------
    index
        Row ``i`` of every site belongs to row ``index[i]`` of the collection.
    places
        Which token of its sentence each row is, from 0.
    vectors
        By site, in float32.
    provenance
        The model and the examples that they are of.
    divided
        Whether these are of one of several processes that each have batches of their own.
    """

    index: Int[np.ndarray, " n"]
    places: Int[np.ndarray, " n"]
    vectors: dict[str, Float[Tensor, "n d"]]
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    divided: bool = False


@checked
def collect(
    model: TransformerBridge,
    examples: Examples,
    sites: Iterable[Site | str | int] | None = None,
    *,
    positions: Positions = "drawn",
    folder: str | Path | None = None,
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> Activations:
    """Run the examples through the model once and keep the vectors of the chosen sites, in float32.

    Parameters
    ----------
    model, examples
        What is run on what.
    sites
        By default the stream, ``h.0 .. h.L``.
    positions
        ``"drawn"``: only at the positions of the examples. ``"all"``: at every token.
    folder
        Write there instead of keeping rows in memory. A killed run goes on where it was when it is
        called again, and gives the same bytes; a finished folder is opened without running anything,
        also if it holds more sites than are asked for.
    batch_tokens
        Most tokens in a batch, padding counted; by default what suits the device.
    progress
        Show a bar with the number of sentences a second.

    Raises
    ------
    InputError
        A vector is not finite, a site does not exist, the folder cannot be used, or the examples are none:
        texts and token ids have to be made into `Examples` first.
    """
    _check_arguments(model, examples, positions)
    layout = ModelLayout.from_model(model)
    wanted = _resolve_sites(layout, layout.stream if sites is None else sites)
    identity = ModelIdentity.from_model(model)
    batch_tokens = _batch_tokens(model, batch_tokens)
    columns = _columns(layout, folder, wanted)
    provenance = Provenance(
        identity, examples.provenance, examples.fingerprint, positions, hooks=hook_names(layout, columns)
    )
    request = {
        "provenance": provenance.to_json(),
        "batch_tokens": batch_tokens,
        "read": "sentence" if positions == "all" or reads_whole(model) else "sentence up to its position",
    }

    def turns(skip: int) -> Iterator[tuple[np.ndarray, dict[str, Tensor]] | None]:
        hooks = {str(site): layout.hook(site) for site in wanted}
        for rows in _stream(
            model, examples, hooks, positions, batch_tokens, progress, skip, provenance, True
        ):
            yield None if rows is None else (rows.index, rows.vectors)

    def batches(skip: int) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        return (turn for turn in turns(skip) if turn is not None)

    config, vectors = keep_rows(
        HOLDS, request, columns,
        examples.n_positions if positions == "drawn" else len(examples.tokens), batches,
        folder=folder, arrays=examples.arrays, only_unfinished=("batch_tokens", "read"), turns=turns,
    )  # fmt: skip
    return Activations(vectors, examples, positions, Provenance.from_config(config))


def _columns(layout: ModelLayout, folder: str | Path | None, wanted: Sequence[Site]) -> dict[str, Column]:
    """Columns of the wanted sites, or those of a finished folder that holds these and more."""
    columns = {str(site): Column(layout.width(site)) for site in wanted}
    with contextlib.suppress(InputError, KeyError):
        if folder is not None:
            there = read_config(folder, HOLDS)["request"]["columns"]
            if set(columns) <= set(there):
                return {name: Column(*column) for name, column in there.items()}
    return columns


def hook_names(layout: ModelLayout, columns: Iterable[str]) -> dict[str, list[str]]:
    """All names of the columns' hooks, but of the stream's, which are called the same in every model."""
    with contextlib.suppress(InputError):  # a folder of another model is refused later, in better words
        inside = [site for site in columns if Site.parse(site).kind != STREAM]
        return {site: layout.names(site) for site in inside}
    return {}


@checked
def stream(
    model: TransformerBridge,
    examples: Examples,
    sites: Sequence[Site | str | int],
    *,
    positions: Positions = "drawn",
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
    skip: int = 0,
    divided: bool = False,
) -> Iterator[Rows]:
    """Yield the vectors of the chosen sites batch by batch, keeping none.

    The model runs no further than the last wanted site and, if it is a decoder and only drawn positions
    are wanted, reads no sentence further than its position. ``skip`` leaves out the first batches.

    A model that is changed between two batches is refused. Edited weights are noticed before each batch on a
    CPU, and at the end on a GPU, where reading them all would take as long as a batch.

    Where several processes share the work, each is given
    all batches or, with ``divided``, its own, which `linear.fit_stream` takes with ``divided`` too.
    """
    turns = stream_turns(
        model, examples, sites, positions=positions, batch_tokens=batch_tokens, progress=progress, skip=skip,
        divided=divided,
    )  # fmt: skip
    yield from (rows for rows in turns if rows is not None)


def stream_turns(
    model: TransformerBridge,
    examples: Examples,
    sites: Sequence[Site | str | int],
    *,
    positions: Positions = "drawn",
    batch_tokens: int | None = None,
    progress: bool = True,
    skip: int = 0,
    divided: bool = True,
) -> Iterator[Rows | None]:
    """Yield what `stream` yields, turn by turn of the processes that divide the batches.

    Every process has as many turns; where no batch is left for it in the last one, there is ``None``.
    """
    _check_arguments(model, examples, positions)
    layout = ModelLayout.from_model(model)
    hooks = {str(site): layout.hook(site) for site in _resolve_sites(layout, sites)}
    batch_tokens, skip = _batch_tokens(model, batch_tokens), check_int(skip, "skip", min=0)
    provenance = Provenance(
        ModelIdentity.from_model(model), examples.provenance, examples.fingerprint, positions,
        hooks=hook_names(layout, hooks),
    )  # fmt: skip
    yield from _stream(model, examples, hooks, positions, batch_tokens, progress, skip, provenance, divided)


@torch.inference_mode()
def _stream(
    model: TransformerBridge,
    examples: Examples,
    hooks: Mapping[str, str],
    positions: Positions,
    batch_tokens: int,
    progress: bool,
    skip: int,
    provenance: Provenance,
    divided: bool,
) -> Iterator[Rows | None]:
    """Yield vectors by the sites' hooks, turn by turn; who asks has looked at the model.

    In each turn every process takes one batch, in the order of the processes; in the last turn there may be
    none left for some.
    """
    read = examples if positions == "all" or reads_whole(model) else examples.up_to_positions()
    batches = read.batches(batch_tokens)
    done = sum(len(batch.index) for batch in itertools.islice(batches, skip))
    rank, world_size = (parallel.rank(), parallel.world_size()) if divided else (0, 1)
    changes = provenance.identity.changes or ()
    weights = WeightChecksum([model.original_model], "the stream of its vectors")
    on_cpu = all(weight.device.type == "cpu" for weight in model.original_model.parameters())
    bar = Bar(total=len(examples), initial=done, unit="sentence", desc="collecting", disable=not progress)
    with bar:
        while turn := list(itertools.islice(batches, world_size)):
            rows = None
            if on_cpu:
                weights.check()
            if rank < len(turn):
                batch = turn[rank]
                at, index = _places(examples, batch, positions)
                with unchanged(model, changes), own_precision():
                    vectors = _run(model, batch, hooks, at)
                rows = Rows(index, at[1].numpy(), vectors, provenance, world_size > 1)
                for name, values in rows.vectors.items():
                    check_finite(values, name)
            yield rows
            bar.update(sum(len(batch.index) for batch in turn))
    weights.check()


def _check_arguments(model: Any, examples: Any, positions: Any) -> None:
    check_model(model)
    if not len(examples):
        raise InputError("There are no sentences in the examples. Expected at least one.")
    check_own_tokens(model, examples)
    if int(examples.lengths.max()) > model.cfg.n_ctx and not is_visual(model):
        raise InputError(
            f"A sentence of the examples has {examples.lengths.max()} tokens, and the model's context "
            f"{model.cfg.n_ctx}. Were they made for another model?"
        )
    check_raw(model)


def _resolve_sites(layout: ModelLayout, sites: Any) -> list[Site]:
    wanted = list(dict.fromkeys(map(layout.resolve, sites)))
    if not wanted:
        raise InputError("There are no sites to collect. Expected at least one, such as 'h.0'.")
    return wanted


def _batch_tokens(model: TransformerBridge, wanted: int | None) -> int:
    return default_batch_tokens(model) if wanted is None else check_int(wanted, "batch_tokens", min=1)


@checked
def default_batch_tokens(model: TransformerBridge) -> int:
    """Tokens of a batch that suit the device the model is on."""
    return _CPU_TOKENS if torch.device(model.cfg.device).type == "cpu" else _GPU_TOKENS


@torch.inference_mode()
def _run(
    model: TransformerBridge, batch: Batch, hooks: Mapping[str, str], at: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    places: dict[torch.device, tuple[Tensor, ...]] = {}  # blocks of a large model are on several devices
    seen: dict[str, Tensor] = {}
    hook_points = set(hooks.values())

    def keep(name: str) -> Any:
        def hook(value: Tensor, hook: Any) -> None:
            if value.device not in places:
                places[value.device] = tuple(index.to(value.device) for index in at)
            seen[name] = value[places[value.device]].flatten(1).float()  # of several heads, head after head
            # Not stop_at_layer: it runs the unembedding all the same.
            if len(seen) == len(hook_points):
                raise EndOfPass

        return hook

    with reading(model, [(name, keep(name)) for name in hook_points]):
        first, others = batch.inputs(model)
        model(first, **others, return_type=None)
    absent = [site for site, name in hooks.items() if name not in seen]
    if absent:
        unread = ModelLayout.from_model(model).hooks.get(hooks[absent[0]])
        if unread is not None and not unread.shape and not changes_of(model):
            raise InputError(
                f"{', '.join(absent)} cannot be collected of {model.cfg.architecture}: TransformerLens' hook "
                f"{unread.name} {unread.carries}."
            )
        raise InputError(
            f"The model did not come to {', '.join(absent)}. Is it patched, with a jump over these sites?"
        )
    vectors = [seen[name] for name in hooks.values()]
    if all(values.device.type == "cpu" for values in vectors):
        return dict(zip(hooks, vectors, strict=True))
    if len(places) > 1:
        vectors = [values.cpu() for values in vectors]
    flat = torch.cat([values.reshape(-1) for values in vectors]).cpu()  # one transfer from the device
    parts = flat.split([values.numel() for values in vectors])
    shapes = [values.shape for values in vectors]
    # Copies: a part of the whole would keep all of it for as long as it is kept itself.
    return {site: part.view(shape).clone() for site, part, shape in zip(hooks, parts, shapes, strict=True)}


def _places(
    examples: Examples, batch: Batch, positions: Positions
) -> tuple[tuple[Tensor, Tensor], np.ndarray]:
    """Where in the batch the wanted vectors are, and which rows of the collection they make."""
    if positions == "drawn":
        row_of, position, number = examples.rows_of(batch.index)
        return (torch.from_numpy(row_of), torch.from_numpy(position)), number
    row, column = batch.mask.nonzero(as_tuple=True)
    return (row, column), examples.offsets[batch.index][row.numpy()] + column.numpy()
