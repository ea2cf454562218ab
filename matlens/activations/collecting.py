"""Collecting: one pass over the examples gives the vectors of every chosen site."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import HOLDS, Activations, Positions, Rows
from matlens.data.examples import Batch, Examples
from matlens.data.readers import batch_groups, check_own_tokens, reads_whole
from matlens.errors import InputError, NonNegativeInt, PositiveInt, checked
from matlens.io.artifact import CONFIG, Artifact
from matlens.io.rows import Column, writing_rows
from matlens.models.hooks import EndOfPass, active_hooks, describe_hooks, reading, run_of_functions
from matlens.models.identity import Provenance, check_raw
from matlens.models.inputs import is_visual
from matlens.models.layout import ModelLayout
from matlens.models.sites import STREAM, Site
from matlens.models.weights import fingerprint
from matlens.numerics import check_finite
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_CPU_TOKENS, _GPU_TOKENS = 2048, 32768  # padded tokens of a batch; more no longer helps
_FEWEST_TOKENS = 256  # on a GPU with hardly any free memory


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
    columns = _columns(layout, folder, requested)
    batch_tokens = batch_tokens or default_batch_tokens(
        model, sum(map(layout.width, requested)), longest=int(examples.lengths.max()), folder=folder
    )
    provenance = provenance_of(model, layout, examples, positions, columns)
    whole = positions == "all" or reads_whole(model, examples)
    request = {
        "provenance": provenance.to_json(),
        "run_of_functions": run_of_functions(model),
        "batch_tokens": batch_tokens,
        "read": "sentence" if whole else "sentence up to its position",
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
    return Provenance.from_model(
        model, data=examples.provenance, examples=examples.fingerprint, positions=positions, hooks=hooks
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

    Raises InputError at the end if weights or hooks have changed since the first batch. Of several processes
    each is given all batches or, with ``divided``, its own, which `linear.fit_stream` takes with ``divided``
    too.
    """
    _check_arguments(model, examples)
    layout = ModelLayout.from_model(model)
    requested = _resolve_sites(layout, sites)
    hooks = {str(site): layout.hook(site) for site in requested}
    provenance = provenance_of(model, layout, examples, positions, hooks)
    several = divided and parallel.world_size() > 1
    if batch_tokens is None:
        width, longest = sum(map(layout.width, requested)), int(examples.lengths.max())
        batch_tokens = default_batch_tokens(model, width, longest=longest)
        if several:  # the same batches in all
            batch_tokens = int(parallel.broadcast(batch_tokens, "choosing the size of batches"))
    batches = _Batches(model, examples, positions, batch_tokens)
    if batch_indices is None:
        batch_indices = range(len(batches.counts))
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
        whole = reads_whole(model, self._examples)
        self._read = self._examples if whole else self._examples.up_to_positions()
        self._sentences = self._read.batch_indices(batch_tokens, batch_groups(model, self._read))

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
    n_sentences = sum(map(len, batches._sentences))
    done = n_sentences - sum(len(batches._sentences[i]) for i in batch_indices)
    with Bar(
        total=n_sentences, initial=done, unit="sentence", desc="collecting", disable=not progress
    ) as bar:
        for batch_index in batch_indices:
            batch, at, index = batches.read(batch_index)
            reader = _Reader(hooks, at)
            with reading(model, reader.hooks):
                first, others = batch.inputs(model)
                model(first, **others, return_type=None)
            yield Rows(
                index, at[1].numpy(), reader.vectors(model), provenance, divided, batches._examples
            )  # fmt: skip
            bar.update(len(batch.index))
    check_unchanged(model, provenance)


def check_unchanged(model: TransformerBridge, provenance: Provenance) -> None:
    """Raise InputError if a model is not what it was when a provenance was made."""
    if fingerprint(model) != provenance.identity.fingerprint:
        raise InputError("The weights of the model changed while it was read. Read it again from the start.")
    if (now := active_hooks(model)) != provenance.active_hooks:
        raise InputError(
            f"The model's hooks changed while it was read, from {describe_hooks(provenance.active_hooks)} to "
            f"{describe_hooks(now)}. Read it inside one context."
        )


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
def default_batch_tokens(
    model: TransformerBridge,
    width: NonNegativeInt = 0,
    *,
    longest: PositiveInt = 1,
    folder: str | Path | None = None,
    free: NonNegativeInt | None = None,
) -> int:
    """Tokens of a batch that suit the model's device: on a GPU, those that half of the free memory holds.

    Parameters
    ----------
    width
        Values that are kept for each token, of all sites together.
    longest
        Tokens of the longest sentence, whose attention scores take memory.
    folder
        Of an interrupted run, whose batches are kept.
    free
        Free bytes on the device, by default asked of CUDA.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if folder is not None:
            return int(json.loads(Path(folder, CONFIG).read_text("utf-8"))["request"]["batch_tokens"])
    device, config = torch.device(model.cfg.device), model.cfg
    if free is None:
        if device.type == "cpu":
            return _CPU_TOKENS
        if device.type != "cuda":
            return _GPU_TOKENS
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + reusable
    of_block = 8 * config.d_model + 4 * (config.d_mlp or 0)  # values of a block in a pass
    of_attention = 3 * longest * max(config.n_heads or 0, 0)  # scores, mask added, softmax in float32
    each = 4 * (width + of_attention) + config.dtype.itemsize * of_block
    fitting = free // 2 // each
    # A power of two, so that a little more or less free memory gives the same batches.
    return min(max(1 << max(fitting.bit_length() - 1, 0), _FEWEST_TOKENS), _GPU_TOKENS)


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
            if unread is not None and not unread.shape and not active_hooks(model):
                raise InputError(
                    f"{', '.join(absent)} cannot be collected from {model.cfg.architecture}: the hook "
                    f"{unread.name} {unread.carries}."
                )
            raise InputError(
                f"The model did not run {', '.join(absent)}. Is it patched, with a jump over these sites?"
            )
        vectors = {site: self._seen[name] for site, name in self._hooks.items()}
        self._seen = {}  # only the caller keeps the batch in memory now
        vectors = {site: of_site.cpu() for site, of_site in vectors.items()}
        for site, of_site in vectors.items():
            check_finite(of_site, site)
        return vectors
