"""Linear maps between the layers of a transformer, and FFN outputs as value vectors."""

from importlib.metadata import version

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = version("matlens")
