"""What all commands, and analyses as scripts, have in common: options, groups of them, printing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
