"""Corpora and samples, and the examples, prompts, pairs and images made from them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
