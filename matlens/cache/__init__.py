"""What was worked out once from a model's files, kept on disk under the hash of their content."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
