"""What is linear inside a transformer, and what its feed-forward layers write."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from matlens.version import __version__

if TYPE_CHECKING:
    from matlens.activations import Activations, collect, stream
    from matlens.corpora import Corpus, load_corpus
    from matlens.errors import InputError
    from matlens.evaluation import fit_quality, prediction_quality
    from matlens.examples import Examples, make_examples, make_prompts
    from matlens.fitting import Moments, fit_samples, fit_stream
    from matlens.maps import LinearMap, MapSet
    from matlens.models import load
    from matlens.readout import Readout
    from matlens.sites import Site, anatomy

_HOMES = {
    "activations": ("Activations", "collect", "stream"),
    "corpora": ("Corpus", "load_corpus"),
    "errors": ("InputError",),
    "evaluation": ("fit_quality", "prediction_quality"),
    "examples": ("Examples", "make_examples", "make_prompts"),
    "fitting": ("Moments", "fit_samples", "fit_stream"),
    "maps": ("LinearMap", "MapSet"),
    "models": ("load",),
    "readout": ("Readout",),
    "sites": ("Site", "anatomy"),
}

__all__ = [
    "Activations",
    "Corpus",
    "Examples",
    "InputError",
    "LinearMap",
    "MapSet",
    "Moments",
    "Readout",
    "Site",
    "__version__",
    "anatomy",
    "collect",
    "fit_quality",
    "fit_samples",
    "fit_stream",
    "load",
    "load_corpus",
    "make_examples",
    "make_prompts",
    "prediction_quality",
    "stream",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: torch alone takes seconds, and ``--help`` needs none."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"matlens.{module}"), name)
    raise AttributeError(f"module 'matlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
