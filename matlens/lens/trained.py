"""All methods by one call; what no closed form gives starts from one, or from nothing, and is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import collect
from matlens.data.corpus import Corpus, as_corpus
from matlens.data.corpus_examples import make_examples
from matlens.data.examples import Examples
from matlens.errors import (
    InputError,
    PositiveInt,
    Seed,
    check_choice,
    check_int,
    checked,
    did_you_mean,
    short,
)
from matlens.lens.fitting import lens_moments
from matlens.lens.jacobian import PROMPTS, fit_jacobian, longest_sentences
from matlens.lens.maps import LayerMap, LensParts, Standardisation
from matlens.lens.methods import Method
from matlens.lens.moments import check_layers
from matlens.lens.training import polish, scale_map, tune
from matlens.linear.samples import NoisyFit, warn_of_noise
from matlens.models.identity import ModelIdentity
from matlens.models.readout import Readout
from matlens.models.sites import STREAM, Site
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

ON_ROWS = ("scaled", "polished", "tuned")
"""Methods that are trained on rows of the layer and of the last one."""
JACOBIAN = "jacobian"
TRAINED = (*ON_ROWS, JACOBIAN)
_FROM_CLOSED = ("scaled", "polished")
_SCALE = "scale"


@checked
def best_start(model: TransformerBridge) -> str:
    """The closed form that ``scaled`` and ``polished`` start from: standardised where that can be read."""
    try:
        Standardisation.from_model(model)
    except InputError:
        return "affine"
    return "normed+affine"


@checked
def check_method_names(methods: str | Sequence[str]) -> list[str]:
    """Names of methods, each once: closed forms and ``scaled``, ``polished``, ``tuned`` and ``jacobian``.

    Raises
    ------
    InputError
        A name is none, or there is none.
    """
    names = list(dict.fromkeys([methods] if isinstance(methods, str) else methods))
    if not names:
        raise InputError("No methods are chosen. Expected one or more.")
    for name in names:
        if name not in TRAINED:
            try:
                Method.parse(name)
            except InputError as error:
                raise InputError(
                    f"{error} Or one of {', '.join(TRAINED)}.{did_you_mean(name, TRAINED)}"
                ) from error
    return names


def closed_forms(names: Sequence[str], model: TransformerBridge) -> list[str]:
    """The closed forms among names of methods, and the one that trained methods among them start from."""
    needed = [name for name in names if name not in TRAINED]
    if {*_FROM_CLOSED} & {*names}:
        needed.append(best_start(model))
    return list(dict.fromkeys(needed))


def sites_of_rows(names: Sequence[str], layers: Sequence[int] | None, last: int) -> list[int]:
    """Layers of the stream whose vectors methods need at every row: all where one leaves sinks out."""
    closed = [Method.parse(name) for name in names if name not in TRAINED]
    if layers is None or any(not method.sinks for method in closed):
        return list(range(last + 1))
    return sorted({Site.parse(layer, last).layer for layer in layers} | {last})


@checked
def train_maps(
    name: str,
    readout: Readout,
    rows: Activations,
    *,
    start: LensParts | None = None,
    layers: Sequence[int] | None = None,
    seed: Seed = 0,
    progress: bool = True,
) -> LensParts:
    """Maps of a method that is trained on rows, for each layer by itself.

    Several processes that share the work each train some of the layers, and all get all maps.

    Parameters
    ----------
    name
        ``"scaled"``: a closed form with the factor on its scores that makes the divergence least.
        ``"polished"``: that closed form improved by steps down the divergence, see `polish`. ``"tuned"``:
        trained from the identity, see `tune`.
    readout
        The read-out of the model.
    rows
        Vectors of the layers and of the last one, row by row.
    start
        The closed form that ``scaled`` and ``polished`` start from, see `best_start`.
    layers
        The layers, by default those of ``start``, or all but the last.
    seed
        Of the rows and tokens that training draws.
    progress
        Whether to show a bar over the layers.

    Raises
    ------
    InputError
        It is no such method, or has nothing to start from; or the rows lack a layer or are another model's.
    """
    check_choice(name, ON_ROWS, "The method")
    readout.check_same(rows.provenance, theirs="the rows")
    last = rows.provenance.identity.n_layers
    if name in _FROM_CLOSED and start is None:
        raise InputError(f"{name!r} starts from a closed form, and none is given. Expected such as 'affine'.")
    begin: dict[int, LayerMap] = {} if start is None or name == "tuned" else dict(start.maps)
    wanted = list(layers if layers is not None else begin or range(last))
    absent = [layer for layer in [*wanted, last] if str(Site(STREAM, layer)) not in rows]
    absent += [layer for layer in wanted if begin and layer not in begin]
    if absent or not wanted:
        raise InputError(f"The rows lack the layers {short(absent)}. Collect these sites too.")
    norm = start.norm if start is not None and begin else None
    h_last = rows[last]
    fit: dict[str, Callable[[int], LayerMap]] = {
        "scaled": lambda layer: scale_map(readout, begin[layer], rows[layer], h_last, norm=norm, seed=seed),
        "polished": lambda layer: polish(readout, begin[layer], rows[layer], h_last, norm=norm, seed=seed),
        "tuned": lambda layer: tune(readout, rows[layer], h_last, seed=seed),
    }
    mine = wanted[parallel.rank() :: parallel.world_size()]
    fitted = {layer: fit[name](layer) for layer in Bar(mine, desc=name, disable=not progress)}
    maps = _of_all(fitted, wanted) if parallel.world_size() > 1 else fitted
    provenance = rows.provenance.with_details(method=name, n_fitted=len(h_last), seed=seed)
    return LensParts(maps, name, provenance, norm)


def _of_all(fitted: Mapping[int, LayerMap], wanted: Sequence[int]) -> dict[int, LayerMap]:
    """The maps of all layers, of which each process has fitted some."""
    parts: dict[str, Tensor] = {}
    for layer, of_layer in fitted.items():
        parts |= {f"{layer}.{name}": part for name, part in of_layer.parts.items()}
        parts[f"{layer}.{_SCALE}"] = torch.tensor(of_layer.scale, dtype=torch.float64)
    whole = parallel.merge(parts, "maps that are trained")
    maps = {}
    for layer in wanted:
        prefix = f"{layer}."
        named = {key.removeprefix(prefix): part for key, part in whole.items() if key.startswith(prefix)}
        scale = float(named.pop(_SCALE))
        maps[layer] = LayerMap(**named, scale=scale)
    return maps


def check_rows_folder(names: Sequence[str], folder: str | Path | None) -> None:
    """Refuse a folder for vectors where no method is trained on any.

    Raises
    ------
    InputError
        There is one, and nothing would be written there.
    """
    if folder is not None and not {*ON_ROWS} & {*names}:
        raise InputError(
            f"Nothing would be written into {short(str(folder))}: {', '.join(names)} keeps no vectors. "
            f"Expected a folder with one of {', '.join(ON_ROWS)} alone."
        )


@checked
def fit_maps(
    model: TransformerBridge,
    data: Corpus | Sequence[str] | Examples | Activations,
    methods: str | Sequence[str],
    *,
    positions: Positions = "all",
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    layers: Sequence[int] | None = None,
    seed: Seed = 0,
    batch_tokens: PositiveInt | None = None,
    n_prompts: int = PROMPTS,
    folder: str | Path | None = None,
    progress: bool = True,
) -> dict[str, LensParts]:
    """Maps by every method that is asked for, by its name; the parameters are those of `Lens.fit`.

    Raises
    ------
    InputError
        A method is none, or not of this model; the data are not of this model, or lack a layer.
    """
    names = check_method_names(methods)
    trained = [name for name in names if name in TRAINED]
    if trained and (rows is not None or weights is not None):
        raise InputError(
            f"The method {trained[0]!r} is trained, and takes neither 'rows' nor 'weights'. Expected closed "
            "forms, such as 'affine', or all samples."
        )
    check_rows_folder(names, folder)
    n_prompts = check_int(n_prompts, "n_prompts", min=1, max=10**9)
    n_layers = int(model.cfg.n_layers)
    wanted = check_layers(layers, n_layers)
    if not isinstance(data, Examples | Activations):
        data = as_corpus(data)
    if JACOBIAN in names and not isinstance(data, Corpus):
        raise InputError("The method 'jacobian' is fitted on sentences. Expected a corpus.")
    collected: Activations | None = None
    if {*ON_ROWS} & {*names}:
        if isinstance(data, Activations):
            collected = data
        else:
            examples = data if isinstance(data, Examples) else make_examples(model, data, seed=seed)
            collected = collect(
                model, examples, sites_of_rows(names, wanted, n_layers), positions=positions, folder=folder,
                batch_tokens=batch_tokens, progress=progress,
            )  # fmt: skip
        collected.provenance.check_same(ModelIdentity.from_model(model), ours="the activations")
    fitted: dict[str, LensParts] = {}
    closed = closed_forms(names, model)
    if closed:
        moments = lens_moments(
            model, data if collected is None else collected, closed, positions=positions, rows=rows,
            weights=weights, layers=wanted, seed=seed, batch_tokens=batch_tokens, progress=progress,
        )  # fmt: skip
        fitted = moments.solve_all(closed)
    if collected is not None:
        readout, start = Readout(model), fitted.get(best_start(model))
        if not closed and collected.n_rows <= model.cfg.d_model:  # else the closed form has said so
            warn_of_noise([NoisyFit(names[0], collected.n_rows, model.cfg.d_model)], 1)
        for name in (name for name in names if name in ON_ROWS):
            fitted[name] = train_maps(
                name, readout, collected, start=start, layers=wanted, seed=seed, progress=progress
            )
    if JACOBIAN in names:
        assert isinstance(data, Corpus)
        prompts = Corpus(data.name, tuple(longest_sentences(data, n_prompts)), n_prompts, 0, 0, 0)
        behind = [layer for layer in wanted if layer]
        fitted[JACOBIAN] = fit_jacobian(model, prompts, layers=behind, progress=progress)
    return {name: fitted[name] for name in names}
