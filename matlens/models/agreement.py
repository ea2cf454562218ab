"""Whether a bridge gives the logits of the plain model, where it is known that it may not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.func import functional_call

from matlens.errors import InputError
from matlens.models.changes import changes_of
from matlens.models.families.bridging import may_differ
from matlens.models.weights import is_quantized, plain_model, plain_state

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_TOKENS = 32
_ROUNDING = 8  # times the precision of the numbers, of the length of all logits


@torch.inference_mode()
def check_plain_logits(model: TransformerBridge) -> None:
    """Refuse a bridge that does not compute what transformers does when it loads the model.

    It is shown by a pass of each over a few tokens, for kinds of models whose bridges are known to differ. A
    bridge that is changed is meant to give other logits, and passes.

    Raises
    ------
    InputError
        The logits differ by more than rounding.
    """
    reason = may_differ(model)
    if not reason or changes_of(model):
        return
    inner = model.original_model
    # Code that came with a model asks for anything, and quantized weights are not those that it is made with.
    ours = type(inner).__module__.startswith("transformers.") and not inner.training
    plain = plain_model(model, as_loaded=True) if ours and not is_quantized(model) else None
    if plain is None:
        return
    state = plain_state(model)
    if len({tensor.device for tensor in state.values()}) > 1:
        return
    names = [name for name, _ in (*plain.named_parameters(), *plain.named_buffers())]
    tokens = torch.arange(1, _TOKENS + 1, device=model.cfg.device)[None] % model.cfg.d_vocab
    given = {"input_ids": tokens, "use_cache": False}
    truth = functional_call(plain.eval(), {name: state[name] for name in names}, (), given).logits
    logits = model(tokens, return_type="logits")
    slack = max(1e-4, _ROUNDING * torch.finfo(inner.dtype).eps)
    if not bool((logits.float() - truth.float()).norm() <= slack * truth.float().norm()):
        raise InputError(
            f"TransformerLens does not compute {model.cfg.model_name} as transformers does: the logits of a "
            f"few tokens differ, since {reason}. So nothing that is measured here would be of the published "
            "model. Load it with matlens.load(name); if this is said of such a model, please report it, with "
            "the versions of transformers and transformer_lens."
        )
