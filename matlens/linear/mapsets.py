"""Sets of linear maps of one model: fitted in one line, in memory or in a folder read map by map."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm.auto import tqdm

from matlens.errors import InputError
from matlens.linear.fitting import Samples, fit_rows
from matlens.linear.maps import LinearMap
from matlens.linear.pairs import Pairs, resolve_pairs
from matlens.models.identity import Provenance
from matlens.models.sites import Site
from matlens.signatures import checked
from matlens.storage.folders import Workplace, read_config, write_bytes

CONVENTION = "h.0 enters block 0, h.l leaves block l-1, h.L enters the final norm"
_HOLDS = "maps"


@checked
class MapSet(Mapping[tuple[str, str], LinearMap]):
    """Maps by ``(source, target)``, in memory or read from a folder one at a time.

    ``maps[3, 30]`` is the map between two layers of the stream; sites are named otherwise, as in
    ``maps["ln1_out.3", "attn_out.3"]``. The provenance is by default that of the first map. With
    ``same_precision=False`` the maps may be used on the same weights in another precision, such as maps of a
    float32 model while it runs in bfloat16.

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
        given = list(maps)
        if not same_precision:
            given = [replace(m, provenance=replace(m.provenance, same_precision=False)) for m in given]
        self._maps: dict[tuple[str, str], LinearMap | Path] = {(m.source, m.target): m for m in given}
        models = {m.provenance.model.key: m.provenance.model for m in given if m.provenance.model}
        if len(models) > 1 or len(self._maps) < len(given):
            names = ", ".join(sorted(model.fingerprint for model in models.values()))
            raise InputError(
                "A set holds maps of one model, and one for each pair: these are of the models "
                f"{names}, {len(given)} maps for {len(self._maps)} pairs."
            )
        if provenance is None and given:
            provenance = given[0].provenance
        self.provenance = provenance or Provenance()
        if not same_precision:
            self.provenance = replace(self.provenance, same_precision=False)

    def __getitem__(self, pair: tuple[Any, Any]) -> LinearMap:
        source, target = (str(Site.parse(site)) for site in pair)
        try:
            kept = self._maps[source, target]
        except KeyError:
            raise KeyError(
                f"There is no map {source} -> {target}; there are {len(self)}: {_abbreviated(self._maps)}"
            ) from None
        return _read(kept, source, target, self.provenance) if isinstance(kept, Path) else kept

    def __contains__(self, pair: object) -> bool:
        """Whether there is a map, without reading it."""
        try:
            return isinstance(pair, tuple) and tuple(str(Site.parse(site)) for site in pair) in self._maps
        except InputError:  # what is no site has no map
            return False

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    @classmethod
    def fit(
        cls,
        activations: Samples,
        *,
        pairs: Pairs = "last",
        rows: Bool[Tensor, " n"] | None = None,
        intercept: bool = False,
        ridge: float = 0.0,
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
        rows
            True for the samples to fit on, by default all; see `fit_rows`.
        intercept, ridge
            Off by default, as in the paper; see `Moments.solve`.
        progress
            Whether to show a bar.

        Raises
        ------
        InputError
            A pair is not usable, a site was not collected, or no sample is left.
        """
        wanted = resolve_pairs(pairs, activations.provenance.identity.n_layers)
        maps = fit_rows(activations, wanted, rows=rows, intercept=intercept, ridge=ridge)
        total = len(dict.fromkeys(wanted))
        return cls(tqdm(maps, total=total, desc="fitting", unit="map", disable=not progress, delay=1))

    def held(
        self, pairs: Iterable[tuple[Any, Any]] | None = None, *, device: torch.device | str | None = None
    ) -> MapSet:
        """These maps, by default all, in memory and on a device: each is read once, however often used."""
        chosen = [self[pair] for pair in (self if pairs is None else dict.fromkeys(pairs))]
        return MapSet(
            chosen if device is None else [linear.to(device) for linear in chosen], provenance=self.provenance
        )

    def save(self, folder: str | Path) -> None:
        """Write one safetensors file for each source, and ``config.json`` when all are there."""
        digest = hashlib.sha256()
        for linear in self.values():
            for part in (linear.weight, linear.bias):
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
        folder = Path(folder)
        request = read_config(folder, _HOLDS)["request"]
        try:
            pairs, provenance = request["pairs"], Provenance.from_json(request["provenance"])
        except KeyError as error:
            raise InputError(
                f"{folder / 'config.json'} is damaged: it lacks {error}. Remove {folder} and fit "
                "the maps again."
            ) from error
        maps = cls(provenance=provenance, same_precision=same_precision)
        for source, target in pairs:
            maps._maps[source, target] = _file(folder, source)
        for source in dict.fromkeys(source for source, _ in maps):
            with _open(_file(folder, source)):
                pass
        return maps


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
    place = Workplace(folder, _HOLDS, request)
    with place.working():
        if not place.finished:
            there = {source for source, _ in pairs if _file(place.folder, source).is_file()}
            sources = list(dict.fromkeys(source for source, _ in pairs))
            missing = sorted(
                (pair for pair in pairs if pair[0] not in there), key=lambda pair: sources.index(pair[0])
            )
            maps = iter(fit(missing))
            for source, group in itertools.groupby(missing, key=lambda pair: pair[0]):
                # No more than this source's maps are asked for before they are written.
                _write_source(_file(place.folder, source), itertools.islice(maps, len(list(group))))
            place.finish()
    return MapSet.load(folder)


def _write_source(path: Path, maps: Iterable[LinearMap]) -> None:
    tensors: dict[str, Tensor] = {}
    for linear in maps:
        tensors[linear.target] = _float32(linear.weight)
        if linear.bias is not None:
            tensors[f"{linear.target}/bias"] = _float32(linear.bias)
    write_bytes(path, save(tensors, metadata={"source": path.stem}))


def _float32(values: Tensor) -> Tensor:
    return values.detach().cpu().to(torch.float32, copy=True).contiguous()


def _file(folder: Path, source: str) -> Path:
    return folder / f"{source}.safetensors"


def _open(path: Path) -> Any:
    try:
        file = safe_open(path, framework="pt")
        if (source := (file.metadata() or {}).get("source")) != path.stem:
            raise SafetensorError(f"it holds the maps of {source}")
        return file
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"The file {path} cannot be read as safetensors: {error}. Fit the maps again, after "
            f"removing the folder {path.parent}."
        ) from error


def _read(path: Path, source: str, target: str, provenance: Provenance) -> LinearMap:
    with _open(path) as file:
        bias = f"{target}/bias"
        return LinearMap(
            file.get_tensor(target), file.get_tensor(bias) if bias in file.keys() else None,  # noqa: SIM118
            source, target, provenance,
        )  # fmt: skip


def _abbreviated(pairs: Iterable[tuple[str, str]]) -> str:
    names = [f"{source} -> {target}" for source, target in pairs]
    return ", ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])
