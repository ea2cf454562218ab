"""Models by name or as bridges, as they are: raw weights, and text as their own tokenizers read it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
