"""Linear maps, what least squares needs to know of samples, and the fits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
