"""What is linear inside a transformer, and what its feed-forward layers write."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from matlens.version import __version__

if TYPE_CHECKING:
    from matlens.activations import Activations
    from matlens.collecting import collect, stream
    from matlens.corpora import Corpus, load_corpus
    from matlens.errors import InputError
    from matlens.evaluation import fit_quality, prediction_quality
    from matlens.examples import Examples, make_examples, make_prompts
    from matlens.exits import early_exit
    from matlens.fitting import fit_samples, fit_stream
    from matlens.maps import LinearMap, MapSet
    from matlens.models import load
    from matlens.moments import Moments
    from matlens.patching import patched
    from matlens.readout import Readout
    from matlens.replacements import Replacement, jump, mat_attn, mat_ffn, mat_ln1_ln2
    from matlens.schemes import Scheme
    from matlens.sinks import find_sinks, sink_rows
    from matlens.sites import Site
    from matlens.submodules import fit_submodules, submodule_pairs
    from matlens.wiring import anatomy

_HOMES = {
    "activations": ("Activations",),
    "collecting": ("collect", "stream"),
    "corpora": ("Corpus", "load_corpus"),
    "errors": ("InputError",),
    "evaluation": ("fit_quality", "prediction_quality"),
    "examples": ("Examples", "make_examples", "make_prompts"),
    "exits": ("early_exit",),
    "fitting": ("fit_samples", "fit_stream"),
    "maps": ("LinearMap", "MapSet"),
    "models": ("load",),
    "moments": ("Moments",),
    "patching": ("patched",),
    "replacements": ("Replacement", "jump", "mat_attn", "mat_ffn", "mat_ln1_ln2"),
    "readout": ("Readout",),
    "schemes": ("Scheme",),
    "sinks": ("find_sinks", "sink_rows"),
    "sites": ("Site",),
    "submodules": ("fit_submodules", "submodule_pairs"),
    "wiring": ("anatomy",),
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
    "Replacement",
    "Scheme",
    "Site",
    "__version__",
    "anatomy",
    "collect",
    "early_exit",
    "find_sinks",
    "fit_quality",
    "fit_samples",
    "fit_stream",
    "fit_submodules",
    "jump",
    "load",
    "load_corpus",
    "make_examples",
    "make_prompts",
    "mat_attn",
    "mat_ffn",
    "mat_ln1_ln2",
    "patched",
    "prediction_quality",
    "sink_rows",
    "stream",
    "submodule_pairs",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: torch alone takes seconds, and ``--help`` needs none."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"matlens.{module}"), name)
    raise AttributeError(f"module 'matlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
