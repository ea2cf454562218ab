"""Value vectors, updates, events, clusters, control of generation, and early exit by FFN updates."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
