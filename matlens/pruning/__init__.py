"""Blocks removed, maps folded into the weights, plain Hugging Face models of it, and their evaluation."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
