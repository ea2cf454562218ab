"""Computations on plain tensors: float64 everywhere, its products by float32, tokens on top, clusters."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
