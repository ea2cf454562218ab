"""How tests interrupt work that is being written to a folder."""

from __future__ import annotations

from typing import Any

import pytest

from matlens.io.artifact import Artifact


def break_off_at(
    patch: pytest.MonkeyPatch, number: int, error: type[BaseException] = KeyboardInterrupt, *, after: bool
) -> None:
    """Raise when this file of tensors is to be written, before or after it is."""
    write, written = Artifact.write, [0]

    def breaking(self: Artifact, name: str, tensors: Any) -> None:
        if after or written[0] < number:
            write(self, name, tensors)
        written[0] += 1
        if written[0] > number:
            raise error

    patch.setattr(Artifact, "write", breaking)
