"""Lenses in closed form: least squares of every layer onto the last, from one pass over the data."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import stream
from matlens.activations.sinks import FACTOR, outlying_rows
from matlens.data.corpus import Corpus
from matlens.data.corpus_examples import make_examples
from matlens.data.examples import Examples
from matlens.errors import InputError, PositiveInt, Seed, checked, short
from matlens.lens.config import LensConfig, Method, closed_forms, resolve_layers
from matlens.lens.maps import LayerMap, LensParts, Standardisation
from matlens.linear.least_squares import LeastSquares, noise_of_fit
from matlens.linear.samples import Chosen, NoisyFit, check_weights, warn_of_noise
from matlens.models.identity import ModelIdentity, Provenance
from matlens.numerics.precision import in_float64

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

STRENGTHS = tuple(10.0 ** (half / 2) for half in range(-20, 5))
"""Penalties that leave-one-out chooses from, in units of ``mean diag(X'X)``."""
_HELD_OUT = 1024  # samples that leave-one-out looks at
_CHUNK = 1024  # samples that are factorised at once; never fewer than four for each dimension
# Of the median norm: longer samples, and first tokens longer than that, are set aside as they may be sinks.
_LONG, _LONG_FIRST = FACTOR / 4, 1.5


# One layer


class HeldOut(NamedTuple):
    """Some samples of a layer, as they entered its least squares, and their weights."""

    x: Tensor
    y: Tensor
    weights: Tensor | None


class Solution(NamedTuple):
    """A layer's map, and the penalty that it has, in units of ``mean diag(X'X)``."""

    map: LayerMap
    ridge: float


def solve(config: LensConfig, sums: LeastSquares, held_out: HeldOut | None = None) -> Solution:
    """The map of a closed form; leave-one-out chooses a penalty by some of the samples in the sums."""
    if config.ridge == "loo":
        assert held_out is not None
        ridge = STRENGTHS[int(leave_one_out(config, sums, held_out, STRENGTHS).argmin())]
    else:
        ridge = config.ridge
    weight, bias, root = _full_rank(config, sums, ridge)
    if config.rank is None or config.rank >= len(weight):
        return Solution(LayerMap(_stored(weight), bias=None if bias is None else _stored(bias)), ridge)
    # The fitted values are the rows of a rotation of root @ weight.T.
    directions = torch.linalg.svd(root @ weight.T, full_matrices=False).Vh[: config.rank]
    if bias is not None:  # of the centred fit, whose mean is kept whole
        x_mean, y_mean, _ = sums.means()
        bias = _stored(y_mean - directions.T @ (directions @ (weight @ x_mean)))
    return Solution(LayerMap(_stored(directions.T), _stored(directions @ weight), bias), ridge)


def _stored(values: Tensor) -> Tensor:
    return values.to("cpu", torch.float32).contiguous()


def _full_rank(config: LensConfig, sums: LeastSquares, ridge: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weight, bias, and the factor of the samples that the weight is applied to."""
    r, z = sums.factors(centred=config.intercept)
    penalty = ridge * float(r.square().sum()) / r.shape[1]
    if config.toward == "zero":
        weight, bias = sums.solution(intercept=config.intercept, ridge=penalty)
        return weight, bias, r
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    weight = torch.eye(r.shape[1]).to(r) + _shrunk(u, s, vh, z - r, penalty).T
    if not config.intercept:
        return weight, None, r
    x_mean, y_mean, _ = sums.means()
    return weight, y_mean - weight @ x_mean, r


def _shrunk(u: Tensor, s: Tensor, vh: Tensor, z: Tensor, ridge: float) -> Tensor:
    """The solution of ``min ||r a - z||^2 + ridge ||a||^2`` from the singular values of ``r``."""
    least = torch.finfo(s.dtype).eps * max(len(s), 1) * s.max()
    gain = torch.where(s > least, s / (s.square() + ridge), torch.zeros_like(s))
    return vh.T @ (gain[:, None] * (u.T @ z))


def leave_one_out(
    config: LensConfig, sums: LeastSquares, held_out: HeldOut, strengths: Sequence[float]
) -> Tensor:
    """Squared errors on held-out samples, each by the map fitted on all others, for each penalty.

    The error of a sample that is left out is that of the fit on all samples, divided by one less its
    leverage: nothing is fitted again. Samples count with their weights.
    """
    r, z = sums.factors(centred=config.intercept)
    x, y = held_out.x.to(r), held_out.y.to(r)
    weights = x.new_ones(len(x)) if held_out.weights is None else held_out.weights.to(r)
    constant = x.new_zeros(len(x))
    if config.intercept:
        x_mean, y_mean, total = sums.means()
        x, y = x - x_mean, y - y_mean
        constant = weights / total
    if config.toward == "identity":
        y, z = y - x, z - r
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    rotated, loadings = x @ vh.T, u.T @ z
    unit = float(r.square().sum()) / r.shape[1]
    errors = []
    for strength in strengths:
        gain = 1 / (s.square() + strength * unit)
        leverage = constant + weights * (rotated.square() * gain).sum(1)
        residual = y - rotated @ ((s * gain)[:, None] * loadings)
        rest = (1 - leverage).clamp(min=torch.finfo(s.dtype).eps)
        errors.append((weights * (residual / rest[:, None]).square().sum(1)).sum())
    return torch.stack(errors)


# All layers

Rows = dict[str, Tensor]
"""Samples: vectors by site, and ``places``, ``keys``, ``weights`` and ``index``, one row per sample."""


def _take(rows: Rows, chosen: Tensor) -> Rows:
    return {name: values[chosen.to(values.device)] for name, values in rows.items()}


def _join(first: Rows, second: Rows) -> Rows:
    return {name: torch.cat([values, second[name]]) for name, values in first.items()}


def _least_keys(rows: Rows) -> Rows:
    """The samples of the smallest keys, which are as good as drawn at random."""
    if len(rows["keys"]) <= _HELD_OUT:
        return rows
    return _take(rows, rows["keys"].sort(stable=True).indices[:_HELD_OUT])


@checked
class LensMoments:
    """What closed forms need of the data: exact, streamed, and nearly independent of how much there is.

    For each layer, and each way of weighing its samples, there is one `LeastSquares`. Which samples are
    attention sinks is known only from the norms of all. So where a method excludes sinks, samples that may be
    some are set aside as they are: long ones, and first tokens that are longer than others,
    ``4 (L + 1) d`` bytes each. Parts merge into the whole.

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
        self._last, self._width = f"h.{identity.n_layers}", identity.d_model
        configs = self.methods.values()
        if norm is None and any(config.standardise for config in configs):
            raise InputError("standardise=True needs a norm. Use Standardisation.from_model(model).")
        self._finds_sinks = any(config.sinks == "exclude" for config in configs)
        stream = range(identity.n_layers) if self._finds_sinks else self.layers
        self.sites = [*(f"h.{layer}" for layer in stream), self._last]
        self._sums = {
            kind: {
                layer: LeastSquares(self._width, {self._last: self._width}, source=f"h.{layer}")
                for layer in self.layers
            }
            for kind in dict.fromkeys(map(_kind, configs))
        }
        self._norms, self._places = [torch.empty(0, len(self.sites))], [torch.empty(0, dtype=torch.long)]
        self._medians, self._n_medians = torch.empty(0), 0
        fitted = (*(f"h.{layer}" for layer in self.layers), self._last)
        self._names = (*fitted, "keys", "weights", "index")
        none = torch.empty(0, dtype=torch.long)
        self._aside: Rows = dict.fromkeys(fitted, torch.empty(0, self._width)) | {
            "keys": none, "weights": none.double(), "index": none
        }  # fmt: skip
        self._held_out = self._aside
        self._waiting: list[Rows] = []
        self._weighted = False  # whether any sample counts otherwise than once
        self.n = 0

    def update(
        self,
        vectors: Mapping[str, Float[Tensor, "n d"]],
        *,
        places: Int[np.ndarray, " n"] | None = None,
        keys: Int[np.ndarray, " n"] | None = None,
        weights: Float[Tensor, " n"] | None = None,
    ) -> Self:
        """Add samples.

        Parameters
        ----------
        vectors
            The stream at the sites of ``sites``; row by row they are of one token.
        places
            Which token of its sentence each sample is, from 0, by which first tokens are known as sinks.
        keys
            A number for each sample, as good as random, that says which ones leave-one-out looks at; by
            default the first thousand.
        weights
            How much each sample counts, by default 1; see `LeastSquares.update`. Leave-one-out leaves it out
            with all of its weight, and whether it is a sink does not depend on its weight.

        Raises
        ------
        InputError
            A site is missing, shapes differ, a value is not finite, or a weight is negative.
        """
        if absent := [site for site in self.sites if site not in vectors]:
            raise InputError(
                f"The samples lack {', '.join(absent)}. Expected all of {', '.join(self.sites)}."
            )
        rows: Rows = {site: vectors[site].float() for site in self.sites}
        n = len(rows[self._last])
        first = self.n + sum(len(waiting["keys"]) for waiting in self._waiting)
        rows["places"] = torch.ones(n).long() if places is None else torch.from_numpy(places).long()
        rows["keys"] = torch.arange(first, first + n) if keys is None else torch.from_numpy(keys).long()
        rows["weights"] = torch.ones(n).double() if weights is None else check_weights(weights, n).cpu()
        shapes = {name: tuple(values.shape) for name, values in rows.items()}
        if any(shape != ((n, self._width) if name in self.sites else (n,)) for name, shape in shapes.items()):
            raise InputError(f"vectors must be [n, {self._width}] and the others [n], got {shapes}.")
        if weights is not None:
            self._weighted = True
            rows = _take(rows, rows["weights"] > 0)
        self._waiting.append(rows)
        if first + n - self.n >= chunk_size(self._width):
            self._add_waiting()
        return self

    def _add_waiting(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        rows = {name: torch.cat([part[name] for part in waiting]) for name in waiting[0]}
        rows["index"] = torch.arange(self.n, self.n + len(rows["keys"]))
        self.n += len(rows["keys"])
        kept = {name: rows[name] for name in self._names}
        if self._finds_sinks:
            norms = torch.stack([rows[site].norm(dim=1).cpu() for site in self.sites], 1)
            self._norms.append(norms)
            self._places.append(rows["places"])
            if self.n >= 2 * self._n_medians:  # of all so far at each doubling; sinks are far above them
                self._medians, self._n_medians = torch.cat(self._norms).median(0).values, self.n
            long = (norms > _LONG * self._medians).any(1)
            long |= (rows["places"] == 0) & (norms > _LONG_FIRST * self._medians).any(1)
            self._aside = _join(self._aside, _take(kept, long))
            kept = _take(kept, ~long)
        for kind, sums in self._sums.items():
            self._add(sums, kind, kept)
        if any(config.ridge in (0, "loo") for config in self.methods.values()):
            self._held_out = _least_keys(_join(self._held_out, kept))

    def _add(self, sums: Mapping[int, LeastSquares], kind: str, rows: Rows) -> None:
        if not len(rows["keys"]):
            return
        y, weights = in_float64(self._entering(rows[self._last], kind)), self._weights(rows, kind)
        for layer, of_layer in sums.items():
            of_layer.update(self._entering(rows[f"h.{layer}"], kind), y, weights=weights)

    def _entering(self, vectors: Tensor, kind: str) -> Tensor:
        if kind != "standardised":
            return vectors
        assert self.norm is not None
        return self.norm(in_float64(vectors))

    def _weights(self, rows: Rows, kind: str) -> Tensor | None:
        if kind != "weighted" and not self._weighted:
            return None
        squares = in_float64(rows[self._last]).square().sum(1)
        own = rows["weights"].to(squares.device)
        if kind != "weighted":
            return own
        return own * torch.where(squares > 0, 1 / squares, torch.zeros_like(squares))

    def merge(self, other: LensMoments) -> Self:
        """Add the samples that another object has seen, of the same model and for the same methods."""
        self.provenance.check_same(other.provenance, ours="these moments", theirs="those")
        if (self.methods, self.layers, self.norm) != (other.methods, other.layers, other.norm):
            raise InputError(
                f"Moments for {', '.join(other.methods)} at {len(other.layers)} layers cannot be merged into "
                f"those for {', '.join(self.methods)} at {len(self.layers)}. Expected the same methods, "
                "layers and norm."
            )
        self._add_waiting()
        other._add_waiting()
        for kind, sums in self._sums.items():
            for layer, of_layer in sums.items():
                of_layer.merge(other._sums[kind][layer])
        self._norms += other._norms
        self._places += other._places
        self._n_medians = 0
        offset = self.n
        self._aside = _join(self._aside, other._aside | {"index": other._aside["index"] + offset})
        self._held_out = _least_keys(_join(self._held_out, other._held_out))
        self.n, self._weighted = self.n + other.n, self._weighted or other._weighted
        return self

    def unite(self) -> Self:
        """Add what all other processes have seen, in rank order; all then have the whole."""
        if parallel.world_size() == 1:
            return self
        self._add_waiting()
        for sums in self._sums.values():
            for layer, of_layer in sums.items():
                sums[layer] = of_layer.reduce(to_all=True)
        seen = torch.tensor([[self.n, int(self._weighted)]])
        counts = parallel.concatenate({"seen": seen}, "samples that were seen")["seen"]
        rows = {"norms": torch.cat(self._norms), "places": torch.cat(self._places)}
        rows = parallel.concatenate(rows, "norms of samples")
        self._norms, self._places, self._n_medians = [rows["norms"]], [rows["places"]], 0
        offset = int(counts[: parallel.rank(), 0].sum())
        aside = self._aside | {"index": self._aside["index"] + offset}
        self._aside = parallel.concatenate(aside, "samples set aside")
        self._held_out = _least_keys(parallel.concatenate(self._held_out, "held-out samples"))
        self.n, self._weighted = int(counts[:, 0].sum()), bool(counts[:, 1].any())
        return self

    def solve(self, methods: Method | Sequence[Method]) -> dict[str, LensParts]:
        """Maps of all layers by method, from all that has been seen; warns once if they follow noise.

        Raises
        ------
        InputError
            The moments are not for a method, there are no samples, or sinks were not set aside.
        """
        noisy: list[NoisyFit] = []
        configs = closed_forms(methods)
        solved = {name: self._solve(name, noisy) for name in configs}
        warn_of_noise(noisy, sum(1 if it.shared_map else len(self.layers) for it in configs.values()))
        return solved

    def _solve(self, name: str, noisy: list[NoisyFit]) -> LensParts:
        if name not in self.methods:
            raise InputError(
                f"{short(name)} is not among the methods that these moments are for, which are "
                f"{', '.join(self.methods)}."
            )
        config = self.methods[name]
        kind = _kind(config)
        self._add_waiting()
        back, n_sinks = self._aside, 0
        if config.sinks == "exclude":
            back, n_sinks = self._without_sinks()
        sums = {layer: copy.copy(of_layer) for layer, of_layer in self._sums[kind].items()}
        self._add(sums, kind, back)
        held_out = _least_keys(_join(self._held_out, back))
        y, weights = self._entering(held_out[self._last], kind), self._weights(held_out, kind)
        groups = {self.layers: _union(sums.values())} if config.shared_map else {(a,): sums[a] for a in sums}
        maps: dict[int, LayerMap] = {}
        ridges: dict[str, float] = {}
        for layers, of_group in groups.items():
            n = len(layers)
            x = torch.cat([self._entering(held_out[f"h.{layer}"], kind) for layer in layers])
            samples = HeldOut(x, y.repeat(n, 1), None if weights is None else weights.repeat(n))
            solution = solve(config, of_group, samples)
            maps |= dict.fromkeys(layers, solution.map)
            ridges |= dict.fromkeys(map(str, layers), solution.ridge)
            if config.ridge == 0:
                names = [f"{name} at {of_group.source}"]
                given = [(samples.x, [samples.y], samples.weights)]
                noisy += noise_of_fit(of_group, given, names, intercept=config.intercept)
        details: dict[str, Any] = {"method": name, "n_fitted": self.n - n_sinks}
        if config.sinks == "exclude":
            details["n_sinks"] = n_sinks
        if config.ridge == "loo":
            details["strengths"] = ridges
        norm = self.norm if config.standardise else None
        return LensParts(maps, name, self.provenance.with_details(**details), norm)

    def _without_sinks(self) -> tuple[Rows, int]:
        """The samples set aside that are no sinks, and how many are sinks."""
        sinks = outlying_rows(torch.cat(self._norms), places=torch.cat(self._places).numpy())
        known = torch.zeros(self.n, dtype=torch.bool)
        known[self._aside["index"]] = True
        if bool((sinks & ~known).any()):
            raise InputError(
                "A sink was not set aside, because samples before it were many times longer than those "
                "after it. Expected samples in a mixed order."
            )
        return _take(self._aside, ~sinks[self._aside["index"]]), int(sinks.sum())


def _kind(config: LensConfig) -> str:
    """Which sums a method is solved from."""
    return "standardised" if config.standardise else "weighted" if config.weighted else "plain"


def _union(sums: Iterable[LeastSquares]) -> LeastSquares:
    """The sums of the samples of all layers."""
    whole, *others = map(copy.copy, sums)
    for other in others:
        other.source = whole.source
        whole.merge(other)
    return whole


def chunk_size(width: int) -> int:
    """How many samples of a width are factorised at once."""
    return max(_CHUNK, 4 * width)


@checked
def lens_moments(
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
) -> LensMoments:
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
    chosen = Chosen.of(rows, weights, n)
    if chosen is not None:
        provenance = provenance.with_details(**chosen.details)
    moments = LensMoments(provenance, methods, layers=layers, norm=norm)
    parallel.check_same([provenance.to_json(), list(configs), list(moments.layers)], "the job of lenses")
    keys = row_keys(examples, drawn=positions == "drawn")
    if isinstance(data, Activations):
        absent = [site for site in moments.sites if site not in data]
        if absent:
            raise InputError(
                f"The activations lack {', '.join(absent[:4])}. Expected the stream at every layer that is "
                "fitted and at the last one; where sinks are left out, at all layers."
            )
        batches = data.shards(moments.sites, divided=True)
    else:
        batches = stream(
            model, examples, moments.sites, positions=positions, batch_tokens=batch_tokens, progress=progress,
            divided=True,
        )  # fmt: skip
    for batch in batches:
        of_batch = keys[batch.index]
        if chosen is None:
            moments.update(batch.vectors, places=batch.places, keys=of_batch)
            continue
        kept, of_kept = chosen.of_batch(batch.index)
        if bool(kept.any()):
            at = kept.numpy()
            moments.update(
                _take(dict(batch.vectors), kept), places=batch.places[at], keys=of_batch[at], weights=of_kept
            )
    return moments.unite()


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
