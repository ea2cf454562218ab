"""Leaving early by what feed-forward layers write, beside classifiers and a lens's confidence."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
