"""The read-out ``delta``: from a vector that stands for ``h^L`` to a distribution over the vocabulary."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from matlens.errors import InputError
from matlens.models.anatomy import Anatomy
from matlens.models.changes import reading
from matlens.models.identity import require_raw
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
class Readout:
    """What the model does after its last block, alone and in float32.

    For decoders the final norm and the unembedding; for masked-LM models the whole head (dense,
    activation, norm, decoder and its bias). Logit scaling and soft capping are part of it
    (paper A, Eq. 2; BERT: section 4.2). A half-precision model is read out in float32 too, with its
    own weights.

    Raises
    ------
    InputError
        The model has no head, or read out this way ``h^L`` does not give the model's own logits.
    """

    def __init__(self, model: TransformerBridge) -> None:
        require_raw(model)
        if not hasattr(model, "unembed"):
            raise InputError(
                "This model has no unembedding, so there is nothing to read out. Load it with its "
                "language-model head (a ...ForCausalLM or ...ForMaskedLM checkpoint)."
            )
        self.tokenizer = model.tokenizer
        self.device = torch.device(model.cfg.device)
        self._head = nn.Sequential(*(_float32(module) for module in _head_modules(model)))
        self._scale, self._cap = _scaling(model)
        self._agrees_with(model)

    @torch.inference_mode()
    def logits(self, h: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_vocab"]:
        """Scores of all tokens for vectors that stand for ``h^L``, in float32 on the model's device."""
        logits = self._head(h.to(self.device, torch.float32))
        if self._scale != 1:
            logits = logits * self._scale
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits

    def log_probs(self, h: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_vocab"]:
        """Natural logarithms of ``delta(h)``."""
        return self.logits(h).log_softmax(-1)

    def top_tokens(self, h: Float[Tensor, " d_model"], k: int = 5) -> list[tuple[str, float]]:
        """The ``k`` most probable tokens of ``delta(h)`` and their probabilities, the most probable first."""
        probability, token = self.log_probs(h).exp().topk(k)
        return [
            (self.tokenizer.decode([t]), p) for t, p in zip(token.tolist(), probability.tolist(), strict=True)
        ]

    def _agrees_with(self, model: TransformerBridge) -> None:
        tokens = torch.arange(1, 9, device=self.device)[None] % model.cfg.d_vocab
        seen: list[Tensor] = []
        last = Anatomy.from_model(model).hook(model.cfg.n_layers)
        with torch.inference_mode(), reading(model, [(last, lambda h, hook: seen.append(h))]):
            truth = model(tokens, return_type="logits").float()
        ours = self.logits(seen[0])
        # The model may compute in half precision what is done in float32 here.
        slack = max(1e-4, 4 * torch.finfo(seen[0].dtype).eps) * truth.abs().max()
        if ours.shape != truth.shape or (ours - truth).abs().max() > slack:
            raise InputError(
                f"The read-out of {model.cfg.architecture} is not known: final norm and unembedding do "
                "not give the model's own logits. Please report the model."
            )


def _head_modules(model: TransformerBridge) -> list[nn.Module]:
    if hasattr(model, "mlm_head"):
        try:
            transform = model.original_model.cls.predictions.transform
        except AttributeError:
            raise InputError(
                f"The masked-LM head of {model.cfg.architecture} is not known; BERT's is."
            ) from None
        return [
            model.mlm_head.original_component,
            _Activation(transform.transform_act_fn),
            model.ln_final.original_component,
            model.unembed.original_component,
        ]
    norm = [model.ln_final.original_component] if hasattr(model, "ln_final") else []
    return [*norm, model.unembed.original_component]


class _Activation(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _float32(module: nn.Module) -> nn.Module:
    if all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        return module
    return copy.deepcopy(module).float()


def _scaling(model: TransformerBridge) -> tuple[float, float | None]:
    """Factor on the logits, and the soft cap after it."""
    config = model.original_model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
    cap = getattr(config, "final_logit_softcapping", None)
    return scale, float(cap) if cap else None
