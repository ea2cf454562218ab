"""Vectors exported by another engine: a folder with one safetensors file per prompt.

So vLLM's extraction of hidden states leaves them (its ``ExampleHiddenStatesConnector``): ``token_ids`` of
the shape ``[tokens]`` and ``hidden_states`` of the shape ``[tokens, entries, d_model]``. A file does not name
the layers of its entries. The reader names them, and they are compared with passes of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from matlens.activations.activations import HOLDS, Activations, Positions
from matlens.activations.collecting import collect, provenance_of
from matlens.data.examples import Examples
from matlens.data.token_examples import make_token_examples
from matlens.errors import InputError, PositiveInt, checked, short
from matlens.io.files import content_hash, open_tensors
from matlens.io.rows import Column, writing_rows
from matlens.models.identity import Provenance, check_raw
from matlens.models.layout import ModelLayout
from matlens.models.sites import STREAM, Site
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

VECTORS, TOKENS = "hidden_states", "token_ids"
# By how much of a vector two engines may differ, whose sums are in another order in that precision.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
_EXCEPTIONS = 0.1  # of a prompt's vectors in half precision: what is an attention sink here may be none there
_TOGETHER = 256  # prompts whose embeddings are compared at once


class _Prompt(NamedTuple):
    """A file, with the tokens and the dtype of its vectors."""

    path: Path
    tokens: list[int]
    dtype: torch.dtype


@checked
def read_exported(
    model: TransformerBridge,
    source: str | Path,
    entries: Sequence[int | str | Site | None],
    *,
    positions: Positions = "all",
    folder: str | Path | None = None,
    n_checked: PositiveInt = 2,
    name: str = "exported",
    progress: bool = True,
) -> Activations:
    """Read the vectors that another engine has written, as if they had been collected.

    Parameters
    ----------
    model
        The model that they are of, in the precision that the engine ran it in.
    source
        The folder of the engine: ``*.safetensors``, one for each prompt, read in the order of their names.
    entries
        The site of each entry of ``hidden_states``, or ``None`` for one that is skipped. vLLM's layer ids are
        layers of the residual stream here: 0 enters the first block, and ``L`` the final norm. An entry after
        the final norm, as the last of Hugging Face's ``hidden_states``, is ``None``.
    positions
        ``"all"``: a row for every token. ``"sampled"``: for the last token of each prompt.
    folder
        Where to store the rows, as in `collect`; by default in memory.
    n_checked
        How many prompts, the shortest ones, the model is run on to compare the entries with its sites. What
        enters the first block is compared in all prompts.
    name
        Name of the prompts in tables.

    Raises
    ------
    InputError
        A file is damaged, or its tokens, shape, precision or vectors are not those of the model at these
        sites.
    """
    check_raw(model)
    layout = ModelLayout.from_model(model)
    sites = [None if entry is None else str(layout.resolve(entry)) for entry in entries]
    named = [site for site in sites if site is not None]
    widths = {layout.width(site) for site in named}
    if len(set(named)) < len(named) or widths != {layout.d_model}:
        raise InputError(
            f"entries must be different sites {layout.d_model} wide, or None, got {short(list(entries))}."
        )
    prompts = [_look(path, len(sites), model) for path in sorted(Path(source).glob("*.safetensors"))]
    if not prompts:
        raise InputError(f"source must be a folder with a file *.safetensors for each prompt, got {source}.")
    examples = _examples(model, prompts, name)
    shortest = sorted(prompts, key=lambda prompt: (len(prompt.tokens) == 1, len(prompt.tokens)))
    _compare(model, shortest[:n_checked], sites, [*named, *map(str, layout.stream)])
    first = str(layout.stream[0])
    for start in range(0, len(prompts) if first in named else 0, _TOGETHER):
        some = prompts[start : start + _TOGETHER]
        _compare(model, some, [site if site == first else None for site in sites], [first])
    columns = {site: Column(layout.width(site)) for site in named}
    provenance = provenance_of(model, layout, examples, positions, named)
    provenance = replace(provenance, data={**examples.provenance, "engine": "another"})

    counts = examples.lengths.tolist() if positions == "all" else [1] * len(examples)
    states = [(prompt.path.name, prompt.path.stat()) for prompt in prompts]
    # They change if a file is written again, and not if it is moved.
    files = {name: [state.st_size, state.st_mtime_ns] for name, state in states}
    request = {"provenance": provenance.to_json(), "files": content_hash(files)}
    with writing_rows(HOLDS, request, columns, counts, folder=folder, arrays=examples.arrays) as writer:
        for number in Bar(writer.missing, unit="prompt", desc="reading", disable=not progress):
            vectors = _read(prompts[number], sites)
            index = np.arange(examples.offsets[number], examples.offsets[number + 1])
            if positions == "sampled":
                index, vectors = np.array([number]), {site: h[-1:] for site, h in vectors.items()}
            writer.add(index, vectors)
    return Activations(writer.rows, examples, positions, Provenance.from_config(writer.config))


def _examples(model: TransformerBridge, prompts: Sequence[_Prompt], name: str = "exported") -> Examples:
    """The tokens that the engine read; an end-of-text token at the end of a prompt is not padding."""
    tokens = [prompt.tokens for prompt in prompts]
    return make_token_examples(model, tokens, attention_mask=[[1] * len(each) for each in tokens], name=name)


def _unfinished(path: Path) -> Callable[[str], InputError]:
    return lambda cause: InputError(f"{path} {cause}. Is the engine still writing, or was it interrupted?")


def _look(path: Path, n_entries: int, model: TransformerBridge) -> _Prompt:
    """Read the tokens of a file, and check that its vectors can be of the model."""
    with open_tensors(path, _unfinished(path)) as file:
        absent = {VECTORS, TOKENS} - set(file.keys())
        if absent:
            raise InputError(f"{path} must have the tensors {VECTORS} and {TOKENS}.")
        vectors, tokens = file.get_slice(VECTORS), file.get_tensor(TOKENS)
        shape, precision = list(vectors.get_shape()), vectors.get_dtype()
    if tokens.ndim != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise InputError(f"{TOKENS} of {path} must be integers [tokens], got {short(tokens)}.")
    expected = [len(tokens), n_entries, model.cfg.d_model]
    if shape != expected:
        raise InputError(f"{VECTORS} of {path} must be [tokens, entries, d_model] = {expected}, got {shape}.")
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(precision)
    if dtype is None or dtype != model.cfg.dtype:
        raise InputError(
            f"{VECTORS} of {path} must be in the precision of the model, {model.cfg.dtype}, got {precision}. "
            "Load the model with that dtype."
        )
    return _Prompt(path, tokens.tolist(), dtype)


def _read(prompt: _Prompt, sites: Sequence[str | None]) -> dict[str, Tensor]:
    with open_tensors(prompt.path, _unfinished(prompt.path)) as file:
        vectors = file.get_tensor(VECTORS).float()
    if len(vectors) != len(prompt.tokens):
        raise InputError(f"{prompt.path} changed while it was being read. Wait until the export is complete.")
    found = {site: vectors[:, entry].contiguous() for entry, site in enumerate(sites) if site is not None}
    for site, of_site in found.items():
        # Engines have left such values where they read memory that was never written, or from a cache.
        bad = not bool(of_site.isfinite().all()) or (
            Site.parse(site).kind == STREAM and site != "h.0" and not bool(of_site.any(dim=1).all())
        )
        if bad:
            raise InputError(f"{prompt.path} must have finite, non-zero vectors at {site}. Export it again.")
    return found


def _compare(
    model: TransformerBridge, prompts: Sequence[_Prompt], sites: Sequence[str | None], known: Sequence[str]
) -> None:
    """Raise InputError unless each entry is near the model's site, and nearer than to any other known one.

    The change by a block can be smaller than rounding in half precision.
    """
    examples = _examples(model, prompts)
    ours = collect(model, examples, known, positions="all", progress=False)
    read = [_read(prompt, sites) for prompt in prompts]
    for entry, site in enumerate(sites):
        if site is None:
            continue
        theirs = torch.cat([of_prompt[site] for of_prompt in read])
        distances = {
            name: (theirs - vectors).norm(dim=1) / vectors.norm(dim=1).clamp_min(1e-30)
            for name, vectors in ours.items()
        }
        nearest = min(distances, key=lambda name: float(distances[name].median()))
        if distances[nearest].median() < distances[site].median():
            raise InputError(
                f"entries must be the sites of the vectors: entry {entry} is named {site} and is nearest to "
                f"{nearest}."
            )
        for prompt, of_prompt in zip(prompts, distances[site].split(examples.lengths.tolist()), strict=True):
            _check_near(prompt, f"entry {entry}, {site},", of_prompt)


def _check_near(prompt: _Prompt, what: str, distances: Tensor) -> None:
    """Raise InputError if vectors of a prompt are far from the model's; some may be in half precision."""
    allowed = 0 if prompt.dtype == torch.float32 else max(int(_EXCEPTIONS * len(distances)), 1)
    far = torch.nonzero(distances > _TOLERANCES[prompt.dtype]).flatten().tolist()
    if len(far) > min(allowed, len(distances) - 1):
        raise InputError(
            f"{prompt.path}: {what} differs from the model's at {len(far)} of {len(distances)} tokens, the "
            f"first of them number {far[0]} by {float(distances[far[0]]):.2g} of the vector's length. Is the "
            f"entry another site, was the model another, or are the {TOKENS} of another prompt?"
        )
