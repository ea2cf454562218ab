"""Repositories of the Hugging Face hub: files put there in one commit, and read at a commit that is named."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
