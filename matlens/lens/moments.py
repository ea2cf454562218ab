"""What closed forms of lenses need of the data, summed up while they pass by."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens import parallel
from matlens.activations.sinks import FACTOR, outlying_rows
from matlens.errors import InputError, checked, short
from matlens.lens.maps import LayerMap, LensParts, Standardisation
from matlens.lens.medians import RunningMedians
from matlens.lens.methods import HeldRows, Method, Rows, check_methods, solve
from matlens.lens.rows import KeptRows
from matlens.linear.least_squares import LeastSquares, noise_of_fit
from matlens.linear.samples import NoisyFit, check_weights, warn_of_noise
from matlens.models.identity import Provenance
from matlens.models.sites import STREAM, Site
from matlens.numerics.precision import in_float64

_HELD = 1024  # rows of each layer that leave-one-out looks at
_CHUNK = 1024  # rows that are factorised at once; never fewer than four for each coordinate
# Of the median norm: longer rows, and first tokens longer than that, are kept aside as they may be sinks.
_LONG, _LONG_FIRST = FACTOR / 4, 1.5


@checked
class LensMoments:
    """What closed forms of lenses need of the data: exact, and nearly independent of how much there is.

    For each layer, and each way of weighing its rows that a method asks for, there is one `LeastSquares`.
    Whether a row is an attention sink is known only once the norms of all rows are. So where a method leaves
    sinks out, the rows that may be some are kept aside as they are: long ones, and first tokens that are
    longer than others, ``4 (L + 1) d`` bytes each. Parts merge into the whole.

    Parameters
    ----------
    provenance
        The model and the examples.
    methods
        Names of the methods that it is for, see `Lens.fit`.
    layers
        The layers, by default all but the last.
    norm
        The model's standardisation, where a method asks for ``normed``.
    """

    def __init__(
        self,
        provenance: Provenance,
        methods: str | Sequence[str],
        *,
        layers: Sequence[int] | None = None,
        norm: Standardisation | None = None,
    ) -> None:
        identity = provenance.identity
        self.provenance, self.norm = provenance, norm
        self.methods = check_methods(methods)
        self.layers = check_layers(layers, identity.n_layers)
        self._last, self._width = identity.n_layers, identity.d_model
        fitted = [method for method in self.methods.values() if not method.is_identity]
        self._kinds: tuple[Rows, ...] = tuple(dict.fromkeys(method.rows for method in fitted))
        if norm is None and "normed" in self._kinds:
            raise InputError(
                "A method is 'normed', and no norm is given. Expected Standardisation.from_model(model)."
            )
        self._leaves_out = any(not method.sinks for method in fitted)
        self._holds = any(method.leaves_one_out or method.penalty is None for method in fitted)
        self._sets = {
            kind: {layer: self._no_moments(layer) for layer in self.layers} for kind in self._kinds
        }  # fmt: skip
        stream = range(self._last + 1) if self._leaves_out else (*self.layers, self._last)
        self.sites = [str(Site(STREAM, layer)) for layer in stream]
        self._norms = RunningMedians(len(self.sites) if self._leaves_out else 0)
        self._places = [torch.empty(0, dtype=torch.long)]
        self._aside, self._held = self._no_rows(), self._no_rows()
        self._waiting: list[tuple[dict[int, Tensor], Tensor, Tensor, Tensor]] = []
        self._weighted = False  # whether any row counts otherwise than once
        self.n = 0

    def _no_moments(self, layer: int) -> LeastSquares:
        site, last = Site(STREAM, layer), Site(STREAM, self._last)
        return LeastSquares(self._width, self._width, source=str(site), target=str(last))

    def _no_rows(self) -> KeptRows:
        empty, none = torch.empty(0, self._width), torch.empty(0, dtype=torch.long)
        return KeptRows(dict.fromkeys((*self.layers, self._last), empty), none, none)

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
            The stream by site, with those of ``sites``; row by row they are of one token.
        places
            Which token of its sentence each row is, from 0, by which first tokens are known as sinks.
        keys
            A number for each row, looking drawn at random, that says which rows leave-one-out looks at where
            there are more than a thousand; by default the first.
        weights
            How much each row counts, by default 1; see `LeastSquares.update`. Leave-one-out leaves a row out
            with all of its weight, and whether a row is a sink does not hang on weights.

        Raises
        ------
        InputError
            A site is missing, the rows are not as many everywhere, a value is not finite, or a weight is
            negative.
        """
        absent = [site for site in self.sites if site not in vectors]
        if absent:
            raise InputError(
                f"The samples lack {', '.join(absent)}. Expected all of {', '.join(self.sites)}."
            )
        rows = {Site.parse(site).layer: vectors[site].float() for site in self.sites}
        shapes = {tuple(values.shape) for values in rows.values()}
        n = len(next(iter(rows.values())))
        if shapes != {(n, self._width)}:
            raise InputError(
                f"The samples have the shapes {short(sorted(shapes))}. Expected [n, {self._width}]."
            )
        at = (
            torch.ones(n, dtype=torch.long) if places is None else torch.from_numpy(np.asarray(places)).long()
        )
        first = self.n + sum(len(waiting[1]) for waiting in self._waiting)
        of_rows = (
            torch.arange(first, first + n) if keys is None else torch.from_numpy(np.asarray(keys)).long()
        )
        if len(at) != n or len(of_rows) != n:
            raise InputError(
                f"There are {n} samples, {len(at)} places and {len(of_rows)} keys. Expected as many."
            )
        counting = torch.ones(n, dtype=torch.float64)
        if weights is not None:
            counting, self._weighted = check_weights(weights, n).cpu(), True
            if not bool(counting.all()):
                kept = counting > 0
                rows = {layer: values[kept.to(values.device)] for layer, values in rows.items()}
                at, of_rows, counting = at[kept], of_rows[kept], counting[kept]
        self._waiting.append((rows, at, of_rows, counting))
        if sum(len(waiting[1]) for waiting in self._waiting) >= rows_together(self._width):
            self._add_waiting()
        return self

    def _add_waiting(self) -> None:
        if not self._waiting:
            return
        vectors = {
            layer: torch.cat([part[0][layer] for part in self._waiting]) for layer in self._waiting[0][0]
        }
        places = torch.cat([of_part for _, of_part, *_ in self._waiting])
        keys = torch.cat([of_part for _, _, of_part, _ in self._waiting])
        weights = torch.cat([of_part for *_, of_part in self._waiting])
        self._waiting = []
        rows = KeptRows(vectors, keys, torch.arange(self.n, self.n + len(keys)), weights)
        self.n += len(keys)
        if self._leaves_out:
            norms = torch.stack([values.norm(dim=1).cpu() for values in vectors.values()], 1)
            self._norms.add(norms)
            self._places.append(places)
            median = self._norms.medians()
            long = (norms > _LONG * median).any(1) | ((places == 0) & (norms > _LONG_FIRST * median).any(1))
            kept = rows.of_layers(self._aside.vectors)
            self._aside = self._aside.with_rows(kept.chosen(long))
            rows = kept.chosen(~long)
        for kind in self._kinds:
            self._add(self._sets[kind], kind, rows)
        if self._holds:
            held = rows.of_layers(self._held.vectors)
            self._held = self._held.with_rows(held).first_keys(_HELD)

    def _add(self, sets: Mapping[int, LeastSquares], kind: Rows, rows: KeptRows) -> None:
        if not len(rows):
            return
        y, weights = self._entering(rows.vectors[self._last], kind), self._weights(rows, kind)
        y = in_float64(y)
        for layer, moments in sets.items():
            moments.update(self._entering(rows.vectors[layer], kind), y, weights=weights)

    def _entering(self, vectors: Tensor, kind: Rows) -> Tensor:
        if kind != "normed":
            return vectors
        assert self.norm is not None
        return self.norm(in_float64(vectors))

    def _weights(self, rows: KeptRows, kind: Rows) -> Tensor | None:
        device = in_float64(rows.vectors[self._last][:0]).device
        own = rows.weights.to(device) if self._weighted else None
        if kind != "weighted":
            return own
        squares = in_float64(rows.vectors[self._last]).square().sum(1)
        weights = torch.where(squares > 0, 1 / squares, torch.zeros_like(squares))
        return weights if own is None else own * weights

    def merge(self, other: LensMoments) -> Self:
        """Add the samples that another object has seen, of the same model and for the same methods.

        Raises
        ------
        InputError
            It is of another model, or for other methods, layers or another norm.
        """
        self.provenance.check_same(other.provenance, ours="these moments", theirs="those")
        if (self.methods, self.layers, self.norm) != (other.methods, other.layers, other.norm):
            raise InputError(
                f"Moments for {', '.join(other.methods)} at {len(other.layers)} layers cannot be merged into "
                f"those for {', '.join(self.methods)} at {len(self.layers)}. Expected the same methods, "
                "layers and norm."
            )
        self._add_waiting()
        other._add_waiting()
        for kind, sets in self._sets.items():
            for layer, moments in sets.items():
                moments.merge(other._sets[kind][layer])
        self._norms.merge(other._norms)
        self._places += other._places
        self._aside = self._aside.with_rows(other._aside, self.n)
        self._held = self._held.with_rows(other._held, self.n).first_keys(_HELD)
        self.n, self._weighted = self.n + other.n, self._weighted or other._weighted
        return self

    def unite(self) -> Self:
        """Add what every other process has seen, in the order of the processes; all then have the whole.

        Raises
        ------
        InputError
            A process is gone, has failed, or is doing something else.
        """
        if parallel.world_size() == 1:
            return self
        self._add_waiting()
        for sets in self._sets.values():
            for layer, moments in sets.items():
                sets[layer] = moments.reduce(to_all=True)
        seen = torch.tensor([[self.n, int(self._weighted)]])
        counts = parallel.concatenate({"seen": seen}, "samples that were seen")["seen"]
        rows = {"norms": self._norms.rows, "places": torch.cat(self._places)}
        rows = parallel.concatenate(rows, "norms of samples")
        self._norms, self._places = RunningMedians(rows["norms"].shape[1]), [rows["places"]]
        self._norms.add(rows["norms"])
        first = int(counts[: parallel.rank(), 0].sum())
        self._aside = self._aside.of_all(first)
        self._held = self._held.of_all(first).first_keys(_HELD)
        self.n, self._weighted = int(counts[:, 0].sum()), bool(counts[:, 1].any())
        return self

    def solve(self, name: str) -> LensParts:
        """Maps of all layers by a method, from all that has been seen.

        Raises
        ------
        InputError
            The method is not among those that this is for, there are no samples, or sinks among them were not
            kept aside.
        """
        return self.solve_all([name])[name]

    def solve_all(self, names: Sequence[str]) -> dict[str, LensParts]:
        """Maps of all layers by several methods, with one `InputWarning` if they follow noise.

        Raises
        ------
        InputError
            As `solve`.
        """
        noisy: list[NoisyFit] = []
        solved = {name: self._solve(name, noisy) for name in names}
        fitted = [self.methods[name] for name in names if not self.methods[name].is_identity]
        warn_of_noise(noisy, sum(1 if method.shared else len(self.layers) for method in fitted))
        return solved

    def _solve(self, name: str, noisy: list[NoisyFit]) -> LensParts:
        if name not in self.methods:
            raise InputError(
                f"{short(name)} is not among the methods that these moments are for, which are "
                f"{', '.join(self.methods)}."
            )
        method = self.methods[name]
        if method.is_identity:
            return LensParts(dict.fromkeys(self.layers, LayerMap()), name, self.provenance, None)
        self._add_waiting()
        back, n_sinks = self._rows_of(method)
        details: dict[str, Any] = {"method": name, "n_fitted": self.n - n_sinks}
        if not method.sinks:
            details["n_sinks"] = n_sinks
        sets = self._whole_sets(method, back)
        held = self._held.with_rows(back).first_keys(_HELD)
        maps: dict[int, LayerMap] = {}
        strengths: dict[int, float | None] = {}
        groups = {self.layers: _union(sets.values())} if method.shared else {(a,): sets[a] for a in sets}
        for layers, moments in groups.items():
            rows = self._held_rows(method, held, layers)
            solution = solve(method, moments, rows)
            maps |= dict.fromkeys(layers, solution.map)
            strengths |= dict.fromkeys(layers, solution.strength)
            if method.penalty is None:
                samples = [(rows.x, [rows.y], rows.weights)]
                name_of = [f"{name} at {moments.source}"]
                noisy += noise_of_fit(moments, samples, name_of, intercept=method.intercept)
        if method.leaves_one_out:
            details["strengths"] = {str(layer): strength for layer, strength in strengths.items()}
        norm = self.norm if method.normed else None
        return LensParts(maps, name, self.provenance.with_details(**details), norm)

    def _rows_of(self, method: Method) -> tuple[KeptRows, int]:
        """The rows kept aside that a method is fitted on after all, and how many sinks it leaves out."""
        if method.sinks or not self._leaves_out:
            return self._aside, 0
        sinks = outlying_rows(self._norms.rows, places=torch.cat(self._places).numpy())
        known = torch.zeros(self.n, dtype=torch.bool)
        known[self._aside.index] = True
        if bool((sinks & ~known).any()):
            raise InputError(
                "A sink was not kept aside, because rows before it were many times longer than those after "
                "it. Expected samples in a mixed order."
            )
        return self._aside.chosen(~sinks[self._aside.index]), int(sinks.sum())

    def _whole_sets(self, method: Method, back: KeptRows) -> dict[int, LeastSquares]:
        sets = {layer: copy.copy(moments) for layer, moments in self._sets[method.rows].items()}
        self._add(sets, method.rows, back)
        return sets

    def _held_rows(self, method: Method, held: KeptRows, layers: Sequence[int]) -> HeldRows:
        y, weights = self._entering(held.vectors[self._last], method.rows), self._weights(held, method.rows)
        x = torch.cat([self._entering(held.vectors[layer], method.rows) for layer in layers])
        many = len(layers)
        return HeldRows(x, y.repeat(many, 1), None if weights is None else weights.repeat(many))


def _union(sets: Any) -> LeastSquares:
    """The moments of the rows of all layers."""
    whole, *others = [copy.copy(moments) for moments in sets]
    for moments in others:
        moments.source = whole.source
        whole.merge(moments)
    return whole


def rows_together(width: int) -> int:
    """How many rows of a width are factorised at once."""
    return max(_CHUNK, 4 * width)


def check_layers(layers: Sequence[int] | None, n_layers: int) -> tuple[int, ...]:
    """Numbers of the layers that are asked for, ascending and without the last; by default all of these.

    Raises
    ------
    InputError
        One is none, or none is left.
    """
    if layers is None:
        return tuple(range(n_layers))
    numbers = sorted({Site.parse(layer, n_layers).layer for layer in layers} - {n_layers})
    if not numbers:
        raise InputError(f"The layers are {short(layers)}. Expected one or more of 0 to {n_layers - 1}.")
    return tuple(numbers)
