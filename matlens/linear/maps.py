"""Linear maps between sites: applied, composed, and kept with where they come from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, checked, short
from matlens.models.identity import Provenance
from matlens.models.sites import Site
from matlens.models.weights import fast_checksum
from matlens.numerics import find_device, in_float64


@checked
@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear map from the vectors of one site to those of another: ``mat(h) = A h (+ b)``.

    Attributes
    ----------
    weight
        The matrix ``A`` in float32, ``[d_out, d_in]`` (paper A, Eq. 1); of a low-rank map its left factor.
    bias
        ``[d_out]``, or ``None``, as in the paper.
    source, target
        The sites that it maps from and to, such as ``"h.3"`` and ``"h.30"``.
    provenance
        The model, the corpus, the seed and the sample count that it was fitted on.
    right
        The right factor of a map of rank ``r``, ``[r, d_in]``: ``A = weight @ right``.
    """

    weight: Float[Tensor, "d_out k"]
    bias: Float[Tensor, " d_out"] | None
    source: str
    target: str
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    right: Float[Tensor, "k d_in"] | None = None

    def __post_init__(self) -> None:
        shapes = [None if part is None else tuple(part.shape) for part in (self.bias, self.right)]
        d_out, k = self.weight.shape
        if shapes[0] not in (None, (d_out,)) or (shapes[1] is not None and shapes[1][0] != k):
            raise InputError(
                f"A bias and a right factor of the shapes {shapes} do not fit a weight of {d_out, k}."
            )

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
        kept = weight.to(torch.float32).contiguous()
        return cls(
            kept, None if bias is None else bias.to(torch.float32), source, target, provenance or Provenance()
        )

    @property
    def parts(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        named = {"weight": self.weight, "right": self.right, "bias": self.bias}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def shape(self) -> tuple[int, int]:
        """``(d_out, d_in)``."""
        return len(self.weight), (self.weight if self.right is None else self.right).shape[1]

    @property
    def matrix(self) -> Float[Tensor, "d_out d_in"]:
        """``A``, also of a low-rank map."""
        return self.weight if self.right is None else self.weight @ self.right

    def __call__(self, h: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        """Map vectors in float32, whatever the precision of the map or of the vectors, on their device."""
        if not h.ndim or h.shape[-1] != self.shape[1]:
            width = self.shape[1]
            raise InputError(
                f"The map {self.source} -> {self.target} takes vectors of {width} coordinates: it was given "
                f"{short(h)}. Expected what {self.source} holds."
            )
        parts = {name: part.to(h.device, torch.float32) for name, part in self.parts.items()}
        h = h.to(torch.float32)
        if self.right is not None:
            h = torch.nn.functional.linear(h, parts["right"])
        return torch.nn.functional.linear(h, parts["weight"], parts.get("bias"))

    @property
    def n_samples(self) -> int | None:
        """How many samples it was fitted on, where that is known."""
        return fitted_samples(self.provenance)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that change with the map's numbers."""
        parts = list(self.parts.values())
        checksum, known = fast_checksum(parts), vars(self).get("_digest")
        if known is None or known[0] != checksum:  # its numbers can be edited in place
            known = vars(self)["_digest"] = checksum, tensor_digest(*(part.float() for part in parts))
        return str(known[1])

    def to(self, device: torch.device | str) -> LinearMap:
        """The same map on a device, where it need not be brought at every use.

        Raises
        ------
        InputError
            There is no such device here.
        """
        try:
            found = find_device(device)
        except ValueError as error:
            raise InputError(
                f"A map cannot be brought to the device {short(device)}. Expected cpu, cuda or mps."
            ) from error
        parts = {name: part.to(found) for name, part in self.parts.items()}
        return replace(self, weight=parts["weight"], right=parts.get("right"), bias=parts.get("bias"))

    def then(self, following: LinearMap) -> LinearMap:
        """Compose: this map first, ``following`` after it.

        Raises
        ------
        InputError
            ``following`` does not start where this one ends, or is of another model.
        """
        if Site.read(self.target) != Site.read(following.source):
            raise InputError(
                f"A map onto {self.target} cannot be followed by one from {following.source}: "
                "the first must end where the second starts."
            )
        if None not in (self.provenance.model, following.provenance.model):
            self.provenance.check_same(following.provenance, ours="the first map", theirs="the following map")
        outer = in_float64(following.matrix)
        bias = None if self.bias is None else outer @ in_float64(self.bias).to(outer.device)
        if following.bias is not None:
            added = in_float64(following.bias)
            bias = added if bias is None else bias + added
        weight = outer @ in_float64(self.matrix).to(outer.device)
        return LinearMap.from_solution(weight, bias, self.source, following.target, self.provenance)


def fitted_samples(provenance: Provenance) -> int | None:
    """How many samples maps of this provenance were fitted on, where it says so."""
    details = provenance.details
    number = details.get("n_fitted", details.get("n_samples"))
    return number if isinstance(number, int) else None


def tensor_digest(*tensors: Tensor) -> str:
    """Sixteen hex digits that change with the numbers in tensors, their shapes and their kinds."""
    digest = hashlib.sha256()
    for tensor in tensors:
        numbers = tensor.detach().cpu().contiguous()
        digest.update(f"{tuple(numbers.shape)}{numbers.dtype}".encode())
        digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()[:16]
