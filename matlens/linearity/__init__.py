"""Which parts of a model are linear, and the cost of replacing them by maps."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
