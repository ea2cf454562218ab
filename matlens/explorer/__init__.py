"""A model looked at in a browser: a prompt through its lenses, its value vectors, and both of them live."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
