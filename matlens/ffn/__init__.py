"""What feed-forward layers write: value vectors, updates, events, clusters, and exits by them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
