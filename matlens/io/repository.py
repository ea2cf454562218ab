"""A repository of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matlens.errors import InputError, short

PATIENCE = 20.0  # seconds for the hub to answer a read


@dataclass(frozen=True)
class HubRepository:
    """A repository of models, by default on the Hugging Face hub with the token of its own client."""

    name: str
    endpoint: str | None = None
    token: str | None = None

    @contextmanager
    def client(self, purpose: str) -> Iterator[Any]:
        """The hub's client; any failure is an InputError. ``purpose`` is such as "read"."""
        from huggingface_hub import HfApi

        try:
            yield HfApi(endpoint=self.endpoint, token=self.token)
        except Exception as error:  # of the hub's client or of the HTTP library that it uses
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise InputError(
                f"The repository {short(self.name)} cannot be {purpose}: {reason} Check its name and "
                "revision, your token ('hf auth login' or HF_TOKEN) and the network, or use a folder on disk."
            ) from error
