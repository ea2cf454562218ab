"""What a model's weights say without the model being built: value vectors, and how they are read."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
