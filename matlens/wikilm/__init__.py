"""WikiLM: a model of words with adaptive input and softmax, and the checkpoints of it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
