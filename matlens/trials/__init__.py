"""Pruned models on trial: what they lose and save, and ways of pruning side by side."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
