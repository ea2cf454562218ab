"""What bridges of TransformerLens do otherwise than the models in them, put right.

Falcon with ALiBi puts the distances between tokens into its attention mask before its blocks run, and the
bridge's own attention adds them to that mask once more: the distances count twice. So does transformers'
``eager`` attention; ``sdpa``, which it takes by default, counts them once, as the model was trained.

The blocks of OpenAI's first GPT give lists, which a bridge hands on without its hook for what a block gives.
The mask that they are given hides padding alone, and the model's own attention hides later tokens besides.
The bridge's attention takes a mask for the whole truth: with one, tokens would see those behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_WITH_DISTANCES = "ALiBiJointQKVAttentionBridge"  # the class of TransformerLens
_FIRST_GPT = "transformers.models.openai.modeling_openai"


def amend(model: Any) -> None:
    """Let a bridge compute what the model in it does, and its hooks see it; nothing is done twice."""
    for module, hook in list(_unamended(model)):
        if hook is give_tuple:
            module.register_forward_hook(hook)
        else:
            module.register_forward_pre_hook(hook, with_kwargs=True)


def is_amended(model: Any) -> bool:
    """Whether there is nothing to put right, or it was."""
    return next(_unamended(model), None) is None


def has_distances(model: Any) -> bool:
    """Whether attention's mask holds the distances between tokens, which the bridge could count twice."""
    return any(type(getattr(block, "attn", None)).__name__ == _WITH_DISTANCES for block in _blocks(model))


def may_differ(model: Any) -> str:
    """Why a bridge may compute something else than its model, in words; empty where nothing is known."""
    if has_distances(model):
        return "attention counts the distances between tokens (ALiBi) in another way"
    if getattr(model.original_model.config, "new_decoder_architecture", False):
        return "attention takes queries, keys and values from other rows of the matrix that holds them all"
    return ""


def count_once(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Take the distances from attention where the mask holds them: then they have an axis more."""
    alibi = kwargs.get("alibi")
    return (args, {**kwargs, "alibi": None}) if isinstance(alibi, Tensor) and alibi.ndim == 4 else None


def hide_later(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Let a mask that hides the same from every token hide those behind it too."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape[-2] != 1:
        return None
    length = mask.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return args, {**kwargs, "attention_mask": mask.masked_fill(later, torch.finfo(mask.dtype).min)}


def give_tuple(module: Any, args: Any, output: Any) -> Any:
    """Send what a block gives through its hook, out of a list, and give it as other blocks do."""
    return (module.hook_out(output[0]), *output[1:]) if isinstance(output, list) else None


def _blocks(model: Any) -> Any:
    """The blocks of a bridge; an encoder-decoder, which has them by stack, has none of these kinds."""
    return getattr(model, "blocks", ())


def _unamended(model: Any) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Modules that have still to be put right, and the hook that does it."""
    for block in _blocks(model):
        attention: Any = getattr(block, "attn", None)
        hooks: list[tuple[Any, Callable[..., Any]]] = []
        if type(attention).__name__ == _WITH_DISTANCES:
            hooks = [(attention, count_once)]
        elif type(getattr(block, "original_component", None)).__module__ == _FIRST_GPT:
            hooks = [(attention, hide_later), (block, give_tuple)]
        for module, hook in hooks:
            if hook not in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                yield module, hook
