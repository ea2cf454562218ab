"""Small language models made in minutes: text, training that goes on after a kill, and what to beat."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
