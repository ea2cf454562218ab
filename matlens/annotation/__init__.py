"""What people or a corpus judge: concepts of value vectors, and whether predictions fit."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
