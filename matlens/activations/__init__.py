"""Vectors of any site, collected or streamed in one pass; attention sinks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
