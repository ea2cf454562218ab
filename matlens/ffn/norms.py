"""Norms on the way of what FFNs write: behind the FFN, and before the unembedding.

Of a norm counts here what it does to every addend of its input alike: its gain, and whether it takes off the
mean. By the size of the whole it divides all addends.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from matlens.errors import InputError, checked
from matlens.models.layout import ModelLayout
from matlens.models.sites import POST_NORM

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

FFN_OUT, NORMED_OUT = "ffn_out", "ln2_post_out"  # what joins the stream; the second where a norm follows


@checked
@dataclass(frozen=True, eq=False)
class NormGain:
    """A norm without its scale and its bias: what it does to every addend of its input alike.

    RMS norms and layer norms give ``gain * (x - mean(x)) / size(x) + bias``, RMS norms without the mean. So
    an addend ``v`` of ``x`` reaches the output as ``gain * (v - mean(v))``, divided by the size of the whole.

    Attributes
    ----------
    gain
        What each coordinate is multiplied by, ``1 + weight`` in the norms of Gemma.
    centred
        Whether the mean is taken off.
    """

    gain: Float[Tensor, " d_model"]
    centred: bool

    @classmethod
    @torch.inference_mode()
    def from_module(cls, norm: nn.Module, width: int) -> NormGain:
        """Find the gain of a norm by what it makes of a few vectors, however it keeps its weights.

        Raises
        ------
        InputError
            It is neither an RMS norm nor a layer norm.
        """
        norm = copy.deepcopy(norm).float()
        device = next(norm.parameters(), torch.empty(0)).device  # some norms have no weights
        # Coordinates far from 0, whose mean is 0, so large that what is added to their size does not count.
        probe = torch.linspace(1, 2, width, device=device)
        probe[::2] *= -1
        probe = 1000 * (probe - probe.mean())
        bias = (norm(probe) + norm(-probe)) / 2
        gain = (norm(probe) - bias) * probe.square().mean().sqrt() / probe
        other = probe.roll(1) + torch.linspace(0, 1000, width, device=device)
        for centred in (False, True):
            candidate = cls(gain, centred)
            rest = candidate(other) / (other.std(correction=0) if centred else other.square().mean().sqrt())
            if torch.allclose(norm(other) - bias, rest, rtol=1e-3, atol=1e-4 * float(gain.abs().max())):
                return candidate
        raise InputError(
            f"What the norm {type(norm).__name__} does is not known. Expected an RMS norm or a layer norm. "
            "Please report the model."
        )

    def __call__(self, vectors: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """What becomes of addends, but for the size of the whole."""
        return self.gain * (vectors - vectors.mean(-1, keepdim=True) if self.centred else vectors)


class PlainNorm(nn.Module):
    """An RMS norm or a layer norm, made of its parameters alone."""

    def __init__(self, gain: Tensor, bias: Tensor | None, *, eps: float, centred: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(gain, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.eps, self.centred = eps, centred

    @classmethod
    @torch.inference_mode()
    def equal_to(cls, norm: nn.Module) -> PlainNorm | None:
        """The same norm in float32, equal bit by bit; None for other kinds of norms."""
        norm = copy.deepcopy(norm).float()
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
        if weight is None or eps is None:
            return None
        probe = torch.linspace(-3, 5, 4 * len(weight), device=weight.device).view(4, -1).sin()
        for gain, centred in itertools.product((weight, 1 + weight), (False, True)):
            plain = cls(gain.detach(), bias, eps=eps, centred=centred)
            if torch.equal(plain(probe), norm(probe)):
                return plain
        return None

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        if self.centred:
            return nn.functional.layer_norm(x, x.shape[-1:], self.gain, self.bias, self.eps)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain


class _LinearHead(nn.Module):
    """What vectors go through before the unembedding, its linear parts alone."""

    def __init__(self, dense: Tensor | None, gain: NormGain) -> None:
        super().__init__()
        self.dense, self.gain = None if dense is None else dense.detach().float(), gain

    def forward(self, vectors: Tensor) -> Tensor:
        return self.gain(vectors if self.dense is None else vectors @ self.dense.T)


def linear_head(dense: Tensor | None, norm: nn.Module, width: int) -> nn.Module:
    """The linear parts of a head: a dense layer, where there is one, and the gain of the final norm."""
    return _LinearHead(dense, NormGain.from_module(norm, width))


def output_kind(layout: ModelLayout) -> str:
    """Kind of the site at which what an FFN writes joins the stream: behind its own norm, if it has one."""
    return NORMED_OUT if NORMED_OUT in layout.kinds else FFN_OUT


def norm_after_ffn(model: TransformerBridge, layer: int) -> nn.Module:
    """The norm that an FFN's output goes through next: its own one, or the stream's in BERT."""
    layout, block = ModelLayout.from_model(model), model.blocks[layer]
    if NORMED_OUT in layout.kinds:
        return block.ln2_post.original_component
    if layout.wiring is POST_NORM:
        return block.ln2.original_component
    raise InputError(
        f"No norm follows the FFNs of {model.cfg.architecture} (its blocks are {layout.wiring.name})."
    )
