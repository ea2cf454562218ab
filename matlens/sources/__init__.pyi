from .sources import SAMPLES as SAMPLES
from .sources import Source as Source
