"""Blocks left out, a linear map folded into the weights before them, and a plain Hugging Face model of it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
