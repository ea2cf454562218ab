"""One pass over the examples gives the vectors of every chosen site, kept or streamed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
