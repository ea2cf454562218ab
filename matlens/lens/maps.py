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
from matlens.models.norms import NormGain

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
    eps: NonNegative

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
        if hasattr(model, "mlm_head") or not hasattr(model, "ln_final"):
            raise InputError(
                f"The readout of {model.cfg.model_name} does not begin with RMSNorm or LayerNorm, so "
                "standardised vectors cannot be read out. Use 'weighted' instead of standardise=True."
            )
        norm = model.ln_final.original_component
        gain = NormGain.from_module(norm, model.cfg.d_model)
        eps = next((getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)), 0.0)
        return cls("layer" if gain.centred else "rms", float(eps))


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
        if unknown := sorted(set(self.scales) - set(self.maps)):
            raise InputError(f"scales must be of layers {short(list(self.maps))}, got {unknown}.")
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
    def n_samples(self) -> int | None:
        """Number of samples of the fit, if known."""
        return self.provenance.n_samples

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
        """The dense matrix of a layer's map, which may be the identity, on the CPU."""
        linear = self.maps[layer]
        return (
            torch.eye(self.provenance.identity.d_model, dtype=torch.float32)
            if linear is None
            else linear.matrix.cpu()
        )


def maps_on(maps: Mapping[int, LinearMap | None], device: torch.device) -> dict[int, LinearMap | None]:
    """Maps on a device; those that share tensors still do."""
    parts = {id(part): part for linear in maps.values() if linear for part in linear.parts.values()}
    moved: dict[int, Any] = {key: part.to(device) for key, part in parts.items()}
    return {
        layer: linear and replace(linear, **{name: moved[id(part)] for name, part in linear.parts.items()})
        for layer, linear in maps.items()
    }
