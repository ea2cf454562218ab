"""Several processes that share the work of one: who there is, and what they hand each other."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
