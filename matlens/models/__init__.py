"""Which model it is, how it is wired, what is changed in it, and how it is read out."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
