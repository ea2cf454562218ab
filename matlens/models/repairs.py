"""Bridges that compute something else than the model in them, repaired by hooks or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.func import functional_call

from matlens.errors import InputError
from matlens.models.changes import changes_of
from matlens.models.registry import Family, Repair, ask, families
from matlens.models.weights import is_quantized, plain_model, plain_state

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_TOKENS = 32
_ROUNDING = 8  # times the precision of the weights, relative to the length of all logits


def repair(model: TransformerBridge) -> None:
    """Add the hooks that families ask for; a second call changes nothing."""
    for module, hook, after in list(_missing(model)):
        if after:
            module.register_forward_hook(hook)
        else:
            module.register_forward_pre_hook(hook, with_kwargs=True)


def is_repaired(model: TransformerBridge) -> bool:
    """Whether no hook is missing."""
    return next(_missing(model), None) is None


def _missing(model: TransformerBridge) -> Iterator[Repair]:
    for family in families():
        for needed in family.repairs(model):
            hooks = (*needed.module._forward_pre_hooks.values(), *needed.module._forward_hooks.values())
            if needed.hook not in hooks:
                yield needed


@torch.inference_mode()
def check_logits(model: TransformerBridge) -> None:
    """Raise InputError for a bridge whose logits differ from those of transformers.

    Only where a family says that they may differ, since it takes two passes; a bridge that was changed is
    meant to give others.
    """
    reason, inner = ask(Family.logits_differ, model), model.original_model
    # Code that came with a model asks for anything, and quantized weights are not those of the configuration.
    ours = type(inner).__module__.startswith("transformers.") and not inner.training
    if reason is None or not ours or is_quantized(model) or changes_of(model):
        return
    plain, state = plain_model(model, as_loaded=True), plain_state(model)
    if plain is None or len({tensor.device for tensor in state.values()}) > 1:
        return
    names = [name for name, _ in (*plain.named_parameters(), *plain.named_buffers())]
    tokens = torch.arange(1, _TOKENS + 1, device=model.cfg.device)[None] % model.cfg.d_vocab
    given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    truth = functional_call(plain.eval(), {name: state[name] for name in names}, (), given).logits
    logits = model(tokens, return_type="logits")
    slack = max(1e-4, _ROUNDING * torch.finfo(inner.dtype).eps)
    if not bool((logits.float() - truth.float()).norm() <= slack * truth.float().norm()):
        raise InputError(
            f"TransformerLens does not compute {model.cfg.model_name} as transformers does: the logits of a "
            f"few tokens differ, since {reason}. Load it with matlens.load(name); if this is said of such a "
            "model, please report it, with the versions of transformers and transformer_lens."
        )
