"""Which lens to use: all judged on the same tokens, and what each costs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
