"""Vectors that another engine has computed: a folder of safetensors files, one for each prompt.

So vLLM's extraction of hidden states leaves them (its ``ExampleHiddenStatesConnector``): ``token_ids`` of
the shape ``[tokens]`` and ``hidden_states`` of the shape ``[tokens, entries, d_model]``. A file does not say
which layers its entries are. Who reads it says so, and it is checked against passes of the model.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from matlens.activations.activations import HOLDS, Activations, Positions
from matlens.activations.collecting import collect, hook_names
from matlens.data.examples import Examples
from matlens.data.token_examples import make_token_examples
from matlens.errors import InputError, PositiveInt, check_choice, checked, printable, short
from matlens.io.files import open_regular
from matlens.io.rows import Column, collect_rows
from matlens.models.identity import ModelIdentity, Provenance, check_raw
from matlens.models.layout import ModelLayout
from matlens.models.sites import Site
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

VECTORS, TOKENS = "hidden_states", "token_ids"
# By how much of a vector two engines may differ, whose sums are in another order in that precision.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
_EXCEPTIONS = 0.1  # of a prompt's vectors in half precision: what is an attention sink here may be none there
_TOGETHER = 256  # prompts whose embeddings are compared at once


class _Prompt(NamedTuple):
    """A file, and what it says before its vectors are read."""

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
    """Read the vectors that another engine has written, prompt by prompt, as if they had been collected.

    Parameters
    ----------
    model
        The model that they are of, in the precision that the engine ran it in.
    source
        The folder of the engine: ``*.safetensors``, one for each prompt, which are read in the order of their
        names.
    entries
        Which site each entry of ``hidden_states`` is, in the order of the entries; ``None`` for one that is
        none and is left out. vLLM's layer ids are the layers of the stream here: 0 enters the first block,
        and ``L`` is what enters the final norm. What is past the final norm, as the last of Hugging Face's
        ``hidden_states`` is, is ``None``.
    positions
        ``"all"``: a row for every token. ``"drawn"``: for the last token of each prompt.
    folder
        Where to keep the rows, as in `collect`; by default in memory.
    n_checked
        How many prompts, the shortest ones, the model is run on to see that the entries are what they are
        said to be. Where what enters the first block is among them, that is compared in all prompts.
    name
        What the prompts are called in tables, where others have the name of a corpus.
    progress
        Whether to show a bar.

    Raises
    ------
    InputError
        There are no files; a file is damaged, of another shape, width or precision, or holds a number that is
        not finite or a vector of nothing but zeros; there are not as many entries as said; an entry is
        another site than said, where the message says which it is; or the vectors of some tokens are others.
    """
    check_raw(model)
    check_choice(positions, ("drawn", "all"), "positions")
    layout = ModelLayout.from_model(model)
    sites = [None if entry is None else str(layout.resolve(entry)) for entry in entries]
    named = [site for site in sites if site is not None]
    if not named or len(set(named)) < len(named):
        raise InputError(
            f"The entries are {short(list(entries))}. Expected the site of each, every site once, and None "
            "for what is left out."
        )
    prompts = [_look(path, len(sites), layout.d_model) for path in _files(Path(source))]
    _check_precision(model, prompts)
    examples = _examples(model, prompts, name)
    _check_sites(model, prompts, sites, n_checked)
    _check_tokens(model, prompts, sites)
    columns = {site: Column(layout.width(site)) for site in named}
    provenance = Provenance(
        ModelIdentity.from_model(model), {**examples.provenance, "engine": "another"}, examples.fingerprint,
        positions, hooks=hook_names(layout, columns),
    )  # fmt: skip

    def run(numbers: Sequence[int]) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        with Bar(total=len(numbers), unit="prompt", desc="reading", disable=not progress) as bar:
            for number in numbers:
                vectors = _read(prompts[number], sites)
                if positions == "all":
                    index = np.arange(examples.offsets[number], examples.offsets[number + 1])
                else:
                    index = np.array([number])
                    vectors = {site: of_site[-1:] for site, of_site in vectors.items()}
                yield index, vectors
                bar.update()

    config, rows = collect_rows(
        HOLDS, {"provenance": provenance.to_json(), "files": _stamp(prompts)}, columns,
        examples.lengths.tolist() if positions == "all" else [1] * len(examples), run,
        folder=folder, arrays=examples.arrays,
    )  # fmt: skip
    return Activations(rows, examples, positions, Provenance.from_config(config))


def _examples(model: TransformerBridge, prompts: Sequence[_Prompt], name: str = "exported") -> Examples:
    """What the engine has read, all of it tokens: an end of text at the end of a prompt is no padding."""
    tokens = [prompt.tokens for prompt in prompts]
    return make_token_examples(model, tokens, attention_mask=[[1] * len(each) for each in tokens], name=name)


def _stamp(prompts: Sequence[_Prompt]) -> str:
    """What tells whether files were written anew since they were read."""
    digest = hashlib.sha256()
    for prompt in prompts:
        status = prompt.path.stat()
        digest.update(f"{prompt.path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        raise InputError(f"There is no folder {source}. Expected the one that the engine has written into.")
    paths = sorted(source.glob("*.safetensors"))
    if not paths:
        raise InputError(f"There is no file *.safetensors in {source}. Expected one for each prompt.")
    return paths


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        reason = printable(str(error).partition("\n")[0], most=200)
        raise InputError(
            f"{path} cannot be read as safetensors ({reason}). Is the engine still writing, or was it broken "
            "off? Remove the file, or have it written anew."
        ) from error


def _look(path: Path, n_entries: int, width: int) -> _Prompt:
    """Read what a file says of itself, and its tokens."""
    with _opened(path) as file:
        absent = {VECTORS, TOKENS} - set(file.keys())
        if absent:
            raise InputError(
                f"{path} has no tensor {' and no '.join(sorted(absent))}. Expected {TOKENS} [tokens] and "
                f"{VECTORS} [tokens, entries, {width}]."
            )
        shape = list(file.get_slice(VECTORS).get_shape())
        tokens = file.get_tensor(TOKENS)
        precision = file.get_slice(VECTORS).get_dtype()
    if tokens.ndim != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise InputError(
            f"{TOKENS} of {path} is {short(tokens)} of {tokens.dtype}. Expected whole numbers, one a token."
        )
    if len(shape) != 3 or shape[0] != len(tokens) or shape[1] != n_entries or shape[2] != width:
        raise InputError(
            f"{VECTORS} of {path} has the shape {shape}. Expected [{len(tokens)}, {n_entries}, {width}]: as "
            "many tokens as there are ids, as many entries as are named, and the width of this model."
        )
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(precision)
    if dtype is None:
        raise InputError(f"{VECTORS} of {path} is in {precision}. Expected F32, F16 or BF16.")
    return _Prompt(path, tokens.tolist(), dtype)


def _check_precision(model: TransformerBridge, prompts: Sequence[_Prompt]) -> None:
    other = next((prompt for prompt in prompts if prompt.dtype != model.cfg.dtype), None)
    if other is not None:
        raise InputError(
            f"{other.path} holds vectors in {other.dtype}, and this model runs in {model.cfg.dtype}. Load it "
            f"with matlens.load(..., dtype={other.dtype}), so that maps of the vectors are such a model's."
        )


def _read(prompt: _Prompt, sites: Sequence[str | None]) -> dict[str, Tensor]:
    with _opened(prompt.path) as file:
        vectors = file.get_tensor(VECTORS).float()
    if len(vectors) != len(prompt.tokens):
        raise InputError(f"{prompt.path} has changed while it was read. Expected files that are finished.")
    for entry, site in enumerate(sites):
        if site is not None and not bool(vectors[:, entry].isfinite().all()):
            raise InputError(
                f"Entry {entry} of {prompt.path}, {site}, holds a number that is not finite. Engines have "
                "left such where they read memory that was never written: have the file written anew."
            )
        if site is not None and _after_a_block(site) and not bool(vectors[:, entry].any(dim=1).all()):
            raise InputError(
                f"Entry {entry} of {prompt.path}, {site}, holds a vector of nothing but zeros, which no "
                "block gives. Did the engine take the beginning of the prompt from a cache? Have the file "
                "written anew without."
            )
    return {site: vectors[:, entry].contiguous() for entry, site in enumerate(sites) if site is not None}


def _after_a_block(site: str) -> bool:
    """Whether a site is the stream behind a block; the embedding of a token can be zero."""
    return site.startswith("h.") and site != "h.0"


# Which layers the entries are


def _check_sites(
    model: TransformerBridge, prompts: Sequence[_Prompt], sites: Sequence[str | None], n_checked: int
) -> None:
    """Compare the shortest prompts with passes of the model."""
    chosen = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    chosen = [prompt for prompt in chosen if len(prompt.tokens) > 1][:n_checked] or chosen[:n_checked]
    examples = _examples(model, chosen)
    known = _known_sites(model, examples, [site for site in sites if site is not None])
    theirs: dict[str, list[Tensor]] = {}
    for prompt in chosen:
        for site, vectors in _read(prompt, sites).items():
            theirs.setdefault(site, []).append(vectors)
    for site, parts in theirs.items():
        distances = {
            name: max(map(_typical_distance, parts, ours.split(examples.lengths.tolist())))
            for name, ours in known.items()
        }
        nearest = min(distances, key=lambda name: distances[name])
        if nearest == site and distances[site] <= _TOLERANCES[chosen[0].dtype]:
            for prompt, part, ours in zip(
                chosen, parts, known[site].split(examples.lengths.tolist()), strict=True
            ):
                _check_near(prompt, sites.index(site), site, part, ours)
            continue
        like = f", and is nearest to {nearest} ({distances[nearest]:.2g})" if nearest != site else ""
        raise InputError(
            f"Entry {sites.index(site)} is said to be {site} and is not: on {len(chosen)} prompts it differs "
            f"from what the model has there by {distances[site]:.2g} of a vector's length{like}. Expected "
            "the site of each entry, and None for what is past the final norm. Or were other weights, other "
            "tokens or another precision run?"
        )


def _known_sites(model: TransformerBridge, examples: Examples, sites: Sequence[str]) -> Mapping[str, Tensor]:
    layout = ModelLayout.from_model(model)
    wanted = list(dict.fromkeys([*map(str, layout.stream), *sites]))
    ours = collect(model, examples, wanted, positions="all", progress=False)
    known = {site: ours[site] for site in wanted}
    if hasattr(model, "ln_final"):
        norm = copy.deepcopy(model.ln_final.original_component).float()
        with torch.inference_mode():
            last = ours[str(layout.stream[-1])].to(model.cfg.device)
            known["what is past the final norm"] = norm(last).float().cpu()
    return known


def _check_tokens(model: TransformerBridge, prompts: Sequence[_Prompt], sites: Sequence[str | None]) -> None:
    """Compare what enters the first block, which costs next to nothing, in all prompts."""
    first = str(ModelLayout.from_model(model).stream[0])
    if first not in sites:
        return
    entry = sites.index(first)
    for start in range(0, len(prompts), _TOGETHER):
        some = prompts[start : start + _TOGETHER]
        examples = _examples(model, some)
        ours = collect(model, examples, [first], positions="all", progress=False)[first]
        for prompt, of_prompt in zip(some, ours.split(examples.lengths.tolist()), strict=True):
            with _opened(prompt.path) as file:
                theirs = file.get_slice(VECTORS)[:, entry].float()
            _check_near(prompt, entry, first, theirs, of_prompt)


def _check_near(prompt: _Prompt, entry: int, site: str, theirs: Tensor, ours: Tensor) -> None:
    """Refuse a prompt of which some vectors are not those of the model, though most may be."""
    distances = _distances(theirs, ours)
    allowed = 0 if prompt.dtype == torch.float32 else max(int(_EXCEPTIONS * len(distances)), 1)
    far = torch.nonzero(distances > _TOLERANCES[prompt.dtype]).flatten().tolist()
    if len(far) > min(allowed, len(distances) - 1):
        raise InputError(
            f"Entry {entry} of {prompt.path}, {site}, is not what the model has there at {len(far)} of "
            f"{len(distances)} tokens, the first of them number {far[0]}: it differs by "
            f"{float(distances[far[0]]):.2g} of the vector's length. Were other tokens run than {TOKENS} "
            "says, or are these vectors of another prompt?"
        )


def _typical_distance(theirs: Tensor, ours: Tensor) -> float:
    """By how much of its length a vector typically differs; the median, because of attention sinks."""
    return float(_distances(theirs, ours).median())


def _distances(theirs: Tensor, ours: Tensor) -> Tensor:
    """By how much of its length each vector differs."""
    if theirs.shape != ours.shape:
        return torch.full((len(theirs),), float("inf"))
    return (theirs - ours).norm(dim=1) / ours.norm(dim=1).clamp_min(1e-30)
