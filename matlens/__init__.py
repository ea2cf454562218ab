"""What is linear inside a transformer, and what its feed-forward layers write."""

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
from matlens.version import __version__

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
