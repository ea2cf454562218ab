"""One short pass when a model is loaded, compared with the Hugging Face model before it was wrapped."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from matlens.errors import InputError
from matlens.models.checkpoints import modality
from matlens.models.hooks import reading
from matlens.models.inputs import configured_image_shape
from matlens.models.sites import STREAM_HOOKS, block_hook
from matlens.models.weights import check_finite_weights
from matlens.numerics import without_autocast

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_LENGTH = 7  # tokens of a text
_FULL = (torch.float32, torch.float64)
_OFF, _OFF_IN_HALF = 1e-3, 0.1  # largest relative error of logits


class Probe(NamedTuple):
    """Arguments of a short pass, which of its tokens are no padding, and the plain model's logits."""

    first: Tensor
    others: dict[str, Tensor]
    present: Tensor | None
    logits: Tensor | None = None

    @classmethod
    @without_autocast()
    def from_plain(cls, hf_model: Any) -> Probe:
        """Run a model of transformers; raises InputError if it fails or its logits are not finite."""
        check_finite_weights(hf_model, str(hf_model.name_or_path))
        probe = cls.of_inputs(hf_model)
        try:
            with torch.no_grad():
                output = hf_model(**{hf_model.main_input_name: probe.first}, **probe.others)
        except Exception as error:
            raise InputError(_failed(hf_model, "transformers", hf_model.dtype, error)) from error
        logits = getattr(output, "logits", None)
        if logits is not None and not bool(probe.kept(logits).isfinite().all()):
            raise InputError(
                f"The logits of {type(hf_model).__name__} must be finite, got NaN or infinity in "
                f"{hf_model.dtype} from transformers alone. Load it in torch.bfloat16 or torch.float32."
            )
        # Falcon's eager attention adds ALiBi's distances twice, so it is not what a bridge must give.
        return probe if getattr(hf_model.config, "alibi", False) else probe._replace(logits=logits)

    @classmethod
    def of_inputs(cls, hf_model: Any) -> Probe:
        """The inputs for a model of transformers."""
        config, device = hf_model.config, next(hf_model.parameters()).device
        if modality(config) == "vision":
            images = torch.randn(
                2, *configured_image_shape(config), generator=torch.Generator().manual_seed(0)
            )
            return cls(images.to(device, hf_model.dtype), {}, None)
        n_tokens = int(getattr(config.get_text_config(decoder=True), "vocab_size", 2))
        tokens = (torch.arange(1, 2 * _LENGTH + 1, device=device) % n_tokens).view(2, _LENGTH)
        mask = torch.ones_like(tokens)
        mask[1, -2:] = 0  # as in a batch with a shorter text
        others = {"attention_mask": mask}
        if modality(config) == "seq2seq":
            others |= {"decoder_input_ids": tokens.flip(0), "decoder_attention_mask": mask}
        return cls(tokens, others, mask.bool())

    def kept(self, logits: Tensor) -> Tensor:
        """The logits without those of padding."""
        return logits if self.present is None else logits[self.present.to(logits.device)]


@without_autocast()
def check_pass(model: TransformerBridge, probe: Probe) -> None:
    """Raise InputError unless a bridge runs, has a residual stream, and has the plain model's logits."""
    kind = type(model.original_model).__name__
    if not hasattr(model, "blocks"):
        raise InputError(
            f"{kind} must have one list of blocks, and TransformerLens does not wrap it as one. Its layers "
            "cannot be read."
        )
    shapes: dict[str, Any] = {}
    names = [
        block_hook(layer, STREAM_HOOKS[end]) for layer in range(model.cfg.n_layers) for end in ("h", "next")
    ]

    def keep(value: Any, hook: Any) -> None:
        shapes[hook.name] = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__

    try:
        with torch.no_grad(), reading(model, [(name, keep) for name in names]):
            logits = model(probe.first, **probe.others, return_type="logits")
    except InputError:
        raise
    except Exception as error:
        raise InputError(_failed(model.original_model, "TransformerLens", model.cfg.dtype, error)) from error
    for name in names:
        shape = shapes.get(name, "nothing")
        if isinstance(shape, str) or len(shape) != 3 or shape[-1] != model.cfg.d_model:
            raise InputError(
                f"The residual stream of {kind} must have one vector of {model.cfg.d_model} dimensions for "
                f"each token, got {shape} at {name}. Its layers cannot be read."
            )
    if probe.logits is None:
        return
    ours, truth = (probe.kept(scores).cpu().double() for scores in (logits, probe.logits))
    kinds = {weight.dtype for weight in model.original_model.parameters() if weight.is_floating_point()}
    off, most = math.inf, _OFF if kinds <= {*_FULL} else _OFF_IN_HALF
    if ours.shape == truth.shape:
        size = (truth - truth.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(torch.finfo(truth.dtype).tiny)
        errors = (ours - truth).norm(dim=-1) / size
        # Rounding can send a token to other experts.
        off = float(errors.max() if most == _OFF else errors.median())
    if not off <= most:
        raise InputError(
            f"TransformerLens must compute {kind} as transformers does, and its logits in {model.cfg.dtype} "
            f"differ by {off:.1%}. Load it in torch.float32, or report the model."
        )


def _failed(hf_model: Any, library: str, dtype: Any, error: Exception) -> str:
    return (
        f"{type(hf_model).__name__} does not run in {library} in {dtype} on a few tokens: "
        f"{type(error).__name__}: {error}. Try another dtype, such as torch.float32."
    )
