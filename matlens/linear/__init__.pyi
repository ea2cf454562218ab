from .fitting import fit_rows as fit_rows
from .fitting import fit_samples as fit_samples
from .fitting import fit_stream as fit_stream
from .maps import LinearMap as LinearMap
from .mapsets import MapSet as MapSet
from .mapsets import write_maps as write_maps
from .moments import Moments as Moments
from .pairs import resolve_pairs as resolve_pairs
