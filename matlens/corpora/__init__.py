"""Sentences, which tokens they become, in which batches they are read, and how words are used in them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
