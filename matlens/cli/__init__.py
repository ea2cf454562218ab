"""The command line: thin commands, shared options, and analyses as scripts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
