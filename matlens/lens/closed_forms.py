"""Lenses in closed form: least squares of every layer onto the last, from one pass over the data."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import stream
from matlens.activations.sinks import find_sinks, outlying_rows
from matlens.data.examples import Examples
from matlens.lens.config import LensConfig, layers_read
from matlens.lens.maps import LensMaps, Standardisation
from matlens.linear.least_squares import LeastSquares, noise_of_fit
from matlens.linear.maps import LinearMap
from matlens.linear.samples import NoisyFit, Selection, warn_of_noise
from matlens.models.identity import ModelIdentity, Provenance
from matlens.numerics import in_float64

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

STRENGTHS = tuple(10.0 ** (half / 2) for half in range(-20, 5))
"""Penalties that leave-one-out chooses from, in units of ``mean diag(X'X)``."""
_HELD_OUT = 1024  # samples that leave-one-out looks at
_CHUNK = 1024  # samples that are factorised at once; never fewer than four for each dimension
Rows = dict[str, Tensor]
"""Samples, one per row: vectors by site, ``weights``, ``sinks``, and ``keys``."""


# One layer


def solve(
    config: LensConfig, sums: LeastSquares, x: Tensor, y: Tensor, weights: Tensor
) -> tuple[LinearMap, float]:
    """The map of a closed form, and its penalty in units of ``mean diag(X'X)``.

    Leave-one-out chooses the penalty by ``x``, ``y`` and their weights, some of the samples in the sums.
    """
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
        weight = weight + torch.eye(len(weight)).to(weight)
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
    """Squared errors on held-out samples, each by the map fitted on all others, for each of `STRENGTHS`.

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


def _take(rows: Mapping[str, Tensor], chosen: Tensor) -> Rows:
    return {name: values[chosen.to(values.device)] for name, values in rows.items()}


def _join(*parts: Rows) -> Rows:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _smallest_keys(rows: Rows) -> Rows:
    """The samples with the smallest keys, which are as good as sampled at random."""
    return _take(rows, rows["keys"].sort(stable=True).indices[:_HELD_OUT])


class LensLeastSquares:
    """Statistics of the data that closed forms are solved from: exact, and streamed.

    For each layer, and each way of weighting its samples, there is one `LeastSquares`. Vectors of attention
    sinks are kept apart, as some closed forms exclude them.

    Parameters
    ----------
    provenance
        The model and the examples.
    configs
        Closed forms.
    layers
        The layers to map onto the last.
    norm
        The model's standardisation, for standardised vectors.
    """

    def __init__(
        self,
        provenance: Provenance,
        configs: Sequence[LensConfig],
        *,
        layers: Sequence[int],
        norm: Standardisation | None = None,
    ) -> None:
        identity = provenance.identity
        self.provenance, self.norm, self.configs, self.layers = provenance, norm, configs, layers
        self._last, width = f"h.{identity.n_layers}", identity.d_model
        sites = [f"h.{layer}" for layer in layers]
        self._sums = {
            kind: {site: LeastSquares(width, {self._last: width}, source=site) for site in sites}
            for kind in dict.fromkeys(map(_kind, configs))
        }
        self._sinks: Rows = dict.fromkeys([*sites, self._last], torch.empty(0, width)) | {
            "keys": torch.empty(0, dtype=torch.long), "weights": torch.empty(0, dtype=torch.float64)
        }  # fmt: skip
        self._held_out = self._sinks

    def update(self, rows: Mapping[str, Tensor]) -> Self:
        """Add samples.

        Parameters
        ----------
        rows
            One row per token: vectors by site, ``[n, d_model]``, and of each ``[n]`` its ``weights``, whether
            it is one of the ``sinks``, and ``keys``, by which leave-one-out samples.
        """
        used = {name: rows[name] for name in self._sinks}
        self._sinks = _join(self._sinks, _take(used, rows["sinks"]))
        others = _take(used, ~rows["sinks"])
        for kind, sums in self._sums.items():
            self._add(sums, kind, others)
        if any(config.ridge in (0, "loo") for config in self.configs):  # 0: whether the fit follows noise
            self._held_out = _smallest_keys(_join(self._held_out, others))
        return self

    def _add(self, sums: Mapping[str, LeastSquares], kind: str, rows: Rows) -> None:
        y, weights = self._entering(rows[self._last], kind), self._weights(rows, kind)
        for site, of_site in sums.items():
            of_site.update(self._entering(rows[site], kind), y, weights=weights)

    def _entering(self, vectors: Tensor, kind: str) -> Tensor:
        vectors = in_float64(vectors)
        return self.norm(vectors) if kind == "standardised" and self.norm is not None else vectors

    def _weights(self, rows: Rows, kind: str) -> Tensor:
        if kind != "weighted":
            return rows["weights"]
        squares = in_float64(rows[self._last]).square().sum(1)
        return rows["weights"].to(squares.device) * torch.where(squares > 0, 1 / squares, 0)

    def reduce(self) -> Self:
        """Add the samples of all other processes, in rank order; all then have the whole."""
        if parallel.world_size() > 1:
            for sums in self._sums.values():
                for site, of_site in sums.items():
                    sums[site] = of_site.reduce(to_all=True)
            self._sinks = parallel.concatenate(self._sinks, "samples of sinks")
            self._held_out = _smallest_keys(parallel.concatenate(self._held_out, "held-out samples"))
        return self

    def solve(self, configs: Sequence[LensConfig] | None = None) -> dict[str, LensMaps]:
        """Maps of all layers by name, of all closed forms or some; warns once of fits that follow noise."""
        configs, noisy = self.configs if configs is None else configs, list[NoisyFit]()
        solved = {config.name: self._solve(config, noisy) for config in configs}
        warn_of_noise(noisy, sum(1 if config.shared_map else len(self.layers) for config in configs))
        return solved

    def _solve(self, config: LensConfig, noisy: list[NoisyFit]) -> LensMaps:
        kind, sums, held_out = _kind(config), self._sums[_kind(config)], self._held_out
        sums = {site: copy.copy(of_site) for site, of_site in sums.items()}
        if config.sinks == "include":
            self._add(sums, kind, self._sinks)
            held_out = _smallest_keys(_join(held_out, self._sinks))
        details: dict[str, Any] = {"method": config.name, "n_fitted": next(iter(sums.values())).n}
        y, weights = self._entering(held_out[self._last], kind), self._weights(held_out, kind)
        linears: dict[str, LinearMap] = {}
        ridges: dict[str, float] = {}
        for sites in [list(sums)] if config.shared_map else [[site] for site in sums]:
            of_group, *others = (sums[site] for site in sites)
            for other in others:
                other.source = of_group.source
                of_group.merge(other)
            x = torch.cat([self._entering(held_out[site], kind) for site in sites])
            samples = x, y.repeat(len(sites), 1), weights.repeat(len(sites))
            linear, ridge = solve(config, of_group, *samples)
            linears |= {site: replace(linear, source=site) for site in sites}
            ridges |= {site.removeprefix("h."): ridge for site in sites}
            if config.ridge == 0:
                names, given = [f"{config.name} at {of_group.source}"], [(x, [samples[1]], samples[2])]
                noisy += noise_of_fit(of_group, given, names, intercept=config.intercept)
        if config.sinks == "exclude":
            details["n_sinks"] = len(self._sinks["keys"])
        if config.ridge == "loo":
            details["strengths"] = ridges
        provenance = self.provenance.with_details(**details)
        fitted = (replace(linear, provenance=provenance) for linear in linears.values())
        maps = dict(zip(self.layers, fitted, strict=True))
        return LensMaps(maps, config.name, provenance, self.norm if config.standardise else None)


def _kind(config: LensConfig) -> str:
    """Which sums a closed form is solved from."""
    return "standardised" if config.standardise else "weighted" if config.weighted else "plain"


def lens_least_squares(
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
) -> LensLeastSquares:
    """Statistics for closed forms by one pass over the data, which several processes divide; see `Lens.fit`.

    Where a closed form excludes sinks, a pass before it finds them.
    """
    norm = Standardisation.from_model(model) if any(config.standardise for config in configs) else None
    identity = ModelIdentity.from_model(model)
    if isinstance(data, Activations):
        data.provenance.check_same(identity, ours="the activations")
        provenance, examples, positions = data.provenance, data.examples, data.positions
    else:
        provenance, examples = Provenance(identity, data.provenance, data.fingerprint, positions), data
    keys = torch.from_numpy(row_keys(examples, sampled=positions == "sampled"))
    chosen = Selection.parse(rows, weights, len(keys))
    if chosen is not None:
        provenance = provenance.with_details(**chosen.details)
    job = [provenance.to_json(), [config.name for config in configs], list(layers)]
    parallel.check_same(job, "the job of lenses")
    sinks = torch.zeros(len(keys), dtype=torch.bool)
    if any(config.sinks == "exclude" for config in configs):
        sinks = _find_sinks(model, data, positions, batch_tokens, progress)
    statistics = LensLeastSquares(provenance, configs, layers=layers, norm=norm)
    sites = [f"h.{layer}" for layer in (*layers, identity.n_layers)]
    if isinstance(data, Activations):
        batches = data.shards(sites, divided=True)
    else:
        batches = stream(
            model, examples, sites, positions=positions, batch_tokens=batch_tokens, progress=progress,
            divided=True,
        )  # fmt: skip
    chunk, waiting, n_waiting = max(_CHUNK, 4 * identity.d_model), list[Rows](), 0
    for batch in batches:
        part: Rows = {site: vectors.float() for site, vectors in batch.vectors.items()}
        part |= {"sinks": sinks[batch.index], "keys": keys[batch.index]}
        of_part = None
        if chosen is not None:
            part, of_part = chosen.part(batch.index).apply(part)
        part["weights"] = torch.ones(len(part["keys"])).double() if of_part is None else of_part
        waiting.append(part)
        n_waiting += len(part["keys"])
        if n_waiting >= chunk:
            statistics.update(_join(*waiting))
            waiting, n_waiting = [], 0
    if n_waiting:
        statistics.update(_join(*waiting))
    return statistics.reduce()


def _find_sinks(
    model: TransformerBridge, data: Examples | Activations, positions: Positions, batch_tokens: int | None,
    progress: bool,
) -> Bool[Tensor, " n"]:  # fmt: skip
    """Which samples are attention sinks."""
    if isinstance(data, Activations):
        sites = layers_read([LensConfig(sinks="exclude")], [], data.provenance.identity.n_layers)
        return outlying_rows(torch.stack([data[s].norm(dim=1).cpu() for s in sites], 1), places=data.places)
    sinks = find_sinks(model, data, batch_tokens=batch_tokens, progress=progress)
    sentences, places = data.sentences, data.positions
    if positions == "all":
        sentences, places = np.repeat(np.arange(len(data)), data.lengths), data.places
    return sinks[torch.from_numpy(sentences), torch.from_numpy(places)]


def row_keys(examples: Examples, *, sampled: bool) -> np.ndarray:
    """A number for each sample, as good as random, that depends on its sentence and place alone."""
    firsts = []
    for start, end in itertools.pairwise(examples.offsets.tolist()):
        content = np.asarray(examples.tokens[start:end], "<i8").tobytes()
        firsts.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))
    of_sentence = np.asarray(firsts, np.uint64)
    counts = examples.lengths
    sentences = examples.sentences if sampled else np.repeat(np.arange(len(counts)), counts)
    places = np.asarray(examples.positions if sampled else examples.places, np.uint64)
    with np.errstate(over="ignore"):  # splitmix64
        keys = of_sentence[sentences] + (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (keys >> np.uint64(1)).astype(np.int64)
