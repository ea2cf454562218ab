"""How tests break off work that is being written to a folder."""

from __future__ import annotations

from typing import Any

import pytest

from matlens.storage.rows import RowFiles


def break_off_at(
    patch: pytest.MonkeyPatch,
    batch: int,
    error: type[BaseException] = KeyboardInterrupt,
    *,
    after: bool,
) -> None:
    """Raise when this batch is to be written, before or after it is."""
    write, written = RowFiles.write, [0]

    def breaking(self: RowFiles, index: Any, vectors: Any) -> None:
        if after or written[0] < batch:
            write(self, index, vectors)
        written[0] += 1
        if written[0] > batch:
            raise error

    patch.setattr(RowFiles, "write", breaking)
