"""Closed-form lenses: least squares of every layer, from one pass over the data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import stream
from matlens.activations.sinks import find_sinks, sink_rows
from matlens.data.examples import Examples
from matlens.data.overlap import fitted_on, sentence_keys
from matlens.errors import InputError, short
from matlens.lens.config import LensConfig
from matlens.lens.maps import LensMaps, Standardisation
from matlens.linear.fitting import Samples, Selection, chunks, joined
from matlens.linear.least_squares import LeastSquares, warn_if_few
from matlens.linear.maps import LinearMap
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.sites import Site
from matlens.numerics import in_float64

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

STRENGTHS = tuple(10.0 ** (half / 2) for half in range(-20, 5))
"""Penalties that leave-one-out chooses from, in units of ``mean diag(X'X)``."""
_HELD_OUT = 1024  # samples for leave-one-out
_CHUNK = 1024  # samples per factorisation; at least four per dimension


def layers_read(configs: Sequence[LensConfig], layers: Sequence[int], n_layers: int) -> list[int]:
    """Layers that a fit needs: all of them to exclude sinks."""
    if any(config.sinks == "exclude" for config in configs):
        return list(range(n_layers + 1))
    return [*layers, n_layers]


def resolve_layers(layers: Sequence[int] | None, n_layers: int) -> tuple[int, ...]:
    """Numbers of layers, ascending and without the last; by default all of these."""
    if layers is None:
        return tuple(range(n_layers))
    found = sorted({Site.parse(layer, n_layers).layer for layer in layers} - {n_layers})
    if not found:
        raise InputError(f"layers must be between 0 and {n_layers - 1}, got {short(layers)}.")
    return tuple(found)


# One layer


def solve(
    config: LensConfig, sums: LeastSquares, x: Tensor, y: Tensor, weights: Tensor
) -> tuple[LinearMap, float]:
    """The map of a closed form, and its penalty; leave-one-out uses some of the samples."""
    if config.toward == "identity":  # the difference from it has the penalty
        state = sums.tensors()
        state["z"] = state["z"] - state["r"][:, :-1]
        sums, y = LeastSquares.from_tensors(state, sums.targets, source=sums.source), y - x
    r, _ = sums.factors(centred=config.intercept)
    unit = float(r.square().sum()) / r.shape[1]
    ridge = config.ridge
    if ridge == "loo":
        errors = leave_one_out(sums, x, y, weights, intercept=config.intercept)
        ridge = STRENGTHS[int(errors.argmin())]
    weight, bias = sums.solution(intercept=config.intercept, ridge=ridge * unit)
    if config.toward == "identity":
        weight = weight + torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
    right = None
    if config.rank is not None and config.rank < len(weight):
        # The fitted values are the rows of a rotation of r @ weight.T.
        directions = torch.linalg.svd(r @ weight.T, full_matrices=False).Vh[: config.rank]
        weight, right = directions.T, directions @ weight
        if bias is not None:  # the low-rank fit is of centred samples, and has their mean
            x_mean, y_mean, _ = sums.means()
            bias = y_mean - weight @ (right @ x_mean)
    weight = weight.to("cpu", torch.float32).contiguous()
    bias, right = (
        None if part is None else part.to("cpu", torch.float32).contiguous() for part in (bias, right)
    )
    return LinearMap(weight, bias, sums.source, next(iter(sums.targets)), right=right), ridge


def leave_one_out(
    sums: LeastSquares, x: Tensor, y: Tensor, weights: Tensor, *, intercept: bool
) -> Float[Tensor, " strengths"]:
    """Leave-one-out squared errors for each of `STRENGTHS`.

    The error of a held-out sample is that of the fit on all samples, divided by one minus its leverage.
    """
    r, z = sums.factors(centred=intercept)
    x, y, weights = (part.to(r) for part in (x, y, weights))
    constant = torch.zeros_like(weights)
    if intercept:
        x_mean, y_mean, total = sums.means()
        x, y = x - x_mean, y - y_mean
        constant = weights / total
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    rotated, loadings = x @ vh.T, u.T @ z
    unit = float(r.square().sum()) / r.shape[1]
    errors = []
    for strength in STRENGTHS:
        gain = 1 / (s.square() + strength * unit)
        leverage = constant + weights * (rotated.square() * gain).sum(1)
        residual = y - rotated @ ((s * gain)[:, None] * loadings)
        rest = (1 - leverage).clamp(min=torch.finfo(s.dtype).eps)
        errors.append((weights * (residual / rest[:, None]).square().sum(1)).sum())
    return torch.stack(errors)


# All layers


def _take(samples: Samples, chosen: Tensor) -> Samples:
    return {name: values[chosen.to(values.device)] for name, values in samples.items()}


class _Statistics:
    """Least squares of all layers, and the samples for leave-one-out.

    Shared by closed forms with the same ``standardise``, ``weighted`` and ``sinks``. ``mask`` selects the
    samples of the fit; those with the smallest ``keys`` are a pseudo-random sample for leave-one-out.
    """

    def __init__(
        self, config: LensConfig, sites: Sequence[str], width: int, norm: Standardisation | None,
        mask: Tensor, keys: Tensor,
    ) -> None:  # fmt: skip
        *sources, self.last = sites
        self.weighted, self.norm, self.mask = config.weighted, norm if config.standardise else None, mask
        self.sums = {site: LeastSquares(width, {self.last: width}, source=site) for site in sources}
        self._is_held_out = torch.zeros_like(mask)
        self._is_held_out[keys.masked_fill(~mask, torch.iinfo(keys.dtype).max).argsort()[:_HELD_OUT]] = True
        self._held_out: Samples = dict.fromkeys(sites, torch.empty(0, width, dtype=torch.float32)) | {
            "index": torch.empty(0, dtype=torch.long), "weights": torch.empty(0, dtype=torch.float64)
        }  # fmt: skip

    def update(self, samples: Samples) -> None:
        """Add the selected ones of these samples; ``index`` are their numbers."""
        samples = _take(samples, self.mask[samples["index"]])
        y, weights = self._vectors(samples, self.last), self._weights(samples)
        for site, sums in self.sums.items():
            sums.update(self._vectors(samples, site), y, weights=weights)
        held_out = _take(samples, self._is_held_out[samples["index"]])
        self._held_out = joined([self._held_out, held_out])

    def _vectors(self, samples: Samples, site: str) -> Tensor:
        h = in_float64(samples[site])
        return h if self.norm is None else self.norm(h)

    def _weights(self, samples: Samples) -> Tensor:
        if not self.weighted:
            return samples["weights"]
        squares = in_float64(samples[self.last]).square().sum(1)
        return samples["weights"].to(squares.device) * torch.where(squares > 0, 1 / squares, 0)

    def reduce(self) -> None:
        """Add the samples of all other processes, in rank order, in every process."""
        if parallel.world_size() > 1:
            self.sums = {site: sums.reduce(to_all=True) for site, sums in self.sums.items()}
            self._held_out = parallel.concatenate(self._held_out, "held-out samples")

    def solve(self, config: LensConfig) -> tuple[dict[str, LinearMap], dict[str, float]]:
        """Maps and penalties by layer."""
        y, weights = self._vectors(self._held_out, self.last), self._weights(self._held_out)
        linears: dict[str, LinearMap] = {}
        ridges: dict[str, float] = {}
        for sites in [list(self.sums)] if config.shared_map else [[site] for site in self.sums]:
            sums, *others = (copy.copy(self.sums[site]) for site in sites)
            for other in others:
                other.source = sums.source
                sums.merge(other)
            x = torch.cat([self._vectors(self._held_out, site) for site in sites])
            linear, ridge = solve(config, sums, x, y.repeat(len(sites), 1), weights.repeat(len(sites)))
            linears |= {site: replace(linear, source=site) for site in sites}
            ridges |= {site.removeprefix("h."): ridge for site in sites}
        return linears, ridges


def fit_closed_forms(
    model: TransformerBridge,
    data: Examples | Activations,
    configs: Sequence[LensConfig],
    *,
    layers: Sequence[int],
    positions: Positions = "all",
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> dict[str, LensMaps]:
    """Fit closed forms in one pass over the data, see `Lens.fit`; an earlier one finds sinks."""
    norm = Standardisation.from_model(model) if any(config.standardise for config in configs) else None
    identity = ModelIdentity.from_model(model)
    if isinstance(data, Activations):
        data.provenance.check_same(identity, ours="the activations")
        provenance, examples, positions = data.provenance, data.examples, data.positions
    else:
        examples = data
        provenance = Provenance.from_model(
            model, data=data.provenance, examples=data.fingerprint, positions=positions
        )
    samples = examples.at_positions(positions)
    keys = torch.from_numpy(row_keys(samples))
    mask, counts = torch.ones(len(keys), dtype=torch.bool), torch.ones(len(keys), dtype=torch.float64)
    selection = Selection.parse(rows, weights, len(keys))
    provenance = provenance.with_details(**selection.details, **fitted_on(samples, selection.mask))
    mask = mask if selection.mask is None else selection.mask
    counts = counts if selection.weights is None else selection.weights
    job = [provenance.to_json(), [config.name for config in configs], list(layers)]
    parallel.check_same(job, "the job of lenses")
    sinks = torch.zeros_like(mask)
    if any(config.sinks == "exclude" for config in configs):
        if isinstance(data, Activations):
            sinks = sink_rows(data).cpu()
        else:
            of_tokens = find_sinks(model, examples, batch_tokens=batch_tokens, progress=progress)
            sinks = of_tokens[torch.from_numpy(samples.sentences), torch.from_numpy(samples.positions)]
    sites = [f"h.{layer}" for layer in (*layers, identity.n_layers)]
    statistics: dict[Any, _Statistics] = {}
    for config in configs:
        chosen = mask if config.sinks == "include" else mask & ~sinks
        if _kind(config) not in statistics:
            statistics[_kind(config)] = _Statistics(config, sites, identity.d_model, norm, chosen, keys)
    if isinstance(data, Activations):
        batches = data.shards(sites, divided=True)
    else:
        batches = stream(
            model, examples, sites, positions=positions, batch_tokens=batch_tokens, progress=progress,
            divided=True,
        )  # fmt: skip
    parts = ({**rows.vectors, "index": torch.from_numpy(rows.index)} for rows in batches)
    for part in chunks(parts, max(_CHUNK, 4 * identity.d_model)):
        part["weights"] = counts[part["index"]]
        for each in statistics.values():
            each.update(part)
    for each in statistics.values():
        each.reduce()
    fitted = dict[str, LensMaps]()
    for config in configs:
        each = statistics[_kind(config)]
        linears, ridges = each.solve(config)
        details: dict[str, Any] = {"method": config.name, "n_fitted": next(iter(each.sums.values())).n}
        if config.sinks == "exclude":
            details["n_sinks"] = int((mask & sinks).sum())
        if config.ridge == "loo":
            details["strengths"] = ridges
        origin = provenance.with_details(**details)
        maps = (replace(linear, provenance=origin) for linear in linears.values())
        fitted[config.name] = LensMaps(dict(zip(layers, maps, strict=True)), config.name, origin, each.norm)
    n_samples = [
        fitted[config.name].provenance.details["n_fitted"] * (len(layers) if config.shared_map else 1)
        for config in configs
        if config.ridge == 0
    ]
    if n_samples:
        warn_if_few(min(n_samples), identity.d_model)
    return fitted


def _kind(config: LensConfig) -> tuple[bool, bool, str]:
    """The statistics that a closed form is solved from."""
    return config.standardise, config.weighted, config.sinks


def row_keys(examples: Examples) -> np.ndarray:
    """A pseudo-random number for each sample, from its sentence and position only."""
    of_sentence = sentence_keys(examples)
    places = np.asarray(examples.positions, np.uint64)
    with np.errstate(over="ignore"):  # splitmix64
        keys = of_sentence[examples.sentences] + (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (keys >> np.uint64(1)).astype(np.int64)
