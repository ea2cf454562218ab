"""Linear maps between sites: applied, composed, and with their provenance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, checked
from matlens.models.identity import Provenance
from matlens.models.weights import tensor_digest
from matlens.numerics import without_autocast


@checked
@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear map from the vectors of one site to those of another: ``mat(h) = A h (+ b)``.

    ``weight`` is the matrix ``A`` (paper A, Eq. 1), in float32 if fitted; ``weight @ right`` of rank ``k``.
    Gradients of ``mat(h)`` reach the tensors.
    ``source`` and ``target`` are sites such as ``"h.3"`` and ``"h.30"``, and ``provenance`` the model, the
    corpus, the seed and the sample count that it was fitted on.

    Examples
    --------
    >>> for part in linear.parts.values():
    ...     part.requires_grad_()
    >>> optimizer = torch.optim.Adam(linear.parts.values())
    """

    weight: Float[Tensor, "d_out k"]
    bias: Float[Tensor, " d_out"] | None
    source: str
    target: str
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    right: Float[Tensor, "k d_in"] | None = None

    def __post_init__(self) -> None:
        if self.bias is not None and len(self.bias) != len(self.weight):  # one value would be broadcast
            raise InputError(f"bias must have {len(self.weight)} values, got {len(self.bias)}.")

    def __repr__(self) -> str:
        d_out, d_in = self.shape
        of_rank = "" if self.right is None else f", rank {len(self.right)}"
        affine = "" if self.bias is None else ", with bias"
        return f"LinearMap({self.source} -> {self.target}, {d_in} -> {d_out}{of_rank}{affine})"

    @classmethod
    def from_solution(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        source: str,
        target: str,
        provenance: Provenance | None = None,
    ) -> LinearMap:
        """A map in float32 of a solution in float64."""
        weight, bias = weight.float().contiguous(), None if bias is None else bias.float()
        return cls(weight, bias, source, target, provenance or Provenance())

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
    @without_autocast()
    def matrix(self) -> Float[Tensor, "d_out d_in"]:
        """``A``, also of a low-rank map."""
        return self.weight if self.right is None else self.weight @ self.right

    @without_autocast()
    def __call__(self, h: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        """Map vectors of any precision in float32, on the map's device; returned on that of the vectors."""
        device, h = h.device, h.to(self.weight.device, torch.float32)
        parts = {name: part.float() for name, part in self.parts.items()}  # no copy of float32
        if self.right is not None:
            h = torch.nn.functional.linear(h, parts["right"])
        return torch.nn.functional.linear(h, parts["weight"], parts.get("bias")).to(device)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that change with the map's values."""
        return tensor_digest(*(part.float() for part in self.parts.values()))

    def to(self, device: torch.device | str) -> LinearMap:
        """The same map on a device."""
        parts: dict[str, Any] = {name: part.to(device) for name, part in self.parts.items()}
        return replace(self, **parts)

    def state_dict(self) -> dict[str, Tensor]:
        """Its tensors by name, detached; ``dataclasses.replace(linear, **state)`` loads them."""
        return {name: part.detach() for name, part in self.parts.items()}
