"""What models read besides sentences: pairs of a source and a target, and images."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
