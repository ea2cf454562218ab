"""Where sentences come from: files of any packing, samples in packages, and datasets; none is trusted."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
