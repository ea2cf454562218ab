"""Sets of linear maps of one model, in memory or in a folder that is read lazily."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations
from matlens.data.overlap import fitted_on_any
from matlens.errors import InputError, NonNegative, checked
from matlens.io.artifact import Artifact
from matlens.linear.fitting import fit_samples, fitting_bar
from matlens.linear.maps import LinearMap
from matlens.linear.pairs import Pairs, both_ends, by_source, resolve_pairs
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.sites import Site

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

CONVENTION = "h.0 enters block 0, h.l leaves block l-1, h.L enters the final norm"
HOLDS = "maps"


@checked
class MapSet(Mapping[tuple[str, str], LinearMap]):
    """Maps by ``(source, target)``, in memory or read from a folder one at a time.

    ``maps[3, 30]`` is the map between two layers of the residual stream, ``maps[3, -1]`` that onto the last
    one, and ``maps["ln1_out.3", "attn_out.3"]`` one between other sites. The provenance is by default what
    those of all maps have in common, and a folder has that alone.
    """

    def __init__(self, maps: Iterable[LinearMap] = (), *, provenance: Provenance | None = None) -> None:
        given = [_with_names(linear) for linear in maps]
        if provenance is not None and provenance.model is not None:  # of maps made by hand, the set knows it
            given = [replace(m, provenance=provenance) if m.provenance.model is None else m for m in given]
        self._maps: dict[tuple[str, str], LinearMap | Artifact] = {(m.source, m.target): m for m in given}
        if len(self._maps) < len(given):
            raise InputError(f"maps must be one for each pair, got {len(given)} of {len(self._maps)} pairs.")
        known = [m for m in given if m.provenance.model is not None]
        for other in known[1:]:
            known[0].provenance.check_same(
                other.provenance,
                ours=f"the map onto {known[0].target}",
                theirs=f"the map onto {other.target}",
            )
        if provenance is None and given:
            provenance = _common([linear.provenance for linear in given])
        self.provenance = provenance or Provenance()
        self._device = torch.device("cpu")  # of maps that are read

    def __repr__(self) -> str:
        pairs, model = list(self._maps), self.provenance.model
        ends = [f"{source} -> {target}" for source, target in pairs[:1] + pairs[1:][-1:]]
        of = "unknown model" if model is None else repr(model.name)
        return f"MapSet({len(pairs)} maps: {' .. '.join(ends)}, {of})"

    def __getitem__(self, pair: tuple[Any, Any]) -> LinearMap:
        source, target = self._names(pair)
        stored = self._maps.get((source, target))
        if stored is None:
            raise KeyError(f"There is no map {source} -> {target} in {self}.")
        if isinstance(stored, LinearMap):
            return stored
        bias = stored.read(source, f"{target}/bias") if f"{target}/bias" in stored.tensors(source) else None
        return LinearMap(stored.read(source, target), bias, source, target, self.provenance).to(self._device)

    def __contains__(self, pair: object) -> bool:
        """Whether there is a map, without reading it."""
        try:
            return isinstance(pair, tuple) and self._names(pair) in self._maps
        except InputError:  # an unknown site
            return False

    def _names(self, pair: Any) -> tuple[str, str]:
        """Names of both sites; negative layers count from the end of the model."""
        source, target = both_ends(pair)
        return str(self.provenance.resolve(source)), str(self.provenance.resolve(target))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    @classmethod
    def fit(
        cls,
        activations: Activations,
        *,
        pairs: Pairs = "last",
        rows: Bool[Tensor, " n"] | None = None,
        weights: Float[Tensor, " n"] | None = None,
        intercept: bool = False,
        ridge: NonNegative = 0.0,
        split: bool = False,
        device: torch.device | str | None = None,
        progress: bool = True,
    ) -> MapSet:
        """Fit maps on collected vectors, by least squares.

        Parameters
        ----------
        activations
            Vectors by site, such as `matlens.collect` gives.
        pairs
            ``"last"`` for every layer onto the last, ``"all"`` for every layer onto every later one, or pairs
            of sites, by name or by layer of the residual stream.
        rows, weights
            True for the samples to fit on, by default all, and how much each of all samples counts; see
            `fit_samples`.
        intercept, ridge
            Off by default, as in the paper; see `LeastSquares.solve`.
        split, device
            See `fit_samples`.
        """
        requested = resolve_pairs(pairs, activations.provenance)
        maps = fit_samples(
            activations, requested, rows=rows, weights=weights, intercept=intercept, ridge=ridge,
            split=split, device=device,
        )  # fmt: skip
        return cls(fitting_bar(maps, len(dict.fromkeys(requested)), progress=progress))

    def in_memory(
        self, pairs: Iterable[tuple[Any, Any]] | None = None, *, device: torch.device | str | None = None
    ) -> MapSet:
        """Maps in memory on a device, by default all; each is read once."""
        chosen = [self[pair] for pair in (self if pairs is None else dict.fromkeys(map(self._names, pairs)))]
        if device is not None:
            chosen = [linear.to(device) for linear in chosen]
        return MapSet(chosen, provenance=self.provenance)

    def on(self, model: TransformerBridge, *, strict: bool = True) -> MapSet:
        """The same maps for a model, on its device; with ``strict=False`` also for another of the same shape.

        See `Lens.on`; a map without a model becomes one of this model.
        """
        maps = MapSet(
            provenance=self.provenance.on(ModelIdentity.from_model(model), ours="the maps", strict=strict)
        )
        maps._device = torch.device(model.cfg.device)
        maps._maps = {
            pair: replace(stored.to(maps._device), provenance=maps.provenance)
            if isinstance(stored, LinearMap)
            else stored
            for pair, stored in self._maps.items()
        }
        return maps

    def save(self, folder: str | Path) -> None:
        """Write one safetensors file for each source, and ``config.json`` when all are there."""
        digests = "".join(linear.digest for linear in self.values())
        content = hashlib.sha256(digests.encode()).hexdigest()[:16]
        write_maps(
            folder, list(self), lambda pairs: map(self.__getitem__, pairs), self.provenance, content=content
        )

    @classmethod
    def load(cls, folder: str | Path) -> MapSet:
        """Open a folder of `save`; the weights of a map are read lazily."""
        artifact = Artifact.open(folder, HOLDS)
        maps = cls(provenance=Provenance.from_json(artifact.request["provenance"]))
        maps._maps = dict.fromkeys(map(tuple, artifact.request["pairs"]), artifact)
        return maps


def _with_names(linear: LinearMap) -> LinearMap:
    """A dense map between sites by their own names, such as ``h.3`` for ``resid_post.2``."""
    source, target = str(Site.parse(linear.source)), str(Site.parse(linear.target))
    same = (source, target) == (linear.source, linear.target) and linear.right is None
    return linear if same else replace(linear, source=source, target=target, weight=linear.matrix, right=None)


def _common(provenances: Sequence[Provenance]) -> Provenance:
    """The common provenance of maps of one model, with all their hooks; some may be unknown."""
    known = [provenance for provenance in provenances if provenance.model is not None] or provenances
    parts = [provenance.to_json() for provenance in known]
    common = {key: part for key, part in parts[0].items() if all(other.get(key) == part for other in parts)}
    common |= fitted_on_any(known)
    return replace(
        Provenance.from_json(common),
        model=known[0].model,
        hooks={site: names for provenance in provenances for site, names in provenance.hooks.items()},
    )


def write_maps(
    folder: str | Path,
    pairs: Sequence[tuple[str, str]],
    fit: Callable[[list[tuple[str, str]]], Iterable[LinearMap]],
    provenance: Provenance,
    *,
    content: str | None = None,
) -> MapSet:
    """Fit maps into a folder, source by source; resumes after an interruption.

    ``fit`` gives the maps of the pairs that it is asked for, in their order; ``content`` is a digest of maps
    that are not fitted.
    """
    request = {
        "provenance": provenance.to_json(), "pairs": pairs, "content": content, "layers": CONVENTION,
        "dtype": "float32",
    }  # fmt: skip
    parallel.check_same([str(folder), list(map(list, pairs))], "folder of maps")
    with Artifact.writing(folder, HOLDS, request) as artifact:
        if not artifact.finished:
            written = parallel.broadcast(
                artifact.written() if parallel.is_main() else None, "maps that exist"
            )
            grouped = by_source([pair for pair in pairs if pair[0] not in written])
            missing = [(source, target) for source, targets in grouped.items() for target in targets]
            maps = iter(fit(missing))
            for source, targets in grouped.items():
                # Only this source's maps are in memory before they are written.
                own = list(itertools.islice(maps, len(targets)))
                if parallel.is_main():
                    artifact.write(source, _tensors(own))
                del own
            next(maps, None)  # to the end of the fit, where it warns
            artifact.finish()
    return MapSet.load(folder)


def _tensors(maps: Iterable[LinearMap]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for linear in maps:
        parts = {linear.target: linear.matrix.float()}
        if linear.bias is not None:
            parts[f"{linear.target}/bias"] = linear.bias.float()
        if not all(part.isfinite().all() for part in parts.values()):
            raise InputError(
                f"The map {linear.source} -> {linear.target} cannot be saved: a value of it is not finite in "
                "float32. Fit it again, on finite vectors."
            )
        tensors |= parts
    return tensors
