"""Pages for a browser, each one file that needs nothing else: data in, HTML out, nothing computed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
