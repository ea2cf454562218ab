"""Linear maps between sites, and sets of them on disk with where they came from."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from matlens.errors import InputError
from matlens.models.identity import Provenance
from matlens.storage.folders import Workplace, read_config, write_bytes

CONVENTION = "h.0 enters block 0, h.l leaves block l-1, h.L enters the final norm"
_HOLDS = "maps"


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear map from the vectors of one site to those of another: ``mat(h) = A h (+ b)``.

    Attributes
    ----------
    weight
        The matrix ``A`` in float32, ``[d_out, d_in]`` (paper A, Eq. 1).
    bias
        ``[d_out]``, or ``None``, as in the paper.
    source, target
        The sites that it maps from and to, such as ``"h.3"`` and ``"h.30"``.
    provenance
        The model, the corpus, the seed and the sample count that it was fitted on.
    """

    weight: Float[Tensor, "d_out d_in"]
    bias: Float[Tensor, " d_out"] | None
    source: str
    target: str
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @classmethod
    def from_solution(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        source: str,
        target: str,
        provenance: Provenance | None = None,
    ) -> LinearMap:
        """Keep a solution that was found in float64, in float32."""
        kept = weight.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
        return cls(
            kept, None if bias is None else bias.to(torch.float32), source, target, provenance or Provenance()
        )

    def __call__(self, h: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        """Map vectors, in float32 and on their own device."""
        weight = self.weight.to(h.device)
        bias = None if self.bias is None else self.bias.to(h.device)
        return torch.nn.functional.linear(h.to(weight.dtype), weight, bias)

    def to(self, device: torch.device | str) -> LinearMap:
        """The same map on a device, where it need not be brought at every use."""
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias)

    def then(self, following: LinearMap) -> LinearMap:
        """Compose: this map first, ``following`` after it.

        Raises
        ------
        InputError
            ``following`` does not start where this one ends.
        """
        if self.target != following.source:
            raise InputError(
                f"A map onto {self.target} cannot be followed by one from {following.source}: "
                "the first must end where the second starts."
            )
        outer = following.weight.double()
        bias = None if self.bias is None else outer @ self.bias.double()
        if following.bias is not None:
            bias = following.bias.double() if bias is None else bias + following.bias.double()
        weight = outer @ self.weight.double()
        return LinearMap.from_solution(weight, bias, self.source, following.target, self.provenance)


def site_name(site: object) -> str:
    """Name of a site; a bare number is a layer of the stream."""
    name = f"h.{int(site)}" if isinstance(site, Integral) else str(site)
    if ".-" in name:
        raise InputError(f"The layer of {name} counts from the end of a model that is not known here.")
    return name


class MapSet(Mapping[tuple[str, str], LinearMap]):
    """Maps by ``(source, target)``, in memory or read from a folder one at a time.

    ``maps[3, 30]`` is the map between two layers of the stream; sites are named otherwise, as in
    ``maps["ln1_out.3", "attn_out.3"]``. The provenance is by default that of the first map.
    """

    def __init__(self, maps: Iterable[LinearMap] = (), *, provenance: Provenance | None = None) -> None:
        given = list(maps)
        self._maps: dict[tuple[str, str], LinearMap | Path] = {(m.source, m.target): m for m in given}
        models = {m.provenance.model.fingerprint for m in given if m.provenance.model}
        if len(models) > 1 or len(self._maps) < len(given):
            raise InputError(
                "A set holds maps of one model, and one for each pair: these are of the models "
                f"{', '.join(sorted(models))}, {len(given)} maps for {len(self._maps)} pairs."
            )
        if provenance is None and given:
            provenance = given[0].provenance
        self.provenance = provenance or Provenance()

    def __getitem__(self, pair: tuple[Any, Any]) -> LinearMap:
        source, target = (site_name(site) for site in pair)
        try:
            found = self._maps[source, target]
        except KeyError:
            raise KeyError(
                f"There is no map {source} -> {target}; there are {len(self)}: {_abbreviated(self._maps)}"
            ) from None
        return _read(found, source, target, self.provenance) if isinstance(found, Path) else found

    def __contains__(self, pair: object) -> bool:
        """Whether there is a map, without reading it."""
        return isinstance(pair, tuple) and tuple(site_name(site) for site in pair) in self._maps

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def held(
        self, pairs: Iterable[tuple[Any, Any]] | None = None, *, device: torch.device | str | None = None
    ) -> MapSet:
        """These maps, by default all, in memory and on a device: each is read once, however often used."""
        chosen = [self[pair] for pair in (self if pairs is None else dict.fromkeys(pairs))]
        return MapSet(
            chosen if device is None else [one.to(device) for one in chosen], provenance=self.provenance
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
    def load(cls, folder: str | Path) -> MapSet:
        """Open what `save` has written; a map's numbers are read when it is asked for.

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
        maps = cls(provenance=provenance)
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
