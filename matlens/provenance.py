"""Where a result came from, in words that go into every file that the project writes."""

from __future__ import annotations

import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matlens.models import fingerprint, unembed_hash
from matlens.version import __version__

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_LIBRARIES = ("torch", "transformers", "transformer-lens", "numpy", "scikit-learn")


def of_model(model: TransformerBridge) -> dict[str, Any]:
    """Name, revision and fingerprint of a model, and what shapes its stream has."""
    return {
        "base_model_name_or_path": model.cfg.model_name,
        "base_model_revision": getattr(model, "matlens_revision", None),
        "architecture": model.cfg.architecture,
        "fingerprint": fingerprint(model),
        "unembed_hash": unembed_hash(model),
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "n_layers": model.cfg.n_layers,
        "d_model": model.cfg.d_model,
    }


def of_software() -> dict[str, str]:
    """Versions of what computed the result."""
    own = {"matlens": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in _LIBRARIES}


def of_command() -> str:
    """The command line, as it could be typed again."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
