"""Norms, applied to the terms of a sum."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from matlens.errors import InputError, checked


@checked
@dataclass(frozen=True, eq=False)
class NormGain:
    """The linear part of a norm, which acts on each term of a sum.

    RMS norms and layer norms are ``gain * (x - mean(x)) / size(x) + bias``, RMS norms without the mean. So a
    term ``v`` of ``x`` reaches the output as ``gain * (v - mean(v))``, divided by the size of the sum.

    Attributes
    ----------
    gain
        The factor of each dimension, ``1 + weight`` in the norms of Gemma.
    centred
        Whether the mean is subtracted.
    """

    gain: Float[Tensor, " d_model"]
    centred: bool

    @classmethod
    @torch.no_grad()
    def from_module(cls, norm: nn.Module, width: int) -> NormGain:
        """Find the gain of a norm from its outputs for a few vectors, however it stores its weights."""
        norm = copy.deepcopy(norm).float()
        device = next(norm.parameters(), torch.empty(0)).device  # some norms have no weights
        # Dimensions far from 0 with mean 0, so large that eps does not matter.
        probe = torch.linspace(1, 2, width, dtype=torch.float32, device=device)
        probe[::2] *= -1
        probe = 1000 * (probe - probe.mean())
        bias = (norm(probe) + norm(-probe)) / 2
        gain = (norm(probe) - bias) * probe.square().mean().sqrt() / probe
        other = probe.roll(1) + torch.linspace(0, 1000, width, dtype=torch.float32, device=device)
        for centred in (False, True):
            candidate = cls(gain, centred)
            rest = candidate(other) / (other.std(correction=0) if centred else other.square().mean().sqrt())
            if torch.allclose(norm(other) - bias, rest, rtol=1e-3, atol=1e-4 * float(gain.abs().max())):
                return candidate
        raise InputError(f"The norm must be an RMS norm or a layer norm, got {type(norm).__name__}.")

    def __call__(self, vectors: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """The terms in the output, up to the size of the sum."""
        return self.gain * (vectors - vectors.mean(-1, keepdim=True) if self.centred else vectors)
