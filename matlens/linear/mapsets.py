"""Sets of linear maps of one model: fitted in one line, in memory or in a folder read map by map."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations
from matlens.errors import InputError, NonNegative, checked
from matlens.io.artifact import Artifact
from matlens.io.files import damaged
from matlens.linear.fitting import fit_samples, fitting_bar
from matlens.linear.maps import LinearMap, fitted_samples
from matlens.linear.pairs import Pairs, both_ends, by_source, list_pairs, resolve_pairs
from matlens.models.changes import describe_changes
from matlens.models.identity import Provenance
from matlens.models.sites import Site

CONVENTION = "h.0 enters block 0, h.l leaves block l-1, h.L enters the final norm"
HOLDS = "maps"


class _Stored(NamedTuple):
    """A map that is read when it is asked for."""

    artifact: Artifact
    source: str
    target: str

    def read(self, provenance: Provenance) -> LinearMap:
        bias = f"{self.target}/bias" if f"{self.target}/bias" in self.artifact.tensors(self.source) else None
        return LinearMap(
            self.artifact.read(self.source, self.target),
            None if bias is None else self.artifact.read(self.source, bias),
            self.source, self.target, provenance,
        )  # fmt: skip


@checked
class MapSet(Mapping[tuple[str, str], LinearMap]):
    """Maps by ``(source, target)``, in memory or read from a folder one at a time.

    ``maps[3, 30]`` is the map between two layers of the stream, and ``maps[3, -1]`` that onto the last one;
    sites are named otherwise, as in ``maps["ln1_out.3", "attn_out.3"]``. The provenance is by default what
    those of all maps say alike, and that alone is kept in a folder. With ``same_precision=False`` the maps
    may be used on the same weights in another precision, such as maps of a float32 model while it runs in
    bfloat16.

    Raises
    ------
    InputError
        The maps are of several models, or there are two for a pair.
    """

    def __init__(
        self,
        maps: Iterable[LinearMap] = (),
        *,
        provenance: Provenance | None = None,
        same_precision: bool = True,
    ) -> None:
        given = [_with_names(linear) for linear in maps]
        if provenance is not None and provenance.model is not None:  # of maps made by hand, the set says it
            given = [replace(m, provenance=provenance) if m.provenance.model is None else m for m in given]
        if not same_precision:
            given = [replace(m, provenance=replace(m.provenance, same_precision=False)) for m in given]
        self._maps: dict[tuple[str, str], LinearMap | _Stored] = {(m.source, m.target): m for m in given}
        models = {m.provenance.model.key: m.provenance.model for m in given if m.provenance.model}
        changes = {m.provenance.model.changes for m in given if m.provenance.model}
        if len(models) > 1 or len(self._maps) < len(given):
            names = ", ".join(sorted(model.fingerprint for model in models.values()))
            raise InputError(
                "A set holds maps of one model, and one for each pair: these are of the models "
                f"{names}, {len(given)} maps for {len(self._maps)} pairs."
            )
        if len(changes) > 1:
            raise InputError(
                "A set holds maps of one model with the same changes: among these are maps fitted with "
                f"{' and maps fitted with '.join(sorted(map(describe_changes, changes)))}. Keep them in sets "
                "of their own."
            )
        if provenance is None and given:
            provenance = _said_alike([linear.provenance for linear in given])
        self.provenance = provenance or Provenance()
        if not same_precision:
            self.provenance = replace(self.provenance, same_precision=False)

    def __repr__(self) -> str:
        pairs, model = list(self._maps), self.provenance.model
        ends = [f"{source} -> {target}" for source, target in pairs[:1] + pairs[1:][-1:]]
        of = "unknown model" if model is None else repr(model.name)
        return f"MapSet({len(pairs)} maps: {' .. '.join(ends)}, {of})"

    def __getitem__(self, pair: tuple[Any, Any]) -> LinearMap:
        source, target = self._names(pair)
        try:
            kept = self._maps[source, target]
        except KeyError:
            raise KeyError(
                f"There is no map {source} -> {target}; there are {len(self)}: {_abbreviated(self._maps)}"
            ) from None
        return kept.read(self.provenance) if isinstance(kept, _Stored) else kept

    def __contains__(self, pair: object) -> bool:
        """Whether there is a map, without reading it."""
        try:
            return isinstance(pair, tuple) and self._names(pair) in self._maps
        except InputError:  # what is no site has no map
            return False

    def _names(self, pair: Any) -> tuple[str, str]:
        """Names of both sites, from the end of the model where they count from there."""
        source, target = both_ends(pair)
        return self._name(source), self._name(target)

    def _name(self, site: Any) -> str:
        try:
            return str(self.provenance.resolve(site))
        except InputError:
            if Site.read(site).layer < 0:
                raise
            return str(Site.parse(site))  # of no layer of this model there is a map, either

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
            Which maps: ``"last"`` for every layer onto the last, ``"all"`` for every layer onto every later
            one, or pairs of sites, by name or by layer of the stream.
        rows, weights
            True for the samples to fit on, by default all, and how much each of all samples counts; see
            `fit_samples`.
        intercept, ridge
            Off by default, as in the paper; see `LeastSquares.solve`.
        split
            Whether products in float64 are sums of exact ones in float32, for a device that is slow in
            float64; see `fit_samples`.
        device
            Where maps are fitted, such as ``"cuda"``; by default where the vectors are.
        progress
            Whether to show a bar.

        Raises
        ------
        InputError
            These are no activations, a pair is not usable, a site was not collected, rows or weights are not
            those of the samples, no sample is left, or the ridge is negative or not finite.
        """
        wanted = resolve_pairs(pairs, activations.provenance)
        maps = fit_samples(
            activations, wanted, rows=rows, weights=weights, intercept=intercept, ridge=ridge,
            split=split, device=device,
        )  # fmt: skip
        return cls(fitting_bar(maps, len(dict.fromkeys(wanted)), progress=progress))

    @property
    def n_samples(self) -> int | None:
        """How many samples the maps were fitted on, where that is known."""
        return fitted_samples(self.provenance)

    def held(
        self, pairs: Iterable[tuple[Any, Any]] | None = None, *, device: torch.device | str | None = None
    ) -> MapSet:
        """These maps, by default all, in memory and on a device: each is read once, however often used.

        Raises
        ------
        InputError
            There is no such map, or no pair is given.
        """
        if pairs is None:
            chosen = list(self.values())
        else:
            try:
                names = dict.fromkeys(map(self._names, list_pairs(pairs)))
                chosen = [self[source, target] for source, target in names]
            except KeyError as error:
                raise InputError(f"{error.args[0]}.") from None
        return MapSet(
            chosen if device is None else [linear.to(device) for linear in chosen], provenance=self.provenance
        )

    def save(self, folder: str | Path) -> None:
        """Write one safetensors file for each source, and ``config.json`` when all are there.

        Raises
        ------
        InputError
            A number of a map is not finite, or the folder holds something else.
        """
        digest = hashlib.sha256()
        for linear in self.values():
            for part in (linear.matrix, linear.bias):
                digest.update(b"" if part is None else _float32(part).numpy().tobytes())

        def given(pairs: list[tuple[str, str]]) -> Iterator[LinearMap]:
            return (self[pair] for pair in pairs)

        write_maps(folder, list(self), given, self.provenance, content=digest.hexdigest()[:16])

    @classmethod
    def load(cls, folder: str | Path, *, same_precision: bool = True) -> MapSet:
        """Open what `save` has written; a map's numbers are read when it is asked for.

        Parameters
        ----------
        folder
            Where the maps are.
        same_precision
            Whether they belong to the model in the precision alone that they were fitted in. With ``False``
            they may be used while the same weights run in another one.

        Raises
        ------
        InputError
            The folder holds no finished set of maps, or a file of it is corrupt.
        """
        artifact = Artifact.open(folder, HOLDS)
        provenance = Provenance.from_json(artifact.request["provenance"])
        maps = cls(provenance=provenance, same_precision=same_precision)
        for source, target in artifact.request["pairs"]:
            if target not in artifact.tensors(source):
                raise damaged(artifact.folder / source, f"has no map onto {target}")
            maps._maps[source, target] = _Stored(artifact, source, target)
        return maps


def _with_names(linear: LinearMap) -> LinearMap:
    """A dense map whose sites are spelled as sets spell them, such as ``h.3`` for ``resid_post.2``."""
    source, target = str(Site.read(linear.source)), str(Site.read(linear.target))
    same = (source, target) == (linear.source, linear.target) and linear.right is None
    return linear if same else replace(linear, source=source, target=target, weight=linear.matrix, right=None)


def _said_alike(provenances: Sequence[Provenance]) -> Provenance:
    """What maps of one model say alike of where they come from, and all their hooks; some may say nothing."""
    known = [provenance for provenance in provenances if provenance.model is not None] or provenances
    first = known[0]

    def alike(part: str) -> Any:
        said = getattr(first, part)
        return said if all(getattr(other, part) == said for other in known) else None

    return Provenance(
        first.model, alike("data"), alike("examples"), alike("positions"),
        {
            key: value for key, value in first.details.items()
            if all(key in other.details and other.details[key] == value for other in known)
        },
        same_precision=all(provenance.same_precision for provenance in known),
        hooks={site: names for provenance in provenances for site, names in provenance.hooks.items()},
    )  # fmt: skip


def write_maps(
    folder: str | Path,
    pairs: Sequence[tuple[str, str]],
    fit: Callable[[list[tuple[str, str]]], Iterable[LinearMap]],
    provenance: Provenance,
    *,
    content: str | None = None,
) -> MapSet:
    """Fit maps into a folder, source by source; what a killed run has written is not fitted again.

    ``fit`` gives the maps of the pairs that it is asked for, in their order. ``content`` tells maps apart
    that are given and not fitted.
    """
    request = {
        "provenance": provenance.to_json(), "pairs": pairs, "content": content, "layers": CONVENTION,
        "dtype": "float32",
    }  # fmt: skip
    parallel.check_same([str(folder), list(map(list, pairs))], "folder of maps")
    with Artifact.writing(folder, HOLDS, request) as artifact:
        if not artifact.finished:
            there = parallel.broadcast(artifact.written() if parallel.is_main() else None, "maps that exist")
            missing = [
                (source, target)
                for source, targets in by_source(pairs).items()
                for target in targets
                if source not in there
            ]
            maps = iter(fit(missing))
            for source, group in itertools.groupby(missing, key=lambda pair: pair[0]):
                # No more than this source's maps are asked for before they are written.
                own = list(itertools.islice(maps, len(list(group))))
                if parallel.is_main():
                    artifact.write(source, _tensors(own))
                del own
            next(maps, None)  # to the end of the fit, where it warns
            artifact.finish()
    return MapSet.load(folder)


def _tensors(maps: Iterable[LinearMap]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for linear in maps:
        parts = {linear.target: _float32(linear.matrix)}
        if linear.bias is not None:
            parts[f"{linear.target}/bias"] = _float32(linear.bias)
        tensors |= parts
        if not all(part.isfinite().all() for part in parts.values()):
            raise InputError(
                f"The map {linear.source} -> {linear.target} cannot be saved: a value of it is not finite in "
                "float32. Fit it again, on finite vectors."
            )
    return tensors


def _float32(values: Tensor) -> Tensor:
    return values.detach().cpu().float().contiguous()


def _abbreviated(pairs: Iterable[tuple[str, str]]) -> str:
    names = [f"{source} -> {target}" for source, target in pairs]
    return ", ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])
