"""The maps of a lens, and the standardisation that may go before them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, NonNegative, checked, short
from matlens.linear.maps import LinearMap
from matlens.models.identity import Provenance

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
@dataclass(frozen=True)
class Standardisation:
    """A norm without its gain: unit mean square, centered first for LayerNorm.

    Attributes
    ----------
    kind
        ``"rms"`` for RMSNorm, ``"layer"`` for LayerNorm.
    eps
        Epsilon, added to the mean square.
    """

    kind: Literal["rms", "layer"]
    eps: NonNegative = 0.0

    def __call__(self, h: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Standardise vectors, along their last axis."""
        if self.kind == "layer":
            h = h - h.mean(-1, keepdim=True)
        return h * (h.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    @classmethod
    def from_model(cls, model: TransformerBridge) -> Standardisation:
        """Standardization of a model's final norm.

        Raises
        ------
        InputError
            If the readout starts with something else, such as the head of a masked-LM model.
        """
        refusal = InputError(
            f"The readout of {model.cfg.model_name} does not begin with RMSNorm or LayerNorm, so "
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
class LensMaps:
    """A `Lens` without its model."""

    maps: Mapping[int, LinearMap | None]
    method: str
    provenance: Provenance
    norm: Standardisation | None = None
    scales: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        identity = self.provenance.identity
        if not self.maps:
            raise InputError("maps must have at least one layer, got none.")
        for layer, linear in self.maps.items():
            if type(layer) is not int or not 0 <= layer < identity.n_layers:
                raise InputError(f"maps must be of layers 0 to {identity.n_layers - 1}, got {short(layer)}.")
            if linear is not None and linear.shape != (identity.d_model, identity.d_model):
                raise InputError(
                    f"The map of layer {layer} is {linear.shape}, and the model has {identity.d_model} "
                    "dimensions. Is it of another model?"
                )
        maps = dict(sorted(self.maps.items()))
        if self.norm is not None:  # such a map must not be patched in without the norm
            maps = {
                layer: None if linear is None else replace(linear, source=f"standardised h.{layer}")
                for layer, linear in maps.items()
            }
        object.__setattr__(self, "maps", maps)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that it has maps of."""
        return tuple(self.maps)

    @property
    def n_parameters(self) -> int:
        """Number of parameters; a map that several layers share counts once."""
        parts = [part for linear in self.maps.values() if linear for part in linear.parts.values()]
        sizes = {id(part): part.numel() for part in parts}
        return sum(sizes.values()) + sum(scale != 1 for scale in self.scales.values())

    @property
    def digest(self) -> str:
        """A 16-digit hex digest of the weights."""
        digests = {layer: linear and linear.digest for layer, linear in self.maps.items()}
        content = repr((self.norm, digests, sorted(self.scales.items())))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def matrix(self, layer: int) -> Float[Tensor, "d_model d_model"]:
        """The dense matrix of a layer's map, which may be the identity."""
        linear = self.maps[layer]
        return torch.eye(self.provenance.identity.d_model) if linear is None else linear.matrix
