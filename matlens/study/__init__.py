"""One model on one corpus: what all analyses of the pair share, made once."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
