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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from matlens.errors import InputError
from matlens.models.changes import changes_of
from matlens.models.weights import is_quantized, plain_model, plain_state

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_TOKENS = 32
_ROUNDING = 8  # times the precision of the numbers, of the length of all logits
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


@torch.inference_mode()
def check_plain_logits(model: TransformerBridge) -> None:
    """Raise InputError for a bridge that does not compute what transformers does when it loads the model.

    Only architectures whose bridges are known to differ are compared, by a pass of each over a few tokens. A
    bridge that is changed is meant to give other logits, and passes.
    """
    inner: Any = model.original_model
    if any(_has_distances(block) for block in _blocks(model)):
        reason = "attention counts the distances between tokens (ALiBi) in another way"
    elif getattr(inner.config, "new_decoder_architecture", False):
        reason = "attention takes queries, keys and values from other rows of the matrix that holds them all"
    else:
        return
    # Code that came with a model asks for anything, and quantized weights are not those that it is made with.
    ours = type(inner).__module__.startswith("transformers.") and not inner.training
    if not ours or is_quantized(model) or changes_of(model):
        return
    plain, state = plain_model(model, as_loaded=True), plain_state(model)
    if plain is None or len({tensor.device for tensor in state.values()}) > 1:
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
            f"few tokens differ, since {reason}. Load it with matlens.load(name); if this is said of such a "
            "model, please report it, with the versions of transformers and transformer_lens."
        )


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


def _has_distances(block: Any) -> bool:
    return type(getattr(block, "attn", None)).__name__ == _WITH_DISTANCES


def _unamended(model: Any) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Modules that have still to be put right, and the hook that does it."""
    for block in _blocks(model):
        attention: Any = getattr(block, "attn", None)
        hooks: list[tuple[Any, Callable[..., Any]]] = []
        if _has_distances(block):
            hooks = [(attention, count_once)]
        elif type(getattr(block, "original_component", None)).__module__ == _FIRST_GPT:
            hooks = [(attention, hide_later), (block, give_tuple)]
        for module, hook in hooks:
            if hook not in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                yield module, hook
