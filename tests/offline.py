"""A machine without a network."""

from __future__ import annotations

import socket
from typing import Any

import huggingface_hub.constants
import pytest


def refuse_connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse every connection, and list those that are tried."""
    tried: list[str] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tried.append(repr(args))
        raise OSError("there is no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tried
