"""What kinds of models differ in: experts of a mixture, stacks of an encoder-decoder, images for tokens."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
