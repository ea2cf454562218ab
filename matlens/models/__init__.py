"""Loading a model, knowing which one it is and how it is wired, and reading it out."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
