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
from matlens.activations.sinks import FACTOR, outlying_rows
from matlens.data.corpus import Corpus
from matlens.data.examples import Examples
from matlens.data.making import make_examples
from matlens.errors import InputError, PositiveInt, Seed, checked
from matlens.lens.config import LensConfig, Method, closed_forms, layers_read, resolve_layers
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
# Of the median norm: longer samples, and first tokens longer than that, are set aside as they may be sinks.
_LONG, _LONG_FIRST = FACTOR / 4, 1.5
Rows = dict[str, Tensor]
"""Samples: vectors by site, and ``places``, ``keys`` and ``weights``, one row per sample."""


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
        if bias is not None:  # of the centred fit, whose mean is kept whole
            x_mean, y_mean, _ = sums.means()
            bias = y_mean - weight @ (right @ x_mean)
    parts = (None if part is None else part.to("cpu", torch.float32).contiguous() for part in (bias, right))
    bias, right = parts
    weight = weight.to("cpu", torch.float32).contiguous()
    return LinearMap(weight, bias, sums.source, next(iter(sums.targets)), right=right), ridge


def leave_one_out(
    sums: LeastSquares, x: Tensor, y: Tensor, weights: Tensor, *, intercept: bool
) -> Float[Tensor, " strengths"]:
    """Squared errors on held-out samples, each by the map fitted on all others, for each of `STRENGTHS`.

    The error of a sample that is left out is that of the fit on all samples, divided by one less its
    leverage: nothing is fitted again. Samples count with their weights.
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


def _least_keys(rows: Rows) -> Rows:
    """The samples of the smallest keys, which are as good as drawn at random."""
    return _take(rows, rows["keys"].sort(stable=True).indices[:_HELD_OUT])


@checked
class LensLeastSquares:
    """What closed forms need of the data: exact, streamed, and nearly independent of how much there is.

    For each layer, and each way of weighing its samples, there is one `LeastSquares`. Which samples are
    attention sinks is known only from the norms of all. So where a method excludes sinks, samples that may be
    some are set aside as they are: long ones, and first tokens that are longer than others,
    ``4 (L + 1) d`` bytes each.

    Parameters
    ----------
    provenance
        The model and the examples.
    methods
        Closed forms, see `Lens.fit`.
    layers
        The layers, by default all but the last.
    norm
        The model's standardisation, for standardised vectors.
    """

    def __init__(
        self,
        provenance: Provenance,
        methods: Method | Sequence[Method],
        *,
        layers: Sequence[int] | None = None,
        norm: Standardisation | None = None,
    ) -> None:
        identity = provenance.identity
        self.provenance, self.norm = provenance, norm
        self.methods = closed_forms(methods)
        self.layers = resolve_layers(layers, identity.n_layers)
        configs = self.methods.values()
        if norm is None and any(config.standardise for config in configs):
            raise InputError("standardise=True needs a norm. Use Standardisation.from_model(model).")
        self._last, width = f"h.{identity.n_layers}", identity.d_model
        fitted = [f"h.{layer}" for layer in self.layers]
        self._finds_sinks = any(config.sinks == "exclude" for config in configs)
        self.sites = [f"h.{layer}" for layer in layers_read(self.methods, self.layers, identity.n_layers)]
        self._sums = {
            kind: {site: LeastSquares(width, {self._last: width}, source=site) for site in fitted}
            for kind in dict.fromkeys(map(_kind, configs))
        }
        # Of all samples, if sinks are excluded: norms at each site, places, and whether they are set aside.
        self._seen = [
            {
                "norms": torch.empty(0, len(self.sites)),
                "places": torch.empty(0, dtype=torch.long),
                "aside": torch.empty(0, dtype=torch.bool),
            }
        ]
        self._medians, self._n_medians = torch.empty(0), 0
        self._aside: Rows = dict.fromkeys([*fitted, self._last], torch.empty(0, width)) | {
            "keys": torch.empty(0, dtype=torch.long), "weights": torch.empty(0, dtype=torch.float64)
        }  # fmt: skip
        self._held_out = self._aside

    def update(self, rows: Mapping[str, Tensor]) -> Self:
        """Add samples, one or more.

        Parameters
        ----------
        rows
            By name, row by row of one token: vectors of ``sites``, ``[n, d_model]``; and ``[n]`` each
            ``places`` in the sentence from 0, by which first tokens are known as sinks, ``keys``, numbers as
            good as random by which leave-one-out samples, and ``weights``. Leave-one-out leaves a sample out
            with all of its weight, and whether it is a sink does not depend on its weight.
        """
        kept = {name: rows[name] for name in self._aside}
        if self._finds_sinks:
            norms = torch.stack([rows[site].norm(dim=1).cpu() for site in self.sites], 1)
            aside = torch.zeros(len(norms), dtype=torch.bool)
            self._seen.append({"norms": norms, "places": rows["places"], "aside": aside})
            n = sum(len(part["aside"]) for part in self._seen)
            if n >= 2 * self._n_medians:  # of all so far at each doubling; sinks are far above them
                self._medians, self._n_medians = _join(*self._seen)["norms"].median(0).values, n
            aside |= (norms > _LONG * self._medians).any(1)
            aside |= (rows["places"] == 0) & (norms > _LONG_FIRST * self._medians).any(1)
            self._aside = _join(self._aside, _take(kept, aside))
            kept = _take(kept, ~aside)
        for kind, sums in self._sums.items():
            self._add(sums, kind, kept)
        if any(config.ridge in (0, "loo") for config in self.methods.values()):
            self._held_out = _least_keys(_join(self._held_out, kept))
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
        """Add what all other processes have seen, in rank order; all then have the whole."""
        if parallel.world_size() > 1:
            for sums in self._sums.values():
                for site, of_site in sums.items():
                    sums[site] = of_site.reduce(to_all=True)
            if self._finds_sinks:
                self._seen = [parallel.concatenate(_join(*self._seen), "norms of samples")]
            self._aside = parallel.concatenate(self._aside, "samples set aside")
            self._held_out = _least_keys(parallel.concatenate(self._held_out, "held-out samples"))
        return self

    def solve(self, methods: Method | Sequence[Method]) -> dict[str, LensMaps]:
        """Maps of all layers by method, from all that has been seen; warns once if they follow noise.

        Raises
        ------
        InputError
            The moments are not for a method, there are no samples, or sinks were not set aside.
        """
        noisy: list[NoisyFit] = []
        configs = closed_forms(methods)
        if absent := [name for name in configs if name not in self.methods]:
            raise InputError(f"methods must be of {', '.join(self.methods)}, got {', '.join(absent)}.")
        solved = {name: self._solve(name, config, noisy) for name, config in configs.items()}
        warn_of_noise(noisy, sum(1 if it.shared_map else len(self.layers) for it in configs.values()))
        return solved

    def _solve(self, name: str, config: LensConfig, noisy: list[NoisyFit]) -> LensMaps:
        kind = _kind(config)
        back, n_sinks = self._without_sinks() if config.sinks == "exclude" else (self._aside, 0)
        sums = {site: copy.copy(of_site) for site, of_site in self._sums[kind].items()}
        self._add(sums, kind, back)
        details: dict[str, Any] = {"method": name, "n_fitted": next(iter(sums.values())).n}
        held_out = _least_keys(_join(self._held_out, back))
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
                names, given = [f"{name} at {of_group.source}"], [(x, [samples[1]], samples[2])]
                noisy += noise_of_fit(of_group, given, names, intercept=config.intercept)
        if config.sinks == "exclude":
            details["n_sinks"] = n_sinks
        if config.ridge == "loo":
            details["strengths"] = ridges
        provenance = self.provenance.with_details(**details)
        fitted = (replace(linear, provenance=provenance) for linear in linears.values())
        maps = dict(zip(self.layers, fitted, strict=True))
        return LensMaps(maps, name, provenance, self.norm if config.standardise else None)

    def _without_sinks(self) -> tuple[Rows, int]:
        """The samples set aside that are no sinks, and how many are sinks."""
        seen = _join(*self._seen)
        sinks = outlying_rows(seen["norms"], places=seen["places"].numpy())
        if bool((sinks & ~seen["aside"]).any()):
            raise InputError(
                "A sink was not set aside, because samples before it were many times longer than those "
                "after it. Expected samples in a mixed order."
            )
        return _take(self._aside, ~sinks[seen["aside"]]), int(sinks.sum())


def _kind(config: LensConfig) -> str:
    """Which sums a method is solved from."""
    return "standardised" if config.standardise else "weighted" if config.weighted else "plain"


@checked
def lens_least_squares(
    model: TransformerBridge,
    data: Corpus | Sequence[str] | Examples | Activations,
    methods: Method | Sequence[Method],
    *,
    positions: Positions = "all",
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    layers: Sequence[int] | None = None,
    seed: Seed = 0,
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> LensLeastSquares:
    """What closed forms need of the data, by one pass over it; the parameters are those of `Lens.fit`.

    Several processes each pass over a part of the data, and all get the whole.
    """
    configs = closed_forms(methods)
    standardise = any(config.standardise for config in configs.values())
    norm = Standardisation.from_model(model) if standardise else None
    identity = ModelIdentity.from_model(model)
    if isinstance(data, Activations):
        data.provenance.check_same(identity, ours="the activations")
        provenance, examples, positions, n = data.provenance, data.examples, data.positions, data.n_rows
    else:
        examples = data if isinstance(data, Examples) else make_examples(model, data, seed=seed)
        provenance = Provenance(identity, examples.provenance, examples.fingerprint, positions)
        n = examples.n_positions if positions == "drawn" else len(examples.tokens)
    chosen = Selection.parse(rows, weights, n)
    if chosen is not None:
        provenance = provenance.with_details(**chosen.details)
    moments = LensLeastSquares(provenance, methods, layers=layers, norm=norm)
    parallel.check_same([provenance.to_json(), list(configs), list(moments.layers)], "the job of lenses")
    if isinstance(data, Activations):
        batches = data.shards(moments.sites, divided=True)
    else:
        batches = stream(
            model, examples, moments.sites, positions=positions, batch_tokens=batch_tokens, progress=progress,
            divided=True,
        )  # fmt: skip
    keys = torch.from_numpy(row_keys(examples, drawn=positions == "drawn"))
    chunk, waiting, n_waiting = max(_CHUNK, 4 * identity.d_model), [], 0
    for batch in batches:
        part: Rows = {site: vectors.float() for site, vectors in batch.vectors.items()}
        part |= {"places": torch.from_numpy(batch.places).long(), "keys": keys[batch.index]}
        of_part = None
        if chosen is not None:
            part, of_part = chosen.part(batch.index).apply(part)
        part["weights"] = torch.ones(len(part["keys"])).double() if of_part is None else of_part
        waiting.append(part)
        n_waiting += len(part["keys"])
        if n_waiting >= chunk:
            moments.update(_join(*waiting))
            waiting, n_waiting = [], 0
    if n_waiting:
        moments.update(_join(*waiting))
    return moments.reduce()


def row_keys(examples: Examples, *, drawn: bool) -> np.ndarray:
    """A number for each sample, as good as random, that depends on its sentence and place alone."""
    firsts = []
    for start, end in itertools.pairwise(examples.offsets.tolist()):
        content = np.asarray(examples.tokens[start:end], "<i8").tobytes()
        firsts.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))
    of_sentence = np.asarray(firsts, np.uint64)
    counts = examples.lengths
    sentences = examples.sentences if drawn else np.repeat(np.arange(len(counts)), counts)
    places = np.asarray(examples.positions if drawn else examples.places, np.uint64)
    with np.errstate(over="ignore"):  # splitmix64
        keys = of_sentence[sentences] + (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (keys >> np.uint64(1)).astype(np.int64)
