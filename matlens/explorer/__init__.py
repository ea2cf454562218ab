"""Explore a model in the browser: prompts through lenses, value vectors, and live."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
