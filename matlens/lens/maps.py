"""What a lens holds for one layer, and the standardisation that may go before it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, NonNegative, PositiveInt, checked, short
from matlens.linear.maps import tensor_digest
from matlens.models.identity import Provenance

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Kind = Literal["rms", "layer"]


@checked
@dataclass(frozen=True)
class Standardisation:
    """What a norm does to a vector before its gain: unit mean square, for LayerNorm centred first.

    Attributes
    ----------
    kind
        ``"rms"`` for RMSNorm, ``"layer"`` for LayerNorm.
    eps
        What the norm adds to the mean square.
    """

    kind: Kind
    eps: NonNegative = 0.0

    def __call__(self, h: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Standardise vectors, along their last axis."""
        if self.kind == "layer":
            h = h - h.mean(-1, keepdim=True)
        return h * (h.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    @classmethod
    def from_model(cls, model: TransformerBridge) -> Standardisation:
        """That of a model's final norm.

        Raises
        ------
        InputError
            The read-out begins with something else, as the head of a masked-LM model does.
        """
        refusal = InputError(
            f"The read-out of {model.cfg.model_name} does not begin with RMSNorm or LayerNorm, so "
            "standardised vectors cannot be read out. Use 'weighted' instead of standardise=True."
        )
        if hasattr(model, "mlm_head") or not hasattr(model, "ln_final"):
            raise refusal
        module = model.ln_final.original_component
        eps = next(
            (float(getattr(module, name)) for name in ("eps", "variance_epsilon") if hasattr(module, name)),
            0.0,
        )
        for standardisation in (cls("rms", eps), cls("layer", eps)):
            if _is_gain(standardisation, module, model.cfg.d_model):
                return standardisation
        raise refusal


@torch.inference_mode()
def _is_gain(standardisation: Standardisation, module: Any, width: int) -> bool:
    """Whether a norm is this standardisation, a gain and a bias."""
    parameter = next(iter(module.parameters()), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    h = 3 * torch.randn(3, width, generator=generator) + 1
    out, bias = (module(rows.to(parameter)).cpu().double() for rows in (h, torch.zeros(1, width)))
    z = standardisation(h.double())
    gains = (out - bias) / z
    near = (gains - gains.median(0).values).abs() <= 0.02 * gains.abs().median() + 1e-6
    return bool((near | (z.abs() < 0.05)).all())


@checked
@dataclass(frozen=True, eq=False)
class LayerMap:
    """The map of one layer, ``h -> W h + b``; ``W`` is dense, of low rank, or the identity.

    Attributes
    ----------
    weight
        ``W``, ``[d, d]``; of low rank its left factor, ``[d, r]``; ``None`` for the identity.
    right
        The right factor of a map of rank ``r``, ``[r, d]``: ``W = weight @ right``.
    bias
        ``[d]``, or ``None``.
    scale
        A factor on the logits that are read out.
    """

    weight: Float[Tensor, "d k"] | None = None
    right: Float[Tensor, "k d"] | None = None
    bias: Float[Tensor, " d"] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.weight is None:
            fits = self.right is None
        else:
            d, rank = self.weight.shape
            right = (d, d) if self.right is None else tuple(self.right.shape)
            fits = right == (rank, d) and (self.bias is None or len(self.bias) == d)
        if not fits:
            shapes = {name: tuple(part.shape) for name, part in self.parts.items()}
            raise InputError(
                f"weight, right and bias must be [d, d] or [d, r] with [r, d], and [d], got {shapes}."
            )

    @property
    def parts(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        named = {"weight": self.weight, "right": self.right, "bias": self.bias}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def n_parameters(self) -> int:
        """How many numbers it has."""
        return sum(part.numel() for part in self.parts.values()) + (self.scale != 1)

    def matrix(self, width: PositiveInt) -> Float[Tensor, "d d"]:
        """``W`` as one matrix; ``width`` is that of the identity."""
        if self.weight is None:
            return torch.eye(width)
        return self.weight if self.right is None else self.weight @ self.right

    def __call__(self, h: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Map vectors, in float32 and on their own device."""
        if any(len(part) != h.shape[-1] for part in (self.weight, self.bias) if part is not None):
            raise InputError(f"h must have the width of the map, got {short(h)}.")
        h = h.float()
        for factor in (self.right, self.weight):
            if factor is not None:
                h = torch.nn.functional.linear(h, factor.to(h.device))
        return h if self.bias is None else h + self.bias.to(h.device)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that change with its numbers."""
        names = [float(name == part) for name in ("weight", "right", "bias") for part in self.parts]
        return tensor_digest(torch.tensor([self.scale, *names]).double(), *self.parts.values())


class LensParts(NamedTuple):
    """What a `Lens` is made of, see there."""

    maps: Mapping[int, LayerMap]
    method: str
    provenance: Provenance
    norm: Standardisation | None = None

    @property
    def digest(self) -> str:
        """Sixteen hex digits that change with the numbers."""
        norm = None if self.norm is None else (self.norm.kind, self.norm.eps)
        known = {id(held): held.digest for held in {id(h): h for h in self.maps.values()}.values()}
        content = repr((norm, [(layer, known[id(held)]) for layer, held in self.maps.items()]))
        return hashlib.sha256(content.encode()).hexdigest()[:16]
