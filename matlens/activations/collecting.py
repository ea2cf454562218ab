"""Collecting: one pass over the examples gives the vectors of every chosen site."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import HOLDS, Activations, Positions, Rows
from matlens.arithmetic import own_precision
from matlens.data.examples import Batch, Examples
from matlens.data.readers import check_own_tokens, reads_whole
from matlens.errors import InputError, PositiveInt, checked
from matlens.io.artifact import Artifact
from matlens.io.rows import Column, writing_rows
from matlens.models.changes import EndOfPass, changes_of, reading, unchanged
from matlens.models.identity import ModelIdentity, Provenance, check_raw
from matlens.models.inputs import is_visual
from matlens.models.layout import ModelLayout
from matlens.models.sites import STREAM, Site
from matlens.models.weights import WeightChecksum
from matlens.numerics import check_finite
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_CPU_TOKENS, _GPU_TOKENS = 2048, 32768  # padded tokens of a batch; more no longer helps


@checked
def collect(
    model: TransformerBridge,
    examples: Examples,
    sites: Iterable[Site | str | int] | None = None,
    *,
    positions: Positions = "sampled",
    folder: str | Path | None = None,
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> Activations:
    """Run the examples once and store the vectors of the chosen sites in float32.

    Parameters
    ----------
    sites
        By default the residual stream, ``h.0 .. h.L``.
    positions
        ``"sampled"``: only at the positions of the examples. ``"all"``: at every token.
    folder
        Write there instead of storing rows in memory. A killed run resumes when it is called again, with the
        same bytes; a finished folder is opened without running anything, also if it has more sites.
    batch_tokens
        Maximum number of tokens in a batch, padding included; by default what suits the device.

    Raises
    ------
    InputError
        A vector is not finite, a site does not exist, or the folder belongs to another job.
    """
    _check_arguments(model, examples)
    layout = ModelLayout.from_model(model)
    requested = _resolve_sites(layout, layout.stream if sites is None else sites)
    batch_tokens = batch_tokens or default_batch_tokens(model)
    columns = _columns(layout, folder, requested)
    provenance = provenance_of(model, layout, examples, positions, columns)
    request = {
        "provenance": provenance.to_json(),
        "batch_tokens": batch_tokens,
        "read": "sentence" if positions == "all" or reads_whole(model) else "sentence up to its position",
    }
    batches = _Batches(model, examples, positions, batch_tokens)
    hooks = {str(site): layout.hook(site) for site in requested}
    with writing_rows(
        HOLDS, request, columns, batches.counts,
        folder=folder, arrays=examples.arrays,
    ) as writer:  # fmt: skip
        for batch in _stream(model, batches, writer.missing, hooks, progress, provenance):
            writer.add(batch.index, batch.vectors)
    return Activations(writer.rows, examples, positions, Provenance.from_config(writer.config))


def _columns(layout: ModelLayout, folder: str | Path | None, requested: Sequence[Site]) -> dict[str, Column]:
    """Columns of the sites, or those of a finished folder that has these and more."""
    columns = {str(site): Column(layout.width(site)) for site in requested}
    with contextlib.suppress(InputError, KeyError):
        if folder is not None:
            stored = Artifact.open(folder, HOLDS).request["columns"]
            if set(columns) <= set(stored):
                return {name: Column(*column) for name, column in stored.items()}
    return columns


def provenance_of(
    model: TransformerBridge,
    layout: ModelLayout,
    examples: Examples,
    positions: Positions,
    sites: Iterable[str],
) -> Provenance:
    """Where vectors of these sites come from, with all names of their hooks.

    Hooks of the residual stream have the same names in every model.
    """
    hooks: dict[str, list[str]] = {}
    with contextlib.suppress(InputError):  # a folder of another model is refused later, with a better message
        hooks = {site: layout.names(site) for site in sites if Site.parse(site).kind != STREAM}
    return Provenance(
        ModelIdentity.from_model(model), examples.provenance, examples.fingerprint, positions, hooks=hooks
    )


@checked
def stream(
    model: TransformerBridge,
    examples: Examples,
    sites: Sequence[Site | str | int],
    *,
    positions: Positions = "sampled",
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
    divided: bool = False,
    batch_indices: Sequence[int] | None = None,
) -> Iterator[Rows]:
    """Yield the vectors of the chosen sites batch by batch, storing none.

    The model runs no further than the last chosen site and, if it is a decoder and only sampled positions are
    asked for, reads no sentence further than its position. ``batch_indices`` are by default all.

    A model that is hooked between two batches is refused at once; other changes and edited weights are
    noticed at the end, since looking for them takes as long as a batch. Of several processes each is given
    all batches or, with ``divided``, its own, which `linear.fit_stream` takes with ``divided`` too.
    """
    _check_arguments(model, examples)
    layout = ModelLayout.from_model(model)
    hooks = {str(site): layout.hook(site) for site in _resolve_sites(layout, sites)}
    provenance = provenance_of(model, layout, examples, positions, hooks)
    batches = _Batches(model, examples, positions, batch_tokens or default_batch_tokens(model))
    if batch_indices is None:
        batch_indices = range(len(batches.counts))
    several = divided and parallel.world_size() > 1
    own = batch_indices[parallel.rank() :: parallel.world_size()] if several else batch_indices
    return _stream(model, batches, own, hooks, progress, provenance, divided=several)


def batch_counts(
    model: TransformerBridge, examples: Examples, positions: Positions, batch_tokens: int
) -> list[int]:
    """How many vectors each batch of `stream` has."""
    return _Batches(model, examples, positions, batch_tokens).counts


class _Batches:
    """Batches of examples, with the rows of each batch."""

    def __init__(
        self, model: TransformerBridge, examples: Examples, positions: Positions, batch_tokens: int
    ) -> None:
        self._examples = examples.at_positions(positions)
        self._read = self._examples if reads_whole(model) else self._examples.up_to_positions()
        self._sentences = self._read.batch_indices(batch_tokens)

    @property
    def counts(self) -> list[int]:
        """How many vectors each batch gives."""
        of_sentence = np.bincount(self._examples.sentences, minlength=len(self._examples))
        return [int(of_sentence[sentences].sum()) for sentences in self._sentences]

    def read(self, number: int) -> tuple[Batch, tuple[Tensor, Tensor], np.ndarray]:
        """A batch, with the sentences, positions and rows of its vectors."""
        batch = self._read.batch(self._sentences[number])
        sentence, place, rows = self._examples.rows_of(batch.index)
        return batch, (torch.from_numpy(sentence), torch.from_numpy(place)), rows


@torch.no_grad()
def _stream(
    model: TransformerBridge,
    batches: _Batches,
    batch_indices: Sequence[int],
    hooks: Mapping[str, str],
    progress: bool,
    provenance: Provenance,
    *,
    divided: bool = False,
) -> Iterator[Rows]:
    """Yield the vectors of some batches by the sites' hooks."""
    if not batch_indices:
        return
    weights = WeightChecksum([model.original_model], "the stream of its vectors")
    n_sentences = sum(map(len, batches._sentences))
    done = n_sentences - sum(len(batches._sentences[i]) for i in batch_indices)
    with (
        unchanged(model, provenance.identity.changes or ()) as check_hooks,
        Bar(total=n_sentences, initial=done, unit="sentence", desc="collecting", disable=not progress) as bar,
    ):
        for batch_index in batch_indices:
            batch, at, index = batches.read(batch_index)
            reader = _Reader(hooks, at)
            check_hooks()
            with own_precision(), reading(model, reader.hooks):
                first, others = batch.inputs(model)
                model(first, **others, return_type=None)
            yield Rows(index, at[1].numpy(), reader.vectors(model), provenance, divided)
            bar.update(len(batch.index))
    weights.check()


def _check_arguments(model: TransformerBridge, examples: Examples) -> None:
    if not len(examples):
        raise InputError("examples must have at least one sentence, got none.")
    check_own_tokens(model, examples)
    longest = int(examples.lengths.max())
    if longest > model.cfg.n_ctx and not is_visual(model):
        raise InputError(
            f"Sentences must have at most {model.cfg.n_ctx} tokens, the model's context, got {longest}. Were "
            "the examples made for another model?"
        )
    check_raw(model)


def _resolve_sites(layout: ModelLayout, sites: Any) -> list[Site]:
    requested = list(dict.fromkeys(map(layout.resolve, sites)))
    if not requested:
        raise InputError("sites must have at least one site, such as 'h.0', got none.")
    return requested


@checked
def default_batch_tokens(model: TransformerBridge) -> int:
    """Tokens of a batch that suit the device the model is on."""
    return _CPU_TOKENS if torch.device(model.cfg.device).type == "cpu" else _GPU_TOKENS


class _Reader:
    """Reads the vectors of one pass at some places of a batch, and ends the pass after the last site."""

    def __init__(self, hooks: Mapping[str, str], at: tuple[Tensor, Tensor]) -> None:
        self._hooks, self._at, self._names = hooks, at, {*hooks.values()}
        self._places: dict[torch.device, tuple[Tensor, ...]] = {}  # blocks may be on several devices
        self._seen: dict[str, Tensor] = {}

    @property
    def hooks(self) -> list[tuple[str, Callable[..., None]]]:
        """A hook for each site. Not an attribute: its cycle would hold vectors until they are collected."""
        return [(name, functools.partial(self._read, name)) for name in self._names]

    def _read(self, name: str, value: Tensor, hook: Any) -> None:
        if value.device not in self._places:
            self._places[value.device] = tuple(index.to(value.device) for index in self._at)
        self._seen[name] = value[self._places[value.device]].flatten(1).float()  # head after head
        # Not stop_at_layer: it runs the unembedding all the same.
        if len(self._seen) == len(self._names):
            raise EndOfPass

    def vectors(self, model: TransformerBridge) -> dict[str, Tensor]:
        """The vectors of all sites, on the CPU."""
        absent = [site for site, name in self._hooks.items() if name not in self._seen]
        if absent:
            unread = ModelLayout.from_model(model).hooks.get(self._hooks[absent[0]])
            if unread is not None and not unread.shape and not changes_of(model):
                raise InputError(
                    f"{', '.join(absent)} cannot be collected from {model.cfg.architecture}: the hook "
                    f"{unread.name} {unread.carries}."
                )
            raise InputError(
                f"The model did not run {', '.join(absent)}. Is it patched, with a jump over these sites?"
            )
        vectors = {site: self._seen[name] for site, name in self._hooks.items()}
        self._seen = {}  # only the caller keeps the batch in memory now
        if any(of_site.device.type != "cpu" for of_site in vectors.values()):
            vectors = _to_cpu(vectors)
        for site, of_site in vectors.items():
            check_finite(of_site, site)
        return vectors


def _to_cpu(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same vectors by one transfer from their device, if it is one."""
    if len({of_site.device for of_site in vectors.values()}) > 1:
        return {site: of_site.cpu() for site, of_site in vectors.items()}
    flat = torch.cat([of_site.reshape(-1) for of_site in vectors.values()]).cpu()
    parts = flat.split([of_site.numel() for of_site in vectors.values()])
    # Copies: a view would keep the whole batch in memory.
    return {site: part.view_as(vectors[site]).clone() for site, part in zip(vectors, parts, strict=True)}
