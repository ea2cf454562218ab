"""What a lens holds for one layer, and the standardisation that may go before it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, PositiveInt, check_choice, check_number, checked
from matlens.linear.maps import tensor_digest
from matlens.models.identity import Provenance

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Kind = Literal["rms", "layer"]
KINDS: tuple[Kind, ...] = ("rms", "layer")


@checked
@dataclass(frozen=True)
class Standardisation:
    """What a norm does to a vector before its gain: of unit mean square, and for LayerNorm centred before.

    Attributes
    ----------
    kind
        ``"rms"`` for RMSNorm, ``"layer"`` for LayerNorm.
    eps
        What the norm adds to the mean square.
    """

    kind: Kind
    eps: float = 0.0

    def __post_init__(self) -> None:
        check_choice(self.kind, KINDS, "The kind of a standardisation")
        check_number(self.eps, "eps", min=0)

    def __call__(self, h: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Standardise vectors, along their last axis."""
        if self.kind == "layer":
            h = h - h.mean(-1, keepdim=True)
        return h * (h.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    @classmethod
    def from_model(cls, model: TransformerBridge) -> Standardisation:
        """That of a model's final norm, which the read-out begins with.

        Raises
        ------
        InputError
            The read-out begins with something else, as the head of a masked-LM model does, or the norm is
            neither RMSNorm nor LayerNorm.
        """
        if hasattr(model, "mlm_head") or not hasattr(model, "ln_final"):
            raise InputError(
                f"The read-out of {model.cfg.model_name} does not begin with a norm, so vectors that are "
                "standardised cannot be read out. Expected a method without 'normed', such as 'weighted'."
            )
        module = model.ln_final.original_component
        eps = next(
            (float(getattr(module, name)) for name in ("eps", "variance_epsilon") if hasattr(module, name)),
            0.0,
        )
        for kind in KINDS:
            standardisation = cls(kind, eps)
            if _is_gain(standardisation, module, model.cfg.d_model):
                return standardisation
        raise InputError(
            f"The final norm of {model.cfg.model_name} is neither RMSNorm nor LayerNorm. Expected a method "
            "without 'normed', such as 'weighted'."
        )


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
    """The map of one layer: ``h -> W h + b``, ``W`` whole, of low rank, or the identity.

    Attributes
    ----------
    weight
        ``W``, ``[d, d]``; with a ``narrowing`` its left factor, ``[d, r]``; ``None`` for the identity.
    narrowing
        The right factor of a map of rank ``r``, ``[r, d]``, so that ``W = weight @ narrowing``.
    bias
        ``[d]``, or ``None``.
    scale
        A factor on the logits that are read out, 1 where nothing was fitted.
    """

    weight: Float[Tensor, "d k"] | None = None
    narrowing: Float[Tensor, "k d"] | None = None
    bias: Float[Tensor, " d"] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number(self.scale, "The scale of a layer's map")
        if self.weight is None and self.narrowing is not None:
            raise InputError("A narrowing is the right factor of a weight, and there is no weight.")
        if self.weight is not None and tuple(self._right_shape) != (self.weight.shape[1], len(self.weight)):
            raise InputError(
                f"A weight of the shape {tuple(self.weight.shape)} and a narrowing of "
                f"{None if self.narrowing is None else tuple(self.narrowing.shape)} give no square map. "
                "Expected [d, d] alone, or [d, r] and [r, d]."
            )
        if self.bias is not None and self.weight is not None and len(self.bias) != len(self.weight):
            raise InputError(f"A bias of {len(self.bias)} numbers does not fit a map of {len(self.weight)}.")

    @property
    def _right_shape(self) -> tuple[int, ...]:
        assert self.weight is not None
        right = self.weight if self.narrowing is None else self.narrowing
        return tuple(right.shape)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        named = {"weight": self.weight, "narrowing": self.narrowing, "bias": self.bias}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def n_numbers(self) -> int:
        """How many numbers it is."""
        return sum(part.numel() for part in self.parts.values()) + (self.scale != 1)

    def matrix(self, width: PositiveInt) -> Float[Tensor, "d d"]:
        """``W`` as one matrix; that of the identity, which is of any width, of so many rows and columns.

        Raises
        ------
        InputError
            The width is less than 1.
        """
        if self.weight is None:
            return torch.eye(width)
        return self.weight if self.narrowing is None else self.weight @ self.narrowing

    def __call__(self, h: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Map vectors, in float32 and on their own device.

        Raises
        ------
        InputError
            They are of another width.
        """
        widths = {len(part) for name, part in self.parts.items() if name != "narrowing"}
        if widths - {h.shape[-1]}:
            raise InputError(f"The vectors have {h.shape[-1]} coordinates, and the map is of {max(widths)}.")
        h = h.float()
        if self.narrowing is not None:
            h = torch.nn.functional.linear(h, self.narrowing.to(h.device))
        if self.weight is not None:
            h = torch.nn.functional.linear(h, self.weight.to(h.device))
        return h if self.bias is None else h + self.bias.to(h.device)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that change with the numbers."""
        names = [float(name == part) for name in ("weight", "narrowing", "bias") for part in self.parts]
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
